// What the versions of several layers share beside kernels/common.cuh: sums over a block of any size, and softmax's two numbers.

#pragma once

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

// The largest value so far, and the sum of exp(value - largest): all of a row that softmax has to know, from one reading.
// Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867
struct Online {
    float largest, sum;
};

__device__ inline Online merge(Online a, Online b) {
    const float largest = fmaxf(a.largest, b.largest);
    if (largest == -INFINITE) return a;  // nothing yet: -inf - -inf would be NaN
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

__device__ inline Online warp_merge(Online x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Online other = {__shfl_xor_sync(0xffffffff, x.largest, distance), __shfl_xor_sync(0xffffffff, x.sum, distance)};
        x = merge(x, other);
    }
    return x;
}

__device__ inline Online block_merge(Online x) {
    __shared__ Online parts[32];
    x = warp_merge(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    const Online nothing = {-INFINITE, 0.0f};
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
__device__ inline Online online_part(const element* row, int first, int step) {
    Online part = {-INFINITE, 0.0f};
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
