// The norm of the gradient, before the square root. RESULTS.md has what each rung measured.
//
//     squares = the sum of grads[i]^2                                                                squares =
//
// grads (N); squares (1) float32. Bound by bytes: every gradient is read once. The live rung is global_norm of
// kernels/update.cu, the first of two stages; prepare_update adds up its partial sums, along with everything else that
// is done once per step.

#include "common.cuh"

// The sum over the block, whose threads are a multiple of 32; every thread gets it.
__device__ inline float block_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f);
}

// One thread's part of the sum, 16 bytes at a time, in a grid-stride loop.
__device__ inline float thread_part(const gradient* grads, int64 N) {
    float sum = 0.0f;
    const int64 stride = int64(gridDim.x) * blockDim.x * PACK;
#pragma unroll 4
    for (int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK; i < N; i += stride) {
        const Floats g = load(grads + i);
        for (int k = 0; k < PACK; k++) sum += g.x[k] * g.x[k];
    }
    return sum;
}

// atomics_a_thread. As many threads as the GPU holds, each of which adds its part to one address, one after the other.
// (An atomic addition for each element would not only be slower: a float32 sum of ones stops growing at 2^24.) squares
// must be 0.
extern "C" __global__ void __launch_bounds__(1024)
global_norm_atomics_a_thread(float* squares, const gradient* grads, int64 N) {
    atomicAdd(squares, thread_part(grads, N));
}

// atomics_a_block. The block adds up its parts first: one atomic addition per block instead of per thread, up to a
// thousand times fewer to wait for. squares must be 0.
extern "C" __global__ void __launch_bounds__(1024)
global_norm_atomics_a_block(float* squares, const gradient* grads, int64 N) {
    const float sum = block_sum(thread_part(grads, N));
    if (threadIdx.x == 0) atomicAdd(squares, sum);
}

// two_stages. No atomics: each block writes its sum to partials (gridDim.x), and one block adds those up in a fixed
// order. One more launch makes it a little slower than atomics_a_block, but the result can be compared bit for bit.
extern "C" __global__ void __launch_bounds__(1024)
global_norm_partials(float* partials, const gradient* grads, int64 N) {
    const float sum = block_sum(thread_part(grads, N));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// The second stage, also of the live rung: one block.
extern "C" __global__ void __launch_bounds__(1024) global_norm_total(float* squares, const float* partials, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *squares = sum;
}
