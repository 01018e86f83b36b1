// The gradient of a bias: column sums of a gradient. RESULTS.md has what each rung measured.
//
//     dbias[c] = the sum over n of dout[n,c]                                                         dbias =
//
// dout (N,OC), OC = 4C as after the MLP's first matmul; dbias (OC) float32. Bound by bytes: dout is read once, next to
// nothing is written. The live way costs nearly nothing: kernels that have dout in registers anyway (gelu_backward,
// layernorm_backward, attention's) write one row of sums per block, and kernels/column_sums.cu adds those up for all
// biases in one launch: the second stage below.

#include "common.cuh"

constexpr int OC = 4 * C;
constexpr int MAX_WARPS = 32;

static_assert(OC % 32 == 0, "a warp takes 32 columns");

// The sum of one column over rows first, first + step, ...
__device__ inline float column_part(const element* dout, int c, int first, int step, int end) {
    float sum = 0.0f;
    for (int n = first; n < end; n += step) sum += to_float(dout[int64(n) * OC + c]);
    return sum;
}

// The sums over the block's warps, each of the same 32 columns; warp 0 gets them.
__device__ inline float add_warps(float sum) {
    __shared__ float sums[MAX_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return 0.0f;
    for (int w = 1; w < blockDim.x / 32; w++) sum += sums[w][lane];
    return sum;
}

// thread_a_column. Coalesced reads, but OC threads are far too few to keep the memory busy.
extern "C" __global__ void __launch_bounds__(1024)
bias_gradient_thread_a_column(float* dbias, const element* dout, int N) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < OC) dbias[c] = column_part(dout, c, 0, 1, N);
}

// shared_memory. A block takes 32 columns; each of its warps sums every blockDim.x / 32-th row, and shared memory
// combines them: up to 32 times as many threads. But OC / 32 blocks are fewer than an H200 has multiprocessors, and the
// compiler, which no longer knows the step from row to row, leaves one load per iteration, where thread_a_column has
// 16: only large blocks are faster. Grid (OC / 32).
extern "C" __global__ void __launch_bounds__(1024)
bias_gradient_shared_memory(float* dbias, const element* dout, int N) {
    const int c = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32;
    const float sum = add_warps(column_part(dout, c, warp, blockDim.x / 32, N));
    if (warp == 0) dbias[c] = sum;
}

// atomics. The same with the rows divided among many blocks, which fills the GPU: grid (OC / 32, parts of the rows).
// Each block adds its sums to dbias atomically, in no fixed order. It is slower in bfloat16 than in float32, with half
// the bytes: a thread loads 2 of them per iteration of a loop that the compiler unrolls only in float32. dbias must be
// 0.
extern "C" __global__ void __launch_bounds__(1024) bias_gradient_atomics(float* dbias, const element* dout, int N) {
    const int c = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rows = (N + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * rows, end = min(N, begin + rows);
    const float sum = add_warps(column_part(dout, c, begin + warp, blockDim.x / 32, end));
    if (warp == 0) atomicAdd(dbias + c, sum);
}

// two_stages. Each block stores its sums in a row of `partials` (gridDim.y, OC) instead; the live column_sums adds
// those up in a fixed order. And each thread loads 16 bytes at a time, four loads in flight: a block takes 32 packs of
// columns. That is what bfloat16 lacked; in float32, it is no faster than atomics, only the same in every run. Grid (OC
// / (32 * PACK) rounded up, parts of the rows).
extern "C" __global__ void __launch_bounds__(1024)
bias_gradient_two_stages(float* partials, const element* dout, int N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = (blockIdx.x * 32 + lane) * PACK;
    const int rows = (N + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * rows, end = min(N, begin + rows);
    Floats sum = {};
    if (c < OC) {
#pragma unroll 4
        for (int n = begin + warp; n < end; n += blockDim.x / 32) {
            const Floats d = load(dout + int64(n) * OC + c);
            for (int k = 0; k < PACK; k++) sum.x[k] += d.x[k];
        }
    }
    __shared__ Floats sums[MAX_WARPS][32];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= OC) return;
    for (int w = 1; w < blockDim.x / 32; w++) {
        for (int k = 0; k < PACK; k++) sum.x[k] += sums[w][lane].x[k];
    }
    store(partials + int64(blockIdx.y) * OC + c, sum);
}
