// What the rungs of several layers share beyond kernels/common.cuh: reductions over a block of any size, and
// softmax's two statistics.

#pragma once

#include "softmax.cuh"

// Reduce x over the block, whose threads are a multiple of 32; every thread gets the result. across_warp: the reduction
// over a warp; nothing: its neutral element.
template <class T, class AcrossWarp>
__device__ inline T block_reduce(T x, T nothing, AcrossWarp across_warp) {
    __shared__ T parts[32];
    x = across_warp(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = across_warp(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : nothing);
    __syncthreads();  // all have read `parts`, which the next call overwrites
    return x;
}

__device__ inline float block_sum(float x) {
    return block_reduce(x, 0.0f, [](float y) { return warp_sum(y); });
}
__device__ inline float block_max(float x) {
    return block_reduce(x, -INFINITE, [](float y) { return warp_max(y); });
}
__device__ inline MaxAndSum block_merge(MaxAndSum x) {
    return block_reduce(x, MaxAndSum{-INFINITE, 0.0f}, [](MaxAndSum y) { return warp_merge(y); });
}

// PACK logits from column v on, -inf from V on, whatever is stored there.
__device__ inline Floats load_logits(const element* row, int v) {
    Floats x = load(row + v);
    for (int k = 0; k < PACK; k++) {
        if (v + k >= V) x.x[k] = -INFINITE;
    }
    return x;
}

// This thread's part of a row of logits: packs `first`, first + step, ..., 16 bytes each, each read once.
__device__ inline MaxAndSum online_part(const element* row, int first, int step) {
    MaxAndSum part = {-INFINITE, 0.0f};
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
