// The second half of every sum over rows: adds up the partial sums that the blocks of another kernel left, in their order.
//
//     out[c] = the sum over r of partials[r,c], c in the thirds out0, out1, out2 of `width` columns each (out1, out2: may be null)
//     out = (or += if accumulate)
//
// partials (rows, columns) float32. A block adds up 32 columns, its 32 warps every 32nd row each. Bound by latency: a few
// microseconds, whatever the size.

#include "common.cuh"

constexpr int WARPS = 32;

// Block (1024); grid (columns / 32, rounded up).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
column_sums(element* out0, element* out1, element* out2, const float* partials, int accumulate, int width, int rows, int columns) {
    __shared__ float sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int c = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < columns) {
#pragma unroll 8
        for (int r = warp; r < rows; r += WARPS) sum += partials[int64(r) * columns + c];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= columns) return;
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][lane];
    element* out = c < width ? out0 : c < 2 * width ? out1 : out2;
    if (out) put(out + c % width, sum, accumulate);
}
