// Layer normalization, fused with the addition to the residual stream before it. Ba et al. 2016,
// https://arxiv.org/abs/1607.06450
//
//     forward   residual = inp1 + inp2 (if there is an inp2);  out = (residual - mean) * rstd * weight + bias
//               residual =, out =, mean =, rstd =
//     backward  with n = (inp - mean) * rstd and dn = dout * weight, over each row,
//               dinp = (+= if add_residual) rstd * (dn - mean(dn) - n * mean(dn * n))
//               partials[block] = the column sums over the block's rows of dout * n, dout and the new dinp
//
// inp1, inp2, residual, out, dout, inp, dinp: (N,C); residual, inp1 and inp have the residual stream's type. mean,
// rstd: (N) float32. weight, bias: (C). With add_residual, dinp comes in with the gradient of the residual stream. The
// column sums of dout * n and of dout are the gradients of weight and bias. Those of dinp are the bias gradient of the
// projection whose output was added to the residual stream: here they cost nothing, elsewhere an extra pass. Each block
// adds up its rows in order, column_sums.cu adds up the blocks.
//
// Bound by bytes: per row, forward moves 4 C elements (2 C without inp2), backward 4 C (3 C without add_residual). A
// row belongs to one warp or, for large C, to several, and stays in registers from the first read to the last write. In
// the backward pass, the next row is copied to shared memory meanwhile, if AHEAD. Rows are processed last to first: the
// L2 cache still holds the end of what the preceding matmul wrote, and afterwards the rows that the next matmul begins
// with.

#include "norm.cuh"

// Block (THREADS); grid (N / ROWS, rounded up). inp2 and residual may be null, both or neither.
extern "C" __global__ void __launch_bounds__(THREADS)
residual_layernorm_forward(residual_element* residual, element* out, float* mean, float* rstd,
                           const residual_element* inp1, const element* inp2, const element* weight,
                           const element* bias, int N) {
    const int row = N - 1 - (blockIdx.x * ROWS + threadIdx.x / ROW_THREADS);
    layernorm_row(residual, mean, rstd, inp1, inp2, weight, bias, row, row >= 0,
                  [&](int c, const Floats& y) { store(out + int64(row) * C + c, y); });
}

// Whether the backward pass copies its next row to shared memory while it works on one.
constexpr bool AHEAD = LAYERNORM_AHEAD;

static_assert(LAYERNORM_SHARED == (AHEAD ? 2 * 3 * ROWS * C * sizeof(element) : 0),
              "shared memory: for each of the block's rows, two buffers of three operands");

// Block (THREADS); grid (any number of blocks), partials (gridDim.x, 3, C) float32. Shared memory: 6 * ROWS rows of C
// elements if AHEAD, else none.
extern "C" __global__ void __launch_bounds__(THREADS, PACKS * PACK <= 24 ? LAYERNORM_BLOCKS : 1)
layernorm_backward(element* dinp, float* partials, const element* dout, const residual_element* inp,
                   const element* weight, const float* mean, const float* rstd, int add_residual, int N) {
    const int own = threadIdx.x / ROW_THREADS;  // which of the block's ROWS rows is this thread's
    Floats dweight[PACKS] = {}, dbias[PACKS] = {}, total[PACKS] = {};
    // Two buffers in turn, each for a row of dout, inp and dinp. A thread reads only what it copied itself: no barrier.
    extern __shared__ uint4 ahead[];
    const auto ahead_at = [&](int buffer, int which, int c) {
        return reinterpret_cast<uint4*>(reinterpret_cast<element*>(ahead) + ((own * 2 + buffer) * 3 + which) * C + c);
    };
    float next_mean, next_rstd;
    const auto fetch = [&](int row, int buffer) {
        const bool exists = row >= 0;
        next_mean = exists ? mean[row] : 0.0f;
        next_rstd = exists ? rstd[row] : 0.0f;
        if constexpr (AHEAD) {
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const int c = column(p);
                if (!exists || c >= C) continue;
                const int64 start = int64(row) * C + c;
                copy_async(ahead_at(buffer, 0, c), reinterpret_cast<const uint4*>(dout + start), true);
                copy_async(ahead_at(buffer, 1, c), reinterpret_cast<const uint4*>(inp + start), true);
                if (add_residual) {
                    copy_async(ahead_at(buffer, 2, c), reinterpret_cast<const uint4*>(dinp + start), true);
                }
            }
            copies_commit();
        }
    };
    fetch(N - 1 - (blockIdx.x * ROWS + own), 0);

    for (int first = blockIdx.x * ROWS, buffer = 0; first < N; first += gridDim.x * ROWS, buffer ^= 1) {
        const int row = N - 1 - (first + own);
        const bool exists = row >= 0;
        const int64 start = int64(row) * C;
        const float m = next_mean, r = next_rstd;
        fetch(row - gridDim.x * ROWS, buffer ^ 1);
        if constexpr (AHEAD) copies_wait<1>();

        uint4 d[PACKS], x[PACKS], before[PACKS];  // all loads are issued before the first is needed
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            d[p] = x[p] = before[p] = {};
            const int c = column(p);
            if (!exists || c >= C) continue;
            d[p] = AHEAD ? *ahead_at(buffer, 0, c) : load_bits(dout + start + c);
            x[p] = AHEAD ? *ahead_at(buffer, 1, c) : load_bits(inp + start + c);
            if (add_residual) before[p] = AHEAD ? *ahead_at(buffer, 2, c) : load_bits(dinp + start + c);
        }
        float sum_dn = 0.0f, sum_dn_n = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (!exists || c >= C) continue;
            const Floats w = load(weight + c), dp = unpack(d[p]), xp = unpack_residual(x[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const float n = (xp.x[k] - m) * r;
                dbias[p].x[k] += dp.x[k];
                dweight[p].x[k] += dp.x[k] * n;
                sum_dn += dp.x[k] * w.x[k];
                sum_dn_n += dp.x[k] * w.x[k] * n;
            }
        }
        const float2 dn_sums = sum_over_warps<ROW_WARPS>({sum_dn, sum_dn_n}, buffer);
        const float mean_dn = dn_sums.x / C, mean_dn_n = dn_sums.y / C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (!exists || c >= C) continue;
            const Floats w = load(weight + c), dp = unpack(d[p]), xp = unpack_residual(x[p]);
            Floats sum = unpack(before[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                sum.x[k] += r * (dp.x[k] * w.x[k] - mean_dn - (xp.x[k] - m) * r * mean_dn_n);
                total[p].x[k] += sum.x[k];
            }
            store(dinp + start + c, sum);
        }
    }

    // Add up the sums of the block's rows, one of the three kinds after the other.
    __shared__ float static_sums[AHEAD ? 1 : ROWS * C];
    float* const sums = AHEAD ? reinterpret_cast<float*>(ahead) : static_sums;
    const Floats(*kinds[3])[PACKS] = {&dweight, &dbias, &total};
#pragma unroll
    for (int kind = 0; kind < 3; kind++) {
        __syncthreads();  // all have read the sums of the previous kind
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (c >= C) continue;
#pragma unroll
            for (int k = 0; k < PACK; k++) sums[own * C + c + k] = (*kinds[kind])[p].x[k];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum += sums[i * C + c];
            partials[(int64(blockIdx.x) * 3 + kind) * C + c] = sum;
        }
    }
}
