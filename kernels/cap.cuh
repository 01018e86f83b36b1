// The speed run's cap of the logits: y = z / sqrt(1 + z^2 / CAP^2). Without MODEL_CAP, y = z.

#pragma once

#include "common.cuh"

#ifdef MODEL_CAP
constexpr float CAP = MODEL_CAP;
__device__ inline float capped(float z) {
    const float y = z * rsqrtf(fmaf(z * (1.0f / (CAP * CAP)), z, 1.0f));
    return z == -INFINITE ? z : y;  // padding
}
// dy/dz, of the capped logit: (1 - y^2 / CAP^2)^(3/2).
__device__ inline float cap_slope(float y) {
    const float square = fmaxf(fmaf(y * (-1.0f / (CAP * CAP)), y, 1.0f), 1e-30f);
    return square * square * rsqrtf(square);  // faster than with sqrtf
}
#else
__device__ inline float capped(float z) { return z; }
#endif
