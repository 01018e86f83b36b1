// The speed run's cap of the logits: y = z / sqrt(1 + z^2 / CAP^2). Without MODEL_CAP, y = z.

#pragma once

#include "common.cuh"

#ifdef MODEL_CAP
constexpr float CAP = MODEL_CAP;
__device__ inline float cap_factor(float z) {
    return rsqrtf(fmaf(z * (1.0f / (CAP * CAP)), z, 1.0f));
}
// -inf: padding
__device__ inline float capped(float z) { return z == -INFINITE ? z : z * cap_factor(z); }
__device__ inline float cap_slope(float z) {                                               // dy/dz
    const float r = cap_factor(z);
    return r * r * r;
}
#else
__device__ inline float capped(float z) { return z; }
__device__ inline float cap_slope(float z) { return 1.0f; }
#endif
