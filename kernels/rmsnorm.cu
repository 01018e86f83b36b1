// Root mean square normalization, fused with the addition to the residual stream before it. Zhang and Sennrich 2019,
// https://arxiv.org/abs/1910.07467
//
//     forward   residual = inp1 + inp2 (if there is an inp2);  out = residual * rstd * weight
//               rstd = 1 / sqrt(mean(residual^2) + eps)                                 residual =, out =, rstd =
//     backward  with n = inp * rstd and dn = dout * weight, over each row,
//               dinp = (+= if add_residual) rstd * (dn - n * mean(dn * n))
//               partials[block] = the column sums over the block's rows of dout * n: the gradient of weight
//
// inp1, inp2, residual, out, dout, inp, dinp: (N,C); residual, inp1 and inp have the residual stream's type. rstd (N)
// float32. weight (C). The rest is as in layernorm.cu, which says why: a row stays in the registers of its warps, the
// backward pass copies the next row to shared memory meanwhile, if AHEAD, and rows are processed last to first.

#include "norm.cuh"

constexpr bool AHEAD = LAYERNORM_AHEAD;

static_assert(LAYERNORM_SHARED == (AHEAD ? 2 * 3 * ROWS * C * sizeof(element) : 0),
              "shared memory: for each of the block's rows, two buffers of three operands");

// Block (THREADS); grid (N / ROWS, rounded up). inp2 and residual may be null, both or neither.
extern "C" __global__ void __launch_bounds__(THREADS)
residual_rmsnorm_forward(residual_element* residual, element* out, float* rstd, const residual_element* inp1,
                         const element* inp2, const element* weight, float eps, int N) {
    const int row = N - 1 - (blockIdx.x * ROWS + threadIdx.x / ROW_THREADS);
    rmsnorm_row(residual, rstd, inp1, inp2, weight, eps, row, row >= 0, 0,
                [&](int c, const Floats& y) { store(out + int64(row) * C + c, y); });
}

// Block (THREADS); grid (any number of blocks), partials (gridDim.x, C) float32. Shared memory: 6 * ROWS rows of C
// elements if AHEAD, else none.
extern "C" __global__ void __launch_bounds__(THREADS, PACKS * PACK <= 24 ? LAYERNORM_BLOCKS : 1)
rmsnorm_backward(element* dinp, float* partials, const element* dout, const residual_element* inp,
                 const element* weight, const float* rstd, int add_residual, int N) {
    const int own = threadIdx.x / ROW_THREADS;  // which of the block's ROWS rows is this thread's
    Floats dweight[PACKS] = {};
    // Two buffers in turn, each for a row of dout, inp and dinp. A thread reads only what it copied itself: no barrier.
    extern __shared__ uint4 ahead[];
    const auto ahead_at = [&](int buffer, int which, int c) {
        return reinterpret_cast<uint4*>(reinterpret_cast<element*>(ahead) + ((own * 2 + buffer) * 3 + which) * C + c);
    };
    float next_rstd;
    const auto fetch = [&](int row, int buffer) {
        const bool exists = row >= 0;
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
        const float r = next_rstd;
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
        float sum_dn_n = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (!exists || c >= C) continue;
            const Floats w = load(weight + c), dp = unpack(d[p]), xp = unpack_residual(x[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const float dn = dp.x[k] * (xp.x[k] * r);
                dweight[p].x[k] += dn;
                sum_dn_n += dn * w.x[k];
            }
        }
        const float scaled_mean = sum_over_warps<ROW_WARPS>({sum_dn_n, 0.0f}, buffer).x / C * r;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (!exists || c >= C) continue;
            const Floats w = load(weight + c), dp = unpack(d[p]), xp = unpack_residual(x[p]);
            Floats sum = unpack(before[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum.x[k] += r * (dp.x[k] * w.x[k] - xp.x[k] * scaled_mean);
            store(dinp + start + c, sum);
        }
    }

    // Add up the sums of the block's rows.
    __shared__ float static_sums[AHEAD ? 1 : ROWS * C];
    float* const sums = AHEAD ? reinterpret_cast<float*>(ahead) : static_sums;
    __syncthreads();  // all have read their last rows
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = column(p);
        if (c >= C) continue;
#pragma unroll
        for (int k = 0; k < PACK; k++) sums[own * C + c + k] = dweight[p].x[k];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) sum += sums[i * C + c];
        partials[int64(blockIdx.x) * C + c] = sum;
    }
}
