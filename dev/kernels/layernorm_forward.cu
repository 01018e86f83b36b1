// Layer normalization, forward, from one thread per row to rows in shared memory. LayernormForward
// in layers.py launches these rungs, README.md says how they are checked and timed, RESULTS.md has
// what each measured.
//
//     out = (inp - mean) * rstd * weight + bias                                               out =, mean =, rstd =
//
// inp, out (N,C), inp of the residual stream's type; mean, rstd (N) float32; weight, bias (C).
// Bound by bytes: a row is read once and written once. The live rung is residual_layernorm_forward
// of kernels/layernorm.cu: a row stays in the registers of one warp (or several) from its only read
// to its write, and the addition to the residual stream before it needs no extra pass (on an H200,
// 0.054 ms for both, where an addition and a layernorm took 0.068).

#include "common.cuh"

__device__ inline float rstd_of(float variance) { return 1.0f / sqrtf(variance + 1e-5f); }

// One element of the result.
__device__ inline void normalize(element* out, const residual_element* inp, const element* weight,
                                 const element* bias,
                                 int64 start, int c, float m, float r) {
    from_float(out[start + c],
               (to_float(inp[start + c]) - m) * r * to_float(weight[c]) + to_float(bias[c]));
}

// thread_a_row. The three loops of the formula, one thread per row. Neighboring threads are a row
// apart, so that each access of a warp touches 32 cache lines for 32 elements; and there are only N
// threads.
extern "C" __global__ void __launch_bounds__(1024)
layernorm_forward_thread_a_row(element* out, float* mean, float* rstd, const residual_element* inp,
                               const element* weight, const element* bias, int N) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const int64 start = int64(row) * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < C; c++) sum += to_float(inp[start + c]);
    const float m = sum / C;
    for (int c = 0; c < C; c++)
        squares += (to_float(inp[start + c]) - m) * (to_float(inp[start + c]) - m);
    const float r = rstd_of(squares / C);
    for (int c = 0; c < C; c++) normalize(out, inp, weight, bias, start, c, m, r);
    mean[row] = m;
    rstd[row] = r;
}

// warp_a_row. The 32 threads of a warp share a row: accesses are coalesced, and shuffles add up its
// parts of the sums, without barriers or shared memory. The second and third read of the row hit
// the L1 cache. So one read for both sums, with the variance as E[x^2] - E[x]^2, takes as long; and
// where a row's mean is a thousand times its spread, float32 has nothing left of that difference.
extern "C" __global__ void __launch_bounds__(1024)
layernorm_forward_warp_a_row(element* out, float* mean, float* rstd, const residual_element* inp,
                             const element* weight, const element* bias, int N) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const int64 start = int64(row) * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane; c < C; c += 32) sum += to_float(inp[start + c]);
    const float m = warp_sum(sum) / C;
    for (int c = lane; c < C; c += 32)
        squares += (to_float(inp[start + c]) - m) * (to_float(inp[start + c]) - m);
    const float r = rstd_of(warp_sum(squares) / C);
    for (int c = lane; c < C; c += 32) normalize(out, inp, weight, bias, start, c, m, r);
    if (lane == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

// shared_memory. One warp per row with 16-byte accesses: an eighth (bfloat16) or a quarter of the
// load instructions. The row stays in shared memory between the passes, so that nothing depends on
// the L1 cache keeping it; weight and bias are stored there once for all rows of the block. Dynamic
// shared memory: (2 + warps of the block) * C elements.
extern "C" __global__ void __launch_bounds__(1024)
layernorm_forward_shared_memory(element* out, float* mean, float* rstd, const residual_element* inp,
                                const element* weight, const element* bias, int N) {
    extern __shared__ uint4 shared[];
    element* const w = reinterpret_cast<element*>(shared);
    element* const b = w + C;
    residual_element* const x = reinterpret_cast<residual_element*>(b + C) + threadIdx.x / 32 * C;
    for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
        store(w + c, load(weight + c));
        store(b + c, load(bias + c));
    }
    __syncthreads();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const int64 start = int64(row) * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane * PACK; c < C; c += 32 * PACK) {
        const Floats v = load(inp + start + c);
        store(x + c, v);
        for (int k = 0; k < PACK; k++) sum += v.x[k];
    }
    const float m = warp_sum(sum) / C;
    for (int c = lane * PACK; c < C; c += 32 * PACK) {  // each thread reads what it wrote itself
        const Floats v = load(x + c);
        for (int k = 0; k < PACK; k++) squares += (v.x[k] - m) * (v.x[k] - m);
    }
    const float r = rstd_of(warp_sum(squares) / C);
    for (int c = lane * PACK; c < C; c += 32 * PACK) {
        Floats v = load(x + c);
        const Floats scale = load(w + c), shift = load(b + c);
        for (int k = 0; k < PACK; k++) v.x[k] = (v.x[k] - m) * r * scale.x[k] + shift.x[k];
        store(out + start + c, v);
    }
    if (lane == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}
