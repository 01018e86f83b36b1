// The rotation of RoPE, for rope.cu and for kernels that do it in their epilogues. A row of `rope`
// (T,HS/2) has the cosine and the sine of the angle of each pair of neighbours at that position.

#pragma once

#include "common.cuh"

#ifdef MODEL_HALF_ROPE
constexpr int ROTATED_PAIRS = HS / 4;  // of a head; the angles of the others are 0
#else
constexpr int ROTATED_PAIRS = HS / 2;
#endif

// (a, b) rotated by an angle (cos, sin).
__device__ inline float2 rotated(float a, float b, float2 angle) {
    return {__fmaf_rn(-b, angle.y, __fmul_rn(a, angle.x)),
            __fmaf_rn(b, angle.x, __fmul_rn(a, angle.y))};
}
// The same in place, and back: a rotation's gradient.
__device__ inline void rotate(float& a, float& b, float2 angle) {
    const float2 pair = rotated(a, b, angle);
    a = pair.x, b = pair.y;
}
__device__ inline void rotate_back(float& a, float& b, float2 angle) {
    rotate(a, b, {angle.x, -angle.y});
}
