// What the versions of several layers share beside kernels/common.cuh: sums over a block of any size, and softmax's two numbers of it.

#pragma once

#include "softmax.cuh"

// The sum over the block's threads, whose number is a multiple of 32; every thread gets it.
__device__ inline float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
    __syncthreads();  // all have read `sums`, which the next call overwrites
    return x;
}

__device__ inline float block_max(float x) {
    __shared__ float largest[32];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_max(threadIdx.x % 32 < blockDim.x / 32 ? largest[threadIdx.x % 32] : -INFINITE);
    __syncthreads();
    return x;
}

__device__ inline Softmax block_merge(Softmax x) {
    __shared__ Softmax parts[32];
    x = warp_merge(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    const Softmax nothing = {-INFINITE, 0.0f};
    x = warp_merge(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : nothing);
    __syncthreads();
    return x;
}

// PACK logits from column v on, -infinity from V on, whatever stands there.
__device__ inline Floats load_logits(const element* row, int v) {
    Floats x = load(row + v);
    for (int k = 0; k < PACK; k++) {
        if (v + k >= V) x.x[k] = -INFINITE;
    }
    return x;
}

// A row of logits read once by the threads `first`, first + step, ..., 16 bytes each.
__device__ inline Softmax online_part(const element* row, int first, int step) {
    Softmax part = {-INFINITE, 0.0f};
    for (int v = first * PACK; v < V; v += step * PACK) {
        const Floats x = load_logits(row, v);
        float largest = part.largest;
        for (int k = 0; k < PACK; k++) largest = fmaxf(largest, x.x[k]);
        if (largest == -INFINITE) continue;
        float sum = part.sum * expf(part.largest - largest);
        for (int k = 0; k < PACK; k++) sum += expf(x.x[k] - largest);
        part = {largest, sum};
    }
    return part;
}
