// The two statistics that softmax needs of a row, its maximum and a sum: how to merge two, and
// online softmax.

#pragma once

#include "common.cuh"

// The maximum so far, and the sum of exp(value - maximum) so far: one pass over a row gives both.
// Milakov and
// Gimelshein 2018, https://arxiv.org/abs/1805.02867
struct MaxAndSum {
    float largest, sum;
};

__device__ inline MaxAndSum merge(MaxAndSum a, MaxAndSum b) {
    const float largest = fmaxf(a.largest, b.largest);
    // Only -inf or NaN so far: the sums are 0 or NaN. Below, -inf - -inf would turn a sum of 0 into
    // NaN.
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

// 2^x; in bfloat16, results below 2^-126 are 0.
__device__ inline float exp2_of(float x) { return BFLOAT16 ? exp2_approx(x) : exp2f(x); }

// One tile of online softmax over 16 rows, in the layout of a result of mma or wgmma. s holds the
// unscaled scores of the thread's queries `row` and `row` + 8 with the keys from `start` on;
// to_log2 is the scale times log2(e). They become exp(s - largest), or 0 where a tile on the
// diagonal has keys after the query. largest and sum are updated; the output accumulated so far
// must be multiplied by `rescale`. In float32, the scores are scaled first, and `largest` is in
// units of log2; in bfloat16, `largest` is unscaled, and one multiply-add scales and subtracts.
template <int N>
__device__ inline void softmax_of_tile(float (&s)[N], float (&largest)[2], float (&sum)[2],
                                       float (&rescale)[2],
                                       float to_log2, bool diagonal, int start, int row) {
    const int t = threadIdx.x % 4;
    const float unit = BFLOAT16 ? to_log2 : 1.0f;
    if (diagonal) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = -INFINITE;
        }
    }
    float biggest[2] = {largest[0], largest[1]};
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (!BFLOAT16) s[j] = __fmul_rn(s[j], to_log2);
        biggest[j % 4 / 2] = fmaxf(biggest[j % 4 / 2], s[j]);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        // never -inf: the first tile has key 0, which every query sees
        biggest[k] = quad_max(biggest[k]);
        rescale[k] = exp2_of((largest[k] - biggest[k]) * unit);
        largest[k] = biggest[k];
        sum[k] *= rescale[k];
    }
    const float shift[2] = {largest[0] * unit, largest[1] * unit};
#pragma unroll
    for (int j = 0; j < N; j++) {
        s[j] = exp2_of(s[j] * unit - shift[j % 4 / 2]);
        sum[j % 4 / 2] += s[j];
    }
}
