// The gradient of the classifier's bias.
//
//     partials[block] = factor * the column sums of dlogits over the block's rows         partials =
//
// dlogits (N,Vp). Bound by bytes: it reads dlogits once more.

#include "common.cuh"

// Block and grid: see BlockRows; partials (gridDim.y, Vp) float32.
extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS)
logits_bias_backward(float* partials, const element* dlogits, float factor, int N) {
    const auto [c, begin, end] = BlockRows(N);
    Floats sum = {};
    if (c < Vp) {
#pragma unroll 4
        for (int row = begin + threadIdx.y; row < end; row += ROW_GROUPS) {
            sum = sum + load(dlogits + int64(row) * Vp + c);
        }
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) sum.x[k] *= factor;
    store_column_sums(partials, sum, c < Vp, Vp, [c = c](int k) { return c + k; });
}
