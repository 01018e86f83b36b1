// The two statistics that softmax needs of a row, its maximum and a sum, and how to merge those of two parts of a row.

#pragma once

#include "common.cuh"

// The maximum so far, and the sum of exp(value - maximum) so far: one pass over a row gives both. Milakov and
// Gimelshein 2018, https://arxiv.org/abs/1805.02867
struct MaxAndSum {
    float largest, sum;
};

__device__ inline MaxAndSum merge(MaxAndSum a, MaxAndSum b) {
    const float largest = fmaxf(a.largest, b.largest);
    // Only -inf or NaN so far: the sums are 0 or NaN. Below, -inf - -inf would turn a sum of 0 into NaN.
    if (largest == -INFINITE) return {largest, a.sum + b.sum};
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

__device__ inline MaxAndSum warp_merge(MaxAndSum s) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const MaxAndSum other = {__shfl_xor_sync(0xffffffff, s.largest, distance),
                                 __shfl_xor_sync(0xffffffff, s.sum, distance)};
        s = merge(s, other);
    }
    return s;
}
