// Softmax's two numbers, and how those of parts of a row are put together.

#pragma once

#include "common.cuh"

// The largest value so far, and the sum of exp(value - largest): all of a row that softmax has to know, from one reading.
// Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867
struct Softmax {
    float largest, sum;
};

__device__ inline Softmax merge(Softmax a, Softmax b) {
    const float largest = fmaxf(a.largest, b.largest);
    if (largest == -INFINITE) return {largest, a.sum + b.sum};  // 0, or NaN if all values are; -inf - -inf would always be NaN
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

__device__ inline Softmax warp_merge(Softmax s) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Softmax other = {__shfl_xor_sync(0xffffffff, s.largest, distance), __shfl_xor_sync(0xffffffff, s.sum, distance)};
        s = merge(s, other);
    }
    return s;
}
