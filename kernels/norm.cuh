// What layer normalization and RMSNorm share: rows in the registers of their warps. layernorm.cu,
// rmsnorm.cu and, for the forward pass in 8 bits, norm_fp8.cu have the kernels.

#pragma once

#include "common.cuh"

constexpr int THREADS = LAYERNORM_THREADS;

// ROW_WARPS warps share a row, so that what is kept of it fits into registers with two blocks per
// multiprocessor.
constexpr int ROW_WARPS = LAYERNORM_ROW_WARPS;
constexpr int ROW_THREADS = 32 * ROW_WARPS;
constexpr int PACKS = (C + ROW_THREADS * PACK - 1) / (ROW_THREADS * PACK);  // per thread
constexpr int ROWS = LAYERNORM_ROWS;                                        // per block, at a time

static_assert(ROWS * ROW_THREADS == THREADS, "each row has its warps");
static_assert(PACKS * PACK <= 32, "a thread keeps at most 32 elements of a row: C up to 8192");

// The column at which this thread's pack p of a row starts; if >= C, there is none.
__device__ inline int column(int p) { return (p * ROW_THREADS + threadIdx.x % ROW_THREADS) * PACK; }

// x = inp1 + inp2, rounded, and residual =, or x = inp1 without an inp2 (without an inp1, that is
// 0): this thread's packs of the row that begins at `start`; 0 beyond C, or unless the row exists.
// each(x) is called with every number.
template <class Each>
__device__ __forceinline__ void residual_row(Floats (&x)[PACKS], residual_element* residual,
                                             const residual_element* inp1, const element* inp2,
                                                 int64 start,
                                             bool exists, Each each) {
    // all loads are issued before the first is needed, and before any store
    uint4 bits[PACKS], addends[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        bits[p] = addends[p] = {};
        const int c = column(p);
        if (!exists || c >= C) continue;
        if (inp1) bits[p] = load_bits(inp1 + start + c);
        if (inp2) addends[p] = load_bits(inp2 + start + c);
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = column(p);
        x[p] = unpack_residual(bits[p]);
        if (inp2 && exists && c < C) {
            const Floats addend = unpack(addends[p]);
#pragma unroll
            for (int k = 0; k < PACK; k++) x[p].x[k] += addend.x[k];
            const uint4 rounded = pack_residual(x[p]);  // what the backward pass will read
            *reinterpret_cast<uint4*>(residual + start + c) = rounded;
            x[p] = unpack_residual(rounded);
        }
#pragma unroll
        for (int k = 0; k < PACK; k++) each(x[p].x[k]);
    }
}

// A row of out, layernorm or RMSNorm, by all threads of its warps, which stay for the barriers in
// sum_over_warps if it does not exist: put(c, y) is called for each of this thread's packs, y, from
// column c on. inp2 and residual may be null, both or neither; RMSNorm has no mean and no bias.
// buffer: 1 or, in an RMSNorm, 0 and 1 in turn.
template <bool RMS, class Put>
__device__ __forceinline__ void norm_row(residual_element* residual, float* mean, float* rstd,
                                         const residual_element* inp1, const element* inp2,
                                             const element* weight,
                                         const element* bias, float eps, int row, bool exists,
                                             int buffer, Put put) {
    Floats x[PACKS];
    float sum = 0.0f, squares = 0.0f, m = 0.0f;
    residual_row(x, residual, inp1, inp2, int64(row) * C, exists, [&](float y) {
        if constexpr (RMS) squares += y * y;
        else sum += y;
    });
    if constexpr (!RMS) {
        m = sum_over_warps<ROW_WARPS>({sum, 0.0f}, 0).x / C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (column(p) >= C) continue;
#pragma unroll
            for (int k = 0; k < PACK; k++) squares += (x[p].x[k] - m) * (x[p].x[k] - m);
        }
    }
    const float r = 1.0f / sqrtf(sum_over_warps<ROW_WARPS>({squares, 0.0f}, buffer).x / C + eps);
    if (!exists) return;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = column(p);
        if (c >= C) continue;
        const Floats w = load(weight + c), b = RMS ? Floats{} : load(bias + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            x[p].x[k] = RMS ? x[p].x[k] * r * w.x[k] : (x[p].x[k] - m) * r * w.x[k] + b.x[k];
        }
        put(c, x[p]);
    }
    if (threadIdx.x % ROW_THREADS > 0) return;
    if constexpr (!RMS) mean[row] = m;
    rstd[row] = r;
}

// Whether the backward pass copies its next row to shared memory while it works on one.
constexpr bool AHEAD = LAYERNORM_AHEAD;
static_assert(LAYERNORM_SHARED == (AHEAD ? 2 * 3 * ROWS * C * sizeof(element) : 0),
              "shared memory: for each of the block's rows, two buffers of three operands");

// This thread's packs of a row in the backward pass, of which dinp comes in with the gradient of
// the residual stream, or 0; what is beyond C, or in a row that does not exist, is 0.
struct Row {
    uint4 dout[PACKS], inp[PACKS], dinp[PACKS];
    int64 start;
    bool exists;
    __device__ bool has(int p) const { return exists && column(p) < C; }
};

// The backward pass of a block, last row to first. each(row, statistics, sums, buffer) is called by
// all threads, also if their row does not exist, for the barriers, with what statistics_of(row
// number) has returned. It writes dinp, and adds to `sums`, whose sums over all threads are
// partials[block]. buffer: 0 and 1 in turn, for sum_over_warps.
template <int KINDS, class StatisticsOf, class Each>
__device__ __forceinline__ void backward_rows(const element* dinp, float* partials,
                                              const element* dout,
                                              const residual_element* inp, int add_residual, int N,
                                              StatisticsOf statistics_of, Each each) {
    const int own = threadIdx.x / ROW_THREADS;  // which of the block's ROWS rows is this thread's
    Floats sums[KINDS][PACKS] = {};
    // Two buffers in turn, each for a row of dout, inp and dinp. A thread reads only what it copied
    // itself: no barrier.
    extern __shared__ uint4 ahead[];
    const auto ahead_at = [&](int buffer, int which, int c) {
        return reinterpret_cast<uint4*>(reinterpret_cast<element*>(ahead)
                                        + ((own * 2 + buffer) * 3 + which) * C + c);
    };
    decltype(statistics_of(0)) next;
    const auto fetch = [&](int row, int buffer) {
        const bool exists = row >= 0;
        next = {};
        if (exists) next = statistics_of(row);
        if constexpr (AHEAD) {
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                const int c = column(p);
                if (!exists || c >= C) continue;
                const int64 start = int64(row) * C + c;
                copy_async(ahead_at(buffer, 0, c), reinterpret_cast<const uint4*>(dout + start),
                           true);
                copy_async(ahead_at(buffer, 1, c), reinterpret_cast<const uint4*>(inp + start),
                           true);
                if (add_residual) {
                    copy_async(ahead_at(buffer, 2, c), reinterpret_cast<const uint4*>(dinp + start),
                               true);
                }
            }
            copies_commit();
        }
    };
    fetch(N - 1 - (blockIdx.x * ROWS + own), 0);

    for (int first = blockIdx.x * ROWS, buffer = 0; first < N;
         first += gridDim.x * ROWS, buffer ^= 1) {
        const int number = N - 1 - (first + own);
        Row row;
        row.start = int64(number) * C;
        row.exists = number >= 0;
        const auto statistics = next;
        fetch(number - gridDim.x * ROWS, buffer ^ 1);
        if constexpr (AHEAD) copies_wait<1>();
#pragma unroll
        for (int p = 0; p < PACKS; p++) {  // all loads are issued before the first is needed
            row.dout[p] = row.inp[p] = row.dinp[p] = {};
            if (!row.has(p)) continue;
            const int c = column(p);
            row.dout[p] = AHEAD ? *ahead_at(buffer, 0, c) : load_bits(dout + row.start + c);
            row.inp[p] = AHEAD ? *ahead_at(buffer, 1, c) : load_bits(inp + row.start + c);
            if (add_residual)
                row.dinp[p] = AHEAD ? *ahead_at(buffer, 2, c) : load_bits(dinp + row.start + c);
        }
        each(row, statistics, sums, buffer);
    }

    // Add up the sums of the block's rows, one kind after the other.
    __shared__ float static_sums[AHEAD ? 1 : ROWS * C];
    float* const of_rows = AHEAD ? reinterpret_cast<float*>(ahead) : static_sums;
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) {
        __syncthreads();  // all have read the last rows, or the sums of the previous kind
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = column(p);
            if (c >= C) continue;
#pragma unroll
            for (int k = 0; k < PACK; k++) of_rows[own * C + c + k] = sums[kind][p].x[k];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum += of_rows[i * C + c];
            partials[(int64(blockIdx.x) * KINDS + kind) * C + c] = sum;
        }
    }
}
