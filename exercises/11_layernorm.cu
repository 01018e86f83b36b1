// Layernorm forward. One idea: which thread does what decides how memory is read. First a thread a row, the loops of
// the formula; then a warp a row: its 32 threads read neighbouring numbers, and add up what they have by shuffles.
//
//     out = (inp - mean) * rstd * weight + bias, with rstd = 1 / sqrt(variance + 1e-5)    out =, mean =, rstd =
//
// inp, out (N,C); mean, rstd (N) float32; weight, bias (C). C is a constant. kernels/common.cuh has to_float and
// from_float for element, bfloat16, and residual_element, half precision; and warp_sum. row * C is int64: it can exceed
// 2^31.

#include "common.cuh"

// Block (any multiple of 32 up to 1024), grid (N / block, rounded up).
extern "C" __global__ void __launch_bounds__(1024)
layernorm_forward_thread_a_row(element* out, float* mean, float* rstd, const residual_element* inp,
                               const element* weight, const element* bias, int N) {
    // not written yet: about 15 lines
}

// The same with a warp for each row. Block likewise, grid (N / warps of a block, rounded up).
extern "C" __global__ void __launch_bounds__(1024)
layernorm_forward_warp_a_row(element* out, float* mean, float* rstd, const residual_element* inp,
                             const element* weight, const element* bias, int N) {
    // not written yet: about 18 lines
}
