// GELU and its derivative at one number, for gelu.cu and for matmuls that apply them in their
// epilogues. The formulas, with u and s, are in gelu.cu. With MODEL_RELU2, it is squared ReLU (So
// et al. 2021), x * s with s = max(x, 0), whose derivative is 2 s. There, the backward pass reads
// the result, of which s is the root.

#pragma once

#include "common.cuh"

constexpr float SCALE = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float CUBE = 0.044715f;

struct Gate {
    float s, s_slope;  // s, and s (1 - s)
};

// The intrinsics keep the compiler from fusing multiply-adds in one kernel and not in another: all
// give the same bits.
#if MODEL_RELU2
__device__ inline float begin_gate(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays
__device__ inline float end_gate(float s) { return s; }
__device__ inline Gate gate(float x) {  // x: the result
#if BFLOAT16
    asm("sqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
#else
    x = sqrtf(x);
#endif
    return {x, 0.0f};
}
template <int N>
__device__ inline void gates(Gate (&g)[N], const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) g[i] = gate(x[i]);
}
__device__ inline float gelu(float x) { return __fmul_rn(x, begin_gate(x)); }
__device__ inline float gelu_derivative(float x, Gate g) { return 2.0f * g.s; }
#else
#if BFLOAT16
// s in two steps, each of them one special function: exp(-2u), then 1 / (1 + that). Where exp
// overflows, s is 0.
__device__ inline float begin_gate(float x) {
    return exp2_approx(
        __fmul_rn(x, __fmaf_rn(-2.0f * SCALE * CUBE * LOG2E, __fmul_rn(x, x),
                               -2.0f * SCALE * LOG2E)));
}
__device__ inline float end_gate(float e) { return inverse(__fadd_rn(1.0f, e)); }
__device__ inline Gate gate_of(float s) { return {s, __fmaf_rn(-s, s, s)}; }
// to 2^-21: enough for bfloat16
__device__ inline Gate gate(float x) { return gate_of(end_gate(begin_gate(x))); }
// Gates of several numbers. Short of registers, the compiler would compute one after the other,
// each waiting 50 cycles for the special function unit. It moves nothing across __syncwarp, which
// keeps the computations interleaved.
template <int N>
__device__ inline void gates(Gate (&g)[N], const float (&x)[N]) {
    float e[N];
#pragma unroll
    for (int i = 0; i < N; i++) e[i] = begin_gate(x[i]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) e[i] = end_gate(e[i]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) g[i] = gate_of(e[i]);
}
#else
__device__ inline Gate gate(float x) {
    const float twice_u =
        __fmul_rn(__fmul_rn(2.0f * SCALE, x), __fmaf_rn(CUBE, __fmul_rn(x, x), 1.0f));
    // 80: exp stays finite
    const float e = expf(fminf(-twice_u, 80.0f)), s = __fdiv_rn(1.0f, __fadd_rn(1.0f, e));
    return {s, __fmul_rn(s, __fmul_rn(e, s))};  // e s = 1 - s, exact where s is nearly 1
}
#endif
__device__ inline float gelu(float x) { return __fmul_rn(x, gate(x).s); }
__device__ inline float gelu_derivative(float x, Gate g) {  // s + 2xu' s (1 - s)
    const float twice_xu = x * fmaf(6.0f * SCALE * CUBE, __fmul_rn(x, x), 2.0f * SCALE);
    return fmaf(twice_xu, g.s_slope, g.s);
}
#endif
