// A query's or key's HS channels, of which ROW_LANES lanes have 16 bytes each.

#pragma once

#include "decode/step.cuh"

constexpr int ROW_LANES = DECODE_ROW_LANES, ROWS_AT_ONCE = 32 / ROW_LANES;  // of a warp

// x * y, by the lanes that share a row.
__device__ inline float dot_product(const Floats& x, const Floats& y) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < PACK; e++) sum += x.x[e] * y.x[e];
#pragma unroll
    for (int distance = ROW_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    return sum;
}

// 1 / the root mean square of a query's or key's channels.
__device__ inline float inverse_length(const Floats& x) {
    return 1.0f / sqrtf(dot_product(x, x) / HS + float(DECODE_EPS));
}
