// The gradient of a matmul's bias. One idea: sums of floats depend on their order, so a kernel that has the same bits
// every time fixes the order, and adds nothing by atomicAdd. It runs twice here, and is compared.
//
//     dbias[c] = the sum over n of dout[n,c]                                                  dbias =
//
// dout (N,F), dbias (F) float32. F is a constant; n * F is int64. kernels/common.cuh has to_float.

#include "common.cuh"

// Block (any multiple of 32 up to 1024), grid (F / 32, rounded up): a block has 32 columns.
extern "C" __global__ void __launch_bounds__(1024) bias_backward_fixed_order(float* dbias, const element* dout, int N) {
    // not written yet: about 11 lines
}
