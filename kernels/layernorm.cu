// Layer normalization, fused with the addition to the residual stream before it. Ba et al. 2016,
// https://arxiv.org/abs/1607.06450
//
//     forward   residual = inp1 + inp2 (if there is an inp2);  out = (residual - mean) * rstd * weight + bias
//               residual =, out =, mean =, rstd =
//     backward  with n = (inp - mean) * rstd and dn = dout * weight, over each row,
//               dinp = (+= if add_residual) rstd * (dn - mean(dn) - n * mean(dn * n))
//               partials[block] = the column sums over the block's rows of dout * n, dout and the
//               new dinp
//
// inp1, inp2, residual, out, dout, inp, dinp: (N,C); residual, inp1 and inp have the residual
// stream's type. mean, rstd: (N) float32. weight, bias: (C). With add_residual, dinp comes in with
// the gradient of the residual stream. The column sums of dout * n and of dout are the gradients of
// weight and bias; those of dinp, of the bias of the projection whose output was added to the
// residual stream. column_sums.cu adds up the blocks.
//
// Bound by bytes: per row, forward moves 4 C elements (2 C without inp2), backward 4 C (3 C without
// add_residual). A row belongs to one warp or, for large C, to several, and stays in registers from
// the first read to the last write. In the backward pass, the next row is copied to shared memory
// meanwhile, if AHEAD. Rows are processed last to first: the L2 cache still holds the end of what
// the preceding matmul wrote.

#include "norm.cuh"

// Block (THREADS); grid (N / ROWS, rounded up). inp2 and residual may be null, both or neither.
extern "C" __global__ void __launch_bounds__(THREADS)
residual_layernorm_forward(residual_element* residual, element* out, float* mean, float* rstd,
                           const residual_element* inp1, const element* inp2, const element* weight,
                           const element* bias, int N) {
    const int row = N - 1 - (blockIdx.x * ROWS + threadIdx.x / ROW_THREADS);
    norm_row<false>(residual, mean, rstd, inp1, inp2, weight, bias, 1e-5f, row, row >= 0, 1,
                    [&](int c, const Floats& y) { store(out + int64(row) * C + c, y); });
}

// Block (THREADS); grid (any number of blocks), partials (gridDim.x, 3, C) float32. Shared memory:
// 6 * ROWS rows of C elements if AHEAD, else none.
extern "C" __global__ void __launch_bounds__(THREADS, PACKS * PACK <= 24 ? LAYERNORM_BLOCKS : 1)
layernorm_backward(element* dinp, float* partials, const element* dout, const residual_element* inp,
                   const element* weight, const float* mean, const float* rstd, int add_residual,
                       int N) {
    const auto statistics_of = [&](int row) { return float2{mean[row], rstd[row]}; };
    const auto each = [&](const Row& row, float2 statistics, Floats(&sums)[3][PACKS], int buffer) {
        const float m = statistics.x, r = statistics.y;
        float sum_dn = 0.0f, sum_dn_n = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (!row.has(p)) continue;
            const Floats w = load(weight + column(p)), d = unpack(row.dout[p]),
                x = unpack_residual(row.inp[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const float n = (x.x[k] - m) * r;
                sums[1][p].x[k] += d.x[k];
                sums[0][p].x[k] += d.x[k] * n;
                sum_dn += d.x[k] * w.x[k];
                sum_dn_n += d.x[k] * w.x[k] * n;
            }
        }
        const float2 dn_sums = sum_over_warps<ROW_WARPS>({sum_dn, sum_dn_n}, buffer);
        const float mean_dn = dn_sums.x / C, mean_dn_n = dn_sums.y / C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (!row.has(p)) continue;
            const Floats w = load(weight + column(p)), d = unpack(row.dout[p]),
                x = unpack_residual(row.inp[p]);
            Floats sum = unpack(row.dinp[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                sum.x[k] += r * (d.x[k] * w.x[k] - mean_dn - (x.x[k] - m) * r * mean_dn_n);
                sums[2][p].x[k] += sum.x[k];
            }
            store(dinp + row.start + column(p), sum);
        }
    };
    backward_rows<3>(dinp, partials, dout, inp, add_residual, N, statistics_of, each);
}
