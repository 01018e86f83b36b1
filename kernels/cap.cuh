// The speed run's cap of the logits: y = z / sqrt(1 + z^2 / CAP^2). Without MODEL_CAP, y = z.

#pragma once

#include "common.cuh"

#ifdef MODEL_CAP
constexpr float CAP = MODEL_CAP;
__device__ inline float capped(float z) {
    const float y = z * rsqrtf(fmaf(z * (1.0f / (CAP * CAP)), z, 1.0f));
    return z == -INFINITE ? z : y;  // padding
}
// dy/dz.
__device__ inline float cap_slope(float z) {
    const float r = rsqrtf(fmaf(z * (1.0f / (CAP * CAP)), z, 1.0f));
    return r * r * r;
}
#else
__device__ inline float capped(float z) { return z; }
__device__ inline float cap_slope(float z) { return 1.0f; }
#endif
