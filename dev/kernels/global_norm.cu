// The norm of the gradient, before its root. RESULTS.md has what each version
// measured.
//
//     squares = the sum of grads[i]^2                                                                squares =
//
// grads (N); squares (1) float32. Bound by bytes: every gradient comes in once. The live version is global_norm of
// kernels/update.cu, the first of two stages, whose partial sums prepare_update adds up together with all else that a
// step needs once.

#include "common.cuh"
#include "block.cuh"

// The share of one thread of the grid, 16 bytes at a time.
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

// atomics_a_thread. As many threads as the GPU holds, and each adds its share to one address, one after the other. (An
// atomic addition for each element would not only be slower: a float32 sum of 2^24 ones grows no further.) squares must
// be 0.
extern "C" __global__ void __launch_bounds__(1024)
global_norm_atomics_a_thread(float* squares, const gradient* grads, int64 N) {
    atomicAdd(squares, thread_part(grads, N));
}

// atomics_a_block. The block adds up first, and one thread of it adds that to memory: an atomic addition for each block
// instead of each thread, up to a thousand times fewer to wait for. squares must be 0.
extern "C" __global__ void __launch_bounds__(1024)
global_norm_atomics_a_block(float* squares, const gradient* grads, int64 N) {
    const float sum = block_sum(thread_part(grads, N));
    if (threadIdx.x == 0) atomicAdd(squares, sum);
}

// two_stages. No atomics: each block leaves its sum in partials (gridDim.x), and one block adds those up, in an order
// that is always the same. A launch more, which makes it a little slower than atomics_a_block, and a result that can be
// compared bit for bit.
extern "C" __global__ void __launch_bounds__(1024)
global_norm_partials(float* partials, const gradient* grads, int64 N) {
    const float sum = block_sum(thread_part(grads, N));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// The second stage, of the live version, too: one block.
extern "C" __global__ void __launch_bounds__(1024) global_norm_total(float* squares, const float* partials, int count) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *squares = sum;
}
