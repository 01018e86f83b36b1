// GELU, its tanh form. Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
//
//     forward   out = x/2 * (1 + tanh(u)) = x * s, u = sqrt(2/pi) * (x + 0.044715 x^3)                out =
//     backward  dinp = dout * (s + x * s * (1 - s) * 2u')                                            dinp = (dinp may be dout)
//               where s = 1 / (1 + exp(-2u)), which is (1 + tanh(u)) / 2
//               partials[block] = the sums of dinp over the block's rows                              partials =
//               out = the forward value again, if asked for                                           out =
//
// inp, out, dinp, dout (N, 4C). The column sums of dinp are the gradient of the bias that was added to inp.
//
// Bound by bytes: forward 2 elements in and out, backward 3 (4 with `out`). The backward pass hands `out` to the next weight
// gradient, when it was not kept. H200 (a copy: 4235 GB/s), in a step: float32, B=16, forward 3970 GB/s, backward 3930; bfloat16, B=64,
// forward 4200, backward 3960.
//
// cuBLASLt can do the forward pass in the epilogue of the product before, which then takes as much longer as that saves (H200, fc of
// GPT-2 124M in TF32, 12 layers: B=4 1.15 ms with GELU in the epilogue, 0.79 + 0.33 apart), and what the backward pass computes again
// would not be the same to the bit: dev/products.md. Our own products do both passes in theirs, with the functions of gelu.cuh.

#include "gelu.cuh"

constexpr int OC = 4 * C;
constexpr int COLUMN_THREADS = 32, ROW_GROUPS = 8;

// One thread a pack; grid (N*OC / PACK / 256).
extern "C" __global__ void gelu_forward(element* out, const element* inp, int N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(N) * OC) return;
    Floats x = load(inp + i);
#pragma unroll
    for (int k = 0; k < PACK; k++) x.x[k] = gelu(x.x[k]);
    store(out + i, x);
}

// Block (32, 8): 32 packs of columns, 8 rows at a time. Grid (OC / (32 * PACK), blocks of rows), rounded up;
// partials (gridDim.y, OC) float32. out may be null.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS * ROW_GROUPS, 4)
gelu_backward(element* dinp, float* partials, element* out, const element* inp, const element* dout, int N) {
    const int c = (blockIdx.x * COLUMN_THREADS + threadIdx.x) * PACK;
    const int rows = (N + gridDim.y - 1) / gridDim.y;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    Floats sum = {};
    if (c < OC) {
#pragma unroll 2
        for (int row = begin + threadIdx.y; row < end; row += ROW_GROUPS) {
            const int64 i = int64(row) * OC + c;
            const Floats x = load(inp + i);
            Floats d = load(dout + i), y;
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const Gate g = gate(x.x[k]);
                y.x[k] = __fmul_rn(x.x[k], g.s);
                d.x[k] *= gelu_slope(x.x[k], g);
                sum.x[k] += d.x[k];
            }
            store(dinp + i, d);
            if (out) store(out + i, y);
        }
    }
    __shared__ Floats sums[ROW_GROUPS][COLUMN_THREADS];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= OC) return;
    for (int group = 1; group < ROW_GROUPS; group++) {
#pragma unroll
        for (int k = 0; k < PACK; k++) sum.x[k] += sums[group][threadIdx.x].x[k];
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) partials[int64(blockIdx.y) * OC + c + k] = sum.x[k];
}
