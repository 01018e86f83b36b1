// SwiGLU and its gradient at one pair of numbers, for swiglu.cu and for matmuls that apply them in
// their epilogues.
// Shazeer 2020, https://arxiv.org/abs/2002.05202
//
//     forward    out = up * gate * s, s = sigmoid(gate) = 1 / (1 + exp(-gate))
//     backward   dup = dout * gate * s
//                dgate = dout * up * s * (1 + gate * (1 - s)), computed as dout * up * (s + gate *
//                s * (1 - s))

#pragma once

#include "common.cuh"

// The intrinsics keep the compiler from fusing multiply-adds in one kernel and not in another: all
// give the same bits.
#if BFLOAT16
// In two halves, between which a kernel may do other work: e = exp(-gate), then s. Where e
// overflows, s is 0.
__device__ inline float exp_of_minus(float gate) { return exp2_approx(__fmul_rn(-LOG2E, gate)); }
__device__ inline float sigmoid_of(float e) { return inverse(__fadd_rn(1.0f, e)); }
__device__ inline float sigmoid(float gate) {
    return sigmoid_of(exp_of_minus(gate));  // an error of 2^-21 does not show in bfloat16
}
// Of several numbers: as gates() of gelu.cuh, interleaved by __syncwarp.
template <int N>
__device__ inline void sigmoids(float (&s)[N], const float (&gate)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = exp_of_minus(gate[i]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = sigmoid_of(s[i]);
    __syncwarp();
}
#else
__device__ inline float sigmoid(float gate) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(fminf(-gate, 88.0f))));  // 88: exp stays finite
}
#endif

// With s = sigmoid(gate) at hand. The gradient is (dup, dgate).
__device__ inline float swiglu(float up, float gate, float s) {
    return __fmul_rn(up, __fmul_rn(gate, s));
}
__device__ inline float2 swiglu_gradient(float dout, float up, float gate, float s) {
    const float gated = __fmul_rn(gate, s), slope = __fmaf_rn(gated, __fsub_rn(1.0f, s), s);
    return {__fmul_rn(dout, gated), __fmul_rn(__fmul_rn(dout, up), slope)};
}

__device__ inline float swiglu(float up, float gate) { return swiglu(up, gate, sigmoid(gate)); }
