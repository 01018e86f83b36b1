// Layer normalization, backward: one result for each element, and two sums over all rows.
// RESULTS.md has what each rung measured.
//
//     with n = (inp - mean) * rstd and dn = dout * weight, over each row,
//     dinp += rstd * (dn - mean(dn) - n * mean(dn * n));  dweight = the sum over rows of dout * n, dbias = that of dout
//
// dinp, dout, inp (N,C), inp of the residual stream's type; mean, rstd (N), dweight, dbias (C)
// float32; weight (C). Bound by bytes: three rows read, one written. The rungs differ in how the
// rows of different threads are combined in dweight and dbias. The live rung is layernorm_backward
// of kernels/layernorm.cu with column_sums.cu: rows and sums stay in registers, while the next rows
// are copied to shared memory; each block writes one row of sums, and a second kernel adds those
// up. No atomics, and the same bits in every run.

#include "common.cuh"

// The two sums over a row that dinp needs, of dn and of dn * n; here, one element's part of them.
struct Sums {
    float dn, dn_n;
};

__device__ inline void add(Sums& sums, float dout, float n, float weight) {
    sums.dn += dout * weight;
    sums.dn_n += dout * weight * n;
}

__device__ inline float gradient_of(const Sums& sums, float dout, float n, float weight,
                                    float rstd) {
    return rstd * (dout * weight - sums.dn / C - n * sums.dn_n / C);
}

// A row by one thread or by one warp (LANES: 1, 32): writes dinp, and adds each element's part of
// dweight and dbias atomically.
template <int LANES>
__device__ inline void add_row(element* dinp, float* dweight, float* dbias, const element* dout,
                               const residual_element* inp, const element* weight,
                                   const float* mean, const float* rstd,
                               int row) {
    const int64 start = int64(row) * C;
    const int lane = threadIdx.x % LANES;
    const float m = mean[row], r = rstd[row];
    Sums sums = {};
    for (int c = lane; c < C; c += LANES)
        add(sums, to_float(dout[start + c]), (to_float(inp[start + c]) - m) * r,
                                              to_float(weight[c]));
    if (LANES > 1) sums = {warp_sum(sums.dn), warp_sum(sums.dn_n)};
    for (int c = lane; c < C; c += LANES) {
        const float d = to_float(dout[start + c]), n = (to_float(inp[start + c]) - m) * r;
        atomicAdd(dweight + c, d * n);
        atomicAdd(dbias + c, d);
        from_float(dinp[start + c],
                   to_float(dinp[start + c]) + gradient_of(sums, d, n, to_float(weight[c]), r));
    }
}

// thread_a_row. A thread loops over its row twice, and adds each element's part of dweight and
// dbias atomically: N additions to each of C addresses, serialized in the L2 cache. dweight and
// dbias must be 0.
extern "C" __global__ void __launch_bounds__(1024)
layernorm_backward_thread_a_row(element* dinp, float* dweight, float* dbias, const element* dout,
                                const residual_element* inp, const element* weight,
                                    const float* mean,
                                const float* rstd, int N) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    add_row<1>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, row);
}

// atomics. One warp per row: reads are coalesced, and the additions of a warp go to neighboring
// addresses, where those of thread_a_row all go to the same one. But there are as many additions as
// before, and they are the bottleneck: half the bytes in bfloat16 save next to nothing.
extern "C" __global__ void __launch_bounds__(1024)
layernorm_backward_atomics(element* dinp, float* dweight, float* dbias, const element* dout,
                           const residual_element* inp, const element* weight, const float* mean,
                               const float* rstd,
                           int N) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row < N) add_row<32>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, row);
}

// shared_memory. A block takes many rows, one per warp at a time, and its warps add up in shared
// memory, where atomics only collide with those of the same block. Each block then adds 2 C sums to
// memory, instead of 2 C per row: the larger the block, the fewer. Any number of blocks; dynamic
// shared memory: 2 * C floats.
extern "C" __global__ void __launch_bounds__(1024)
layernorm_backward_shared_memory(element* dinp, float* dweight, float* dbias, const element* dout,
                                 const residual_element* inp, const element* weight,
                                     const float* mean,
                                 const float* rstd, int N) {
    extern __shared__ float block_sums[];  // of dweight, of dbias
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) block_sums[c] = 0.0f;
    __syncthreads();
    const int warps = blockDim.x / 32;
    for (int row = blockIdx.x * warps + threadIdx.x / 32; row < N; row += gridDim.x * warps) {
        add_row<32>(dinp, block_sums, block_sums + C, dout, inp, weight, mean, rstd, row);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        atomicAdd(dweight + c, block_sums[c]);
        atomicAdd(dbias + c, block_sums[C + c]);
    }
}
