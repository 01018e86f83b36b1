// The gradient of the classifier's bias.
//
//     partials[block] = factor * the column sums of dlogits over the block's rows         partials =
//
// dlogits (N,Vp), of classifier.cu: elements or, in FP8 runs, E5M2 in the order of fp8.cuh, in the first half of each
// row. Bound by bytes: it reads dlogits once more.

#include "common.cuh"

#if LOGITS_FP8
__device__ inline Floats load_dlogits(const element* row, int c) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(reinterpret_cast<const unsigned char*>(row) + c);
    Floats x;
#pragma unroll
    for (int k = 0; k < PACK; k += 2) {  // E5M2 is a half's first byte
        const float2 pair = of_halves(__byte_perm(k < 4 ? bytes.x : bytes.y, 0, k % 4 == 0 ? 0x1404 : 0x3424));
        x.x[k] = pair.x, x.x[k + 1] = pair.y;
    }
    return x;
}
__device__ inline int column_of(int at) { return at & ~15 | at % 16 / 4 * 2 + at % 2 + at % 4 / 2 * 8; }
#else
__device__ inline Floats load_dlogits(const element* row, int c) { return load(row + c); }
__device__ inline int column_of(int at) { return at; }
#endif

// Block and grid: see BlockRows; partials (gridDim.y, Vp) float32.
extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS)
logits_bias_backward(float* partials, const element* dlogits, float factor, int N) {
    const auto [c, begin, end] = BlockRows(N);
    Floats sum = {};
    if (c < Vp) {
#pragma unroll 4
        for (int row = begin + threadIdx.y; row < end; row += ROW_GROUPS) {
            const Floats d = load_dlogits(dlogits + int64(row) * Vp, c);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum.x[k] += d.x[k];
        }
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) sum.x[k] *= factor;
    store_column_sums(partials, sum, c < Vp, Vp, [c = c](int k) { return column_of(c + k); });
}
