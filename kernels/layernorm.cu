// Layer normalization, with the addition to the residual stream before it. Ba et al. 2016, https://arxiv.org/abs/1607.06450
//
//     forward   residual = inp1 + inp2 (if there is an inp2);  out = (residual - mean) * rstd * weight + bias
//               residual =, out =, mean =, rstd =
//     backward  with n = (inp - mean) * rstd and dn = dout * weight, over each row,
//               dinp = (+= if accumulate) rstd * (dn - mean(dn) - n * mean(dn * n))
//               partials[block] = over the block's rows, the sums of dout * n, dout, and the new dinp
//
// The rows of inp1, inp2, residual, out, dout, inp, dinp: (N,C); those of residual, inp1 and inp are the residual stream's. mean, rstd: (N)
// float32. weight, bias: (C).
// The sums over rows of dout * n and of dout are the gradients of weight and bias; that of dinp is the gradient of the bias
// that was added to this residual stream by the projection before: the third column sum costs nothing here, a pass of
// its own there. Each block adds up its rows in order, column_sums.cu adds up the blocks.
//
// Bound by bytes: forward 4 rows of C elements in and out (2 without inp2), backward 4 (3 without accumulate). A row is one warp's or, for
// large C, several warps', and stays in registers from the first read to the last write; backward has the next one on its way to shared
// memory, if AHEAD. The last row comes first: the L2 cache still has the end of what the product before wrote, and then the rows that the
// next one begins with: at B=32, the 50 launches of a step take 2.61 ms instead of 2.66.
// H200 (a copy: 4235 GB/s), T=1024, in a step: float32, B=16, forward 3960 GB/s, backward 3660; bfloat16, B=64, forward 4070, backward
// 3870, and at B=4, where a launch takes longer than its bytes, 3060 and 1980.

#include "common.cuh"

constexpr int THREADS = 256;

// A row is shared by ROW_WARPS warps, so that what the backward pass keeps of it fits their registers, twice on a multiprocessor. (H200,
// C=1600: with one warp for a row, the forward pass falls from 3200 to 2100 GB/s.)
constexpr int ROW_WARPS = C <= 768 ? 1 : C <= 1536 ? 2 : C <= 3072 ? 4 : 8;
constexpr int ROW_THREADS = 32 * ROW_WARPS;
constexpr int PACKS = (C + ROW_THREADS * PACK - 1) / (ROW_THREADS * PACK);  // of one thread
constexpr int GROUPS = THREADS / ROW_THREADS;                               // rows that a block works on at once

static_assert(PACKS * PACK <= 32, "a thread keeps at most 32 elements of a row: C up to 8192");

// The p-th pack of a row that belongs to this thread starts here; beyond C there is none.
__device__ inline int column(int p) { return (p * ROW_THREADS + threadIdx.x % ROW_THREADS) * PACK; }

// Block (256); grid (N / GROUPS, rounded up). inp2 and residual may be null, together.
extern "C" __global__ void __launch_bounds__(THREADS)
residual_layernorm_forward(stream_element* residual, element* out, float* mean, float* rstd, const stream_element* inp1,
                           const element* inp2, const element* weight, const element* bias, int N) {
    const int row = N - 1 - (blockIdx.x * GROUPS + threadIdx.x / ROW_THREADS);
    const bool exists = row >= 0;  // all threads stay, for the barriers of group_sum
    const int64 start = int64(row) * C;

    uint4 bits[PACKS], more[PACKS];  // all loads are underway before the first is needed, and before anything is stored
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        bits[p] = more[p] = {};
        const int c = column(p);
        if (!exists || c >= C) continue;
        bits[p] = load_bits(inp1 + start + c);
        if (inp2) more[p] = load_bits(inp2 + start + c);
    }
    Floats x[PACKS];
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = column(p);
        x[p] = unpack_stream(bits[p]);
        if (inp2 && exists && c < C) {
            const Floats addend = unpack(more[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) x[p].x[k] += addend.x[k];
            const uint4 rounded = pack_stream(x[p]);  // what the backward pass will read
            *reinterpret_cast<uint4*>(residual + start + c) = rounded;
            x[p] = unpack_stream(rounded);
        }
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += x[p].x[k];
    }
    const float m = group_sum<ROW_WARPS>({sum, 0.0f}, 0).x / C;

    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (column(p) >= C) continue;
#pragma unroll
        for (int k = 0; k < PACK; k++) squares += (x[p].x[k] - m) * (x[p].x[k] - m);
    }
    const float r = 1.0f / sqrtf(group_sum<ROW_WARPS>({squares, 0.0f}, 1).x / C + 1e-5f);

    if (!exists) return;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = column(p);
        if (c >= C) continue;
        const Floats w = load(weight + c), b = load(bias + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) x[p].x[k] = (x[p].x[k] - m) * r * w.x[k] + b.x[k];
        store(out + start + c, x[p]);
    }
    if (threadIdx.x % ROW_THREADS == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

// The backward pass has its next row copied to shared memory while it works on one: where a multiprocessor has room for two blocks of that.
// As in layernorm_shared of train_gpt2_cuda.py. (float32 rows do not fit every GPU's.)
constexpr bool AHEAD = BFLOAT16 && __CUDA_ARCH__ != 860 && __CUDA_ARCH__ != 890 && __CUDA_ARCH__ < 1200;

// Block (256); grid (any number of blocks), partials (gridDim.x, 3, C) float32. Shared memory: 6 rows for each group if AHEAD, else none.
extern "C" __global__ void __launch_bounds__(THREADS, BFLOAT16 && PACKS * PACK <= 24 ? 2 : 1)
layernorm_backward(element* dinp, float* partials, const element* dout, const stream_element* inp, const element* weight,
                   const float* mean, const float* rstd, int accumulate, int N) {
    const int group = threadIdx.x / ROW_THREADS;
    Floats dweight[PACKS] = {}, dbias[PACKS] = {}, total[PACKS] = {};
    extern __shared__ uint4 waiting[];  // dout, inp and dinp of two rows in turn; each thread reads what it has copied itself
    const auto place = [&](int turn, int which, int c) {
        return reinterpret_cast<uint4*>(reinterpret_cast<element*>(waiting) + ((group * 2 + turn) * 3 + which) * C + c);
    };
    float next_mean, next_rstd;
    const auto fetch = [&](int row, int turn) {
        const bool exists = row >= 0;
        next_mean = exists ? mean[row] : 0.0f;
        next_rstd = exists ? rstd[row] : 0.0f;
        if constexpr (AHEAD) {
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const int c = column(p);
                if (!exists || c >= C) continue;
                const int64 start = int64(row) * C + c;
                copy_async(place(turn, 0, c), reinterpret_cast<const uint4*>(dout + start), true);
                copy_async(place(turn, 1, c), reinterpret_cast<const uint4*>(inp + start), true);
                if (accumulate) copy_async(place(turn, 2, c), reinterpret_cast<const uint4*>(dinp + start), true);
            }
            copies_commit();
        }
    };
    fetch(N - 1 - (blockIdx.x * GROUPS + group), 0);

    for (int first = blockIdx.x * GROUPS, turn = 0; first < N; first += gridDim.x * GROUPS, turn ^= 1) {
        const int row = N - 1 - (first + group);
        const bool exists = row >= 0;
        const int64 start = int64(row) * C;
        const float m = next_mean, r = next_rstd;
        fetch(row - gridDim.x * GROUPS, turn ^ 1);
        if constexpr (AHEAD) copies_wait<1>();

        uint4 d[PACKS], x[PACKS], before[PACKS];  // all loads are underway before the first is needed
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            d[p] = x[p] = before[p] = {};
            const int c = column(p);
            if (!exists || c >= C) continue;
            d[p] = AHEAD ? *place(turn, 0, c) : load_bits(dout + start + c);
            x[p] = AHEAD ? *place(turn, 1, c) : load_bits(inp + start + c);
            if (accumulate) before[p] = AHEAD ? *place(turn, 2, c) : load_bits(dinp + start + c);
        }
        float sum_dn = 0.0f, sum_dn_n = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (!exists || c >= C) continue;
            const Floats w = load(weight + c), dp = unpack(d[p]), xp = unpack_stream(x[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const float n = (xp.x[k] - m) * r;
                dbias[p].x[k] += dp.x[k];
                dweight[p].x[k] += dp.x[k] * n;
                sum_dn += dp.x[k] * w.x[k];
                sum_dn_n += dp.x[k] * w.x[k] * n;
            }
        }
        const float2 both = group_sum<ROW_WARPS>({sum_dn, sum_dn_n}, turn);
        const float mean_dn = both.x / C, mean_dn_n = both.y / C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (!exists || c >= C) continue;
            const Floats w = load(weight + c), dp = unpack(d[p]), xp = unpack_stream(x[p]);
            Floats sum = unpack(before[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                sum.x[k] += r * (dp.x[k] * w.x[k] - mean_dn - (xp.x[k] - m) * r * mean_dn_n);
                total[p].x[k] += sum.x[k];
            }
            store(dinp + start + c, sum);
        }
    }

    // The groups' sums, one kind after the other, are added up by all threads.
    __shared__ float room[AHEAD ? 1 : GROUPS * C];
    float* const sums = AHEAD ? reinterpret_cast<float*>(waiting) : room;
    const Floats(*kinds[3])[PACKS] = {&dweight, &dbias, &total};
#pragma unroll
    for (int kind = 0; kind < 3; kind++) {
        __syncthreads();  // the sums of the kind before are read
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (c >= C) continue;
#pragma unroll
            for (int k = 0; k < PACK; k++) sums[group * C + c + k] = (*kinds[kind])[p].x[k];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) sum += sums[g * C + c];
            partials[(int64(blockIdx.x) * 3 + kind) * C + c] = sum;
        }
    }
}
