// Root mean square normalization, fused with the addition to the residual stream before it. Zhang
// and Sennrich 2019,
// https://arxiv.org/abs/1910.07467
//
//     forward   residual = inp1 + inp2 (if there is an inp2);  out = residual * rstd * weight
//               rstd = 1 / sqrt(mean(residual^2) + eps)                                 residual =, out =, rstd =
//     backward  with n = inp * rstd and dn = dout * weight, over each row,
//               dinp = (+= if add_residual) rstd * (dn - n * mean(dn * n))
//               partials[block] = the column sums over the block's rows of dout * n: the gradient
//               of weight; and, with
//               MODEL_BIASES, those of dinp: that of the bias of the linear layer that added to inp
//
// inp1, inp2, residual, out, dout, inp, dinp: (N,C); residual, inp1 and inp have the residual
// stream's type. rstd (N) float32. weight (C). The rest, and what bounds it, is as in layernorm.cu.

#include "norm.cuh"

// Block (THREADS); grid (N / ROWS, rounded up). inp2 and residual may be null, both or neither.
extern "C" __global__ void __launch_bounds__(THREADS)
residual_rmsnorm_forward(residual_element* residual, element* out, float* rstd,
                         const residual_element* inp1,
                         const element* inp2, const element* weight, float eps, int N) {
    const int row = N - 1 - (blockIdx.x * ROWS + threadIdx.x / ROW_THREADS);
    norm_row<true>(residual, nullptr, rstd, inp1, inp2, weight, nullptr, eps, row, row >= 0, 0,
                   [&](int c, const Floats& y) { store(out + int64(row) * C + c, y); });
}

constexpr int KINDS = MODEL_BIASES ? 2 : 1;  // of sums

// Block (THREADS); grid (any number of blocks), partials (gridDim.x, KINDS, C) float32. Shared
// memory: 6 * ROWS rows of C elements if AHEAD, else none.
extern "C" __global__ void __launch_bounds__(THREADS, PACKS * PACK <= 24 ? LAYERNORM_BLOCKS : 1)
rmsnorm_backward(element* dinp, float* partials, const element* dout, const residual_element* inp,
                 const element* weight, const float* rstd, int add_residual, int N) {
    const auto statistics_of = [&](int row) { return rstd[row]; };
    const auto each = [&](const Row& row, float r, Floats(&sums)[KINDS][PACKS], int buffer) {
        float sum_dn_n = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (!row.has(p)) continue;
            const Floats w = load(weight + column(p)), d = unpack(row.dout[p]),
                x = unpack_residual(row.inp[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const float dn = d.x[k] * (x.x[k] * r);
                sums[0][p].x[k] += dn;
                sum_dn_n += dn * w.x[k];
            }
        }
        const float scaled_mean = sum_over_warps<ROW_WARPS>({sum_dn_n, 0.0f}, buffer).x / C * r;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (!row.has(p)) continue;
            const Floats w = load(weight + column(p)), d = unpack(row.dout[p]),
                x = unpack_residual(row.inp[p]);
            Floats sum = unpack(row.dinp[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum.x[k] += r * (d.x[k] * w.x[k] - x.x[k] * scaled_mean);
            for (int k = 0; k < PACK && KINDS == 2; k++) sums[KINDS - 1][p].x[k] += sum.x[k];
            store(dinp + row.start + column(p), sum);
        }
    };
    backward_rows<KINDS>(dinp, partials, dout, inp, add_residual, N, statistics_of, each);
}
