// The gradient of a matmul's bias: sums over all rows, N of them, for few columns. RESULTS.md has
// what each rung measured.
//
//     dbias[c] = the sum over n of dout[n,c]                                                  dbias =
//
// dout (N,F), dbias (F). Bound by bytes: dout is read once. Additions of floats depend on their
// order, so sums that threads add up as they happen to come have other bits each time.

#include "common.cuh"

// atomics. One thread per column and 32 rows, each of which adds its sum to dbias: coalesced reads,
// and N / 32 atomic additions to each address. dbias must be 0.
extern "C" __global__ void __launch_bounds__(1024) bias_backward_atomics(float* dbias, const element* dout, int N) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * 32;
    if (c >= F) return;
    float sum = 0.0f;
    for (int n = first; n < min(first + 32, N); n++) sum += to_float(dout[int64(n) * F + c]);
    atomicAdd(dbias + c, sum);
}

// fixed_order. A block has 32 columns, a lane each; its warps take rows in turn, then add up their
// sums in shared memory, always in the same order. There are only F / 32 blocks, 96 for F = 3072.
extern "C" __global__ void __launch_bounds__(1024) bias_backward_fixed_order(float* dbias, const element* dout, int N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    __shared__ float sums[32][32];
    float sum = 0.0f;
    if (c < F) {
#pragma unroll 8
        for (int n = warp; n < N; n += blockDim.x / 32) sum += to_float(dout[int64(n) * F + c]);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= F) return;
    for (int w = 1; w < blockDim.x / 32; w++) sum += sums[w][lane];
    dbias[c] = sum;
}

// partial_sums: the first of two stages. A thread has PACK columns of 128 rows, 16 bytes a load,
// and writes their sums, partials (N / 128, F); kernels/column_sums.cu adds these up. In the live
// trainer, the kernel that makes dout leaves such partial sums, and dout is not read again.
extern "C" __global__ void __launch_bounds__(1024)
bias_backward_partial_sums(float* partials, const element* dout, int N) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * PACK, first = blockIdx.y * 128;
    if (c >= F) return;
    Floats sums = {};
#pragma unroll 8
    for (int n = first; n < min(first + 128, N); n++) {
        const Floats x = load(dout + int64(n) * F + c);
        for (int k = 0; k < PACK; k++) sums.x[k] += x.x[k];
    }
    for (int k = 0; k < PACK; k++) partials[int64(blockIdx.y) * F + c + k] = sums.x[k];
}
