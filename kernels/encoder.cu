// Token and position embedding.
//
//     forward   out[b,t] = wte[inp[b,t]] + wpe[t]                                          out =
//     backward  dwte[token] += the sum of dout over the positions of the token             dwte +=
//               dwpe[t] = the sum of dout over b, 0 for t >= T                             dwpe =
//
// out, dout (B,T,C), out of the residual stream's type; inp (B,T) int32; wte, dwte (Vp,C); wpe, dwpe (maxT,C).
//
// Bound by bytes: B*T*C elements read and written, and each row of dwte whose token occurs read and written. H200 (a
// copy: 4235 GB/s), T=1024, bfloat16, random tokens, in a step at B=64: forward 4030 GB/s, wte 3650, wpe 3880, 0.13 ms
// together; at B=4 20 us. float32, B=16: 3450, 3650 and 3560 GB/s, 0.08 ms together.
//
// The gradient of wte sums up the rows of dout by token. With atomic additions, its bits would change from run to run.
// Instead, the host sorts the positions by token while the GPU works on the previous step, and a warp adds up one
// token's rows (its "run") in that order. At B=64 that takes 74 us with a block for each token, 66 with a warp for each
// token, and 60 with persistent blocks that prefetch where the next token's rows are. Four rows at once instead of two,
// or a third of a row for each warp, take just as long: the limit is reading rows in random order. (NVRTC serializes
// loads to save registers, unless __launch_bounds__ tells it how few blocks a multiprocessor gets.) Text has tokens
// with thousands of positions, which one block adds up, at 0.045 us each: 1.2 ms where 8 neighbouring tokens of the
// vocabulary have 27500 of 65536 positions.

#include "common.cuh"

constexpr int WARPS = ENCODER_THREADS / 32;  // of a block

// Each row is cut into SPANS parts, one for each blockIdx.y. A warp takes WARP_ELEMENTS of a part at a time, one pack
// per lane, so that a lane has up to PACKS packs.
constexpr int WARP_ELEMENTS = 32 * PACK, SPANS = ENCODER_SPANS;
constexpr int PACKS = (C + SPANS * WARP_ELEMENTS - 1) / (SPANS * WARP_ELEMENTS);

static_assert(PACKS <= 4, "a lane keeps at most 4 packs of a row in registers");

// The channel c where this lane's first pack begins; whether its pack p, from c + p * WARP_ELEMENTS on, exists.
__device__ inline int first_channel() {
    return (SPANS > 1 ? blockIdx.y : 0) * PACKS * WARP_ELEMENTS + threadIdx.x % 32 * PACK;
}
__device__ inline bool has_pack(int c, int p) {
    return SPANS * PACKS * WARP_ELEMENTS == C || c + p * WARP_ELEMENTS < C;
}

__device__ inline Floats sum_of(const Floats& a, const Floats& b) {
    Floats sum;
#pragma unroll
    for (int k = 0; k < PACK; k++) sum.x[k] = a.x[k] + b.x[k];
    return sum;
}

// One warp per row (or part of a row), so that the token is looked up once. Block (ENCODER_THREADS); grid (N / WARPS,
// SPANS).
extern "C" __global__ void __launch_bounds__(ENCODER_THREADS, 4)
encoder_forward(residual_element* out, const int* inp, const element* wte, const element* wpe, int N, int T) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, c = first_channel();
    if (row >= N) return;
    const element* const token = wte + int64(inp[row]) * C + c;
    const element* const position = wpe + int64(row % T) * C + c;
    uint4 packs[PACKS][2];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!has_pack(c, p)) continue;
        packs[p][0] = load_bits(token + p * WARP_ELEMENTS);
        packs[p][1] = load_bits(position + p * WARP_ELEMENTS);
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!has_pack(c, p)) continue;
        store(out + int64(row) * C + c + p * WARP_ELEMENTS, sum_of(unpack(packs[p][0]), unpack(packs[p][1])));
    }
}

// sums += this lane's packs of rows begin .. end - 1, in that order; at(i): the address of the lane's first pack, at
// channel c, of row i. AT_ONCE rows are loaded at a time.
template <int AT_ONCE, int PACKS, class At>
__device__ inline void add_rows(Floats (&sums)[PACKS], int c, int begin, int end, const At& at) {
    for (int first = begin; first < end; first += AT_ONCE) {
        uint4 rows[AT_ONCE][PACKS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const element* const row = at(min(first + i, end - 1));
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) rows[i][p] = load_bits(row + p * WARP_ELEMENTS);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (first + i < end) sums[p] = sum_of(sums[p], unpack(rows[i][p]));
            }
        }
    }
}

constexpr int LONG_RUN = 16;  // positions: a block's warps share a longer run

// order (N): the positions b*T+t, sorted by token, earlier ones first. A token's positions are a run: run_begins (N +
// 1) says where in `order` each run begins, and is N after the last one; run_tokens (N) says which token it is. A warp
// adds up one run after another, one part of the rows' channels, and meanwhile loads where the next run begins. Block
// (ENCODER_THREADS); grid (any number of blocks, SPANS).
extern "C" __global__ void __launch_bounds__(ENCODER_THREADS, PACKS > 3 || SPANS > 1 ? 2 : 3)
encoder_backward_wte(gradient* dwte, const element* dout, const int* order, const int* run_begins,
                     const int* run_tokens, int N) {
    __shared__ Floats warp_sums[WARPS][PACKS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = first_channel(), step = gridDim.x * WARPS;
    const auto begin_of = [&](int run) { return run_begins[min(run + min(lane, WARPS), N)]; };
    const auto token_of = [&](int run) { return run_tokens[min(run + min(lane, WARPS), N - 1)]; };
    const auto row = [&](int i) { return dout + int64(order[i]) * C + c; };

    int run = blockIdx.x * WARPS, next_begins = begin_of(run), next_tokens = token_of(run);
    for (; run < N; run += step) {
        // In lane i: where the i-th of the block's WARPS runs begins, how many rows it has (0 from lane WARPS on) and
        // its token.
        const int begins = next_begins, tokens = next_tokens;
        const int lengths = __shfl_down_sync(0xffffffff, begins, 1) - begins;
        if (__shfl_sync(0xffffffff, begins, 0) == N) return;  // no more runs
        next_begins = begin_of(run + step), next_tokens = token_of(run + step);

        const int begin = __shfl_sync(0xffffffff, begins, warp), length = __shfl_sync(0xffffffff, lengths, warp);
        if (0 < length && length <= LONG_RUN) {
            gradient* const out = dwte + int64(__shfl_sync(0xffffffff, tokens, warp)) * C + c;
            Floats before[PACKS], sums[PACKS] = {};
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) before[p] = load(out + p * WARP_ELEMENTS);
            }
            add_rows<2>(sums, c, begin, begin + length, row);
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) store(out + p * WARP_ELEMENTS, sum_of(sums[p], before[p]));
            }
        }
        for (uint32 left = __ballot_sync(0xffffffff, lengths > LONG_RUN); left; left &= left - 1) {
            const int i = __ffs(left) - 1;
            const int begin = __shfl_sync(0xffffffff, begins, i), length = __shfl_sync(0xffffffff, lengths, i);
            const int rows_per_warp = (length + WARPS - 1) / WARPS;
            // In the end, warp p adds up everybody's pack p.
            gradient* const out = dwte + int64(__shfl_sync(0xffffffff, tokens, i)) * C + c + warp * WARP_ELEMENTS;
            Floats sums[PACKS] = {};
            const int warp_begin = min(warp * rows_per_warp, length);
            const int warp_end = min((warp + 1) * rows_per_warp, length);
            add_rows<2>(sums, c, begin + warp_begin, begin + warp_end, row);
#pragma unroll
            for (int p = 0; p < PACKS; p++) warp_sums[warp][p][lane] = sums[p];
            __syncthreads();
            if (warp < PACKS && has_pack(c, warp)) {
                const Floats before = load(out);
                Floats sum = warp_sums[0][warp][lane];
                for (int w = 1; w < WARPS; w++) sum = sum_of(sum, warp_sums[w][warp][lane]);
                store(out, sum_of(sum, before));
            }
            __syncthreads();  // all have read warp_sums, which the next run overwrites
        }
    }
}

// One thread per pack of dwpe; grid (maxT*C / PACK / ENCODER_THREADS).
extern "C" __global__ void __launch_bounds__(ENCODER_THREADS, 3)
encoder_backward_wpe(gradient* dwpe, const element* dout, int B, int T, int maxT) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(maxT) * C) return;
    const int t = i / C;
    Floats sum[1] = {};
    const int64 batch = int64(T) * C;
    // add_rows is given the address of the pack itself, and told that it begins at channel 0
    if (t < T) add_rows<16>(sum, 0, 0, B, [&](int b) { return dout + b * batch + i; });
    store(dwpe + i, sum[0]);
}
