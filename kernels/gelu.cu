// GELU, its tanh form. Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
//
//     forward   out = x/2 * (1 + tanh(u)) = x * s, u = sqrt(2/pi) * (x + 0.044715 x^3)        out =
//     backward  dinp = dout * (s + x * s * (1 - s) * 2u')                                     dinp = (dinp may be dout)
//               where s = 1 / (1 + exp(-2u)), which is (1 + tanh(u)) / 2
//               partials[block] = the column sums of dinp over the block's rows               partials =
//               out = the forward value, recomputed unless `out` is null                      out =
//
// inp, out, dinp, dout (N,F). The column sums of dinp are the gradient of the bias that was added
// to make inp. With MODEL_RELU2, `forward` may be in place, and the inp of `backward` is its
// result.
//
// Bound by bytes: forward moves 2 elements, backward 3 (4 with `out`). With --recompute, the
// backward pass recomputes `out` for the next weight gradient. On Hopper, our matmuls do both
// passes in their epilogues.

#include "gelu.cuh"

// One thread per pack; grid (N*F / PACK / 256).
extern "C" __global__ void gelu_forward(element* out, const element* inp, int N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(N) * F) return;
    Floats x = load(inp + i);
#pragma unroll
    for (int k = 0; k < PACK; k++) x.x[k] = gelu(x.x[k]);
    store(out + i, x);
}

// Block and grid: see BlockRows; partials (gridDim.y, F) float32. out may be null.
extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS, 4)
gelu_backward(element* dinp, float* partials, element* out, const element* inp, const element* dout,
              int N) {
    const auto [c, begin, end] = BlockRows(N);
    Floats sum = {};
    if (c < F) {
#pragma unroll 2
        for (int row = begin + threadIdx.y; row < end; row += ROW_GROUPS) {
            const int64 i = int64(row) * F + c;
            const Floats x = load(inp + i);
            Floats d = load(dout + i), y;
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const Gate g = gate(x.x[k]);
                y.x[k] = __fmul_rn(x.x[k], g.s);
                d.x[k] *= gelu_derivative(x.x[k], g);
                sum.x[k] += d.x[k];
            }
            store(dinp + i, d);
            if (out) store(out + i, y);
        }
    }
    store_column_sums(partials, sum, c < F, F, [c = c](int k) { return c + k; });
}
