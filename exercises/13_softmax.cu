// Softmax of long rows, the logits of a vocabulary. One idea: maximum and sum of a row in one read. When a larger
// number turns up, the sum so far is scaled down to it.
//
//     probs[n,v] = exp(logits[n,v] - the row's maximum) / their sum over the row, 0 for v >= V        probs =
//
// logits, probs (N,Vp); V and Vp are constants, n * Vp is int64. What logits hold from V on, the padding, is NaN here:
// nothing may depend on it. kernels/common.cuh has to_float, from_float, warp_sum, warp_max and INFINITE.

#include "common.cuh"

// Block (any multiple of 32 up to 1024), grid (N): a block has a row.
extern "C" __global__ void __launch_bounds__(1024) softmax_online(element* probs, const element* logits, int N) {
    // not written yet: about 30 lines
}
