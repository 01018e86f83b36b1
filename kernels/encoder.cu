// Token and position embedding.
//
//     forward   out[b,t] = wte[inp[b,t]] + wpe[t]                                                    out =
//     backward  dwte[token] += the sum of dout over the places of the token                          dwte +=
//               dwpe[t] = the sum of dout over b, 0 for t >= T                                       dwpe = (or += if accumulate)
//
// out, dout (B,T,C), out of the residual stream's type; inp (B,T) int32; wte, dwte (Vp,C); wpe, dwpe (maxT,C).
//
// Bound by bytes: B*T*C elements read and written, and the rows of dwte that the tokens choose read and written. H200 (a copy: 4235 GB/s),
// T=1024, bfloat16, random tokens, in a step at B=64: forward 4030 GB/s, wte 3650, wpe 3880, 0.13 ms together; at B=4 20 us.
// float32, B=16: 3450, 3650 and 3560 GB/s, 0.08 ms together.
//
// The gradient of wte is a sum over rows that the tokens choose. Atomic additions would make it differ from run to run; instead, the host
// sorts the places by token while the GPU works on the step before, and a warp adds up one token's rows in that order. What that took at
// B=64: a block for each token 74 us; a warp for each token 66; blocks that stay, and look up the next token meanwhile, 60, as with four
// rows at once instead of two, or a third of a row for each warp: so much do rows at random places take. (NVRTC puts loads behind one
// another to save registers, unless __launch_bounds__ says how few blocks there are to be.) A text has tokens with thousands of places,
// which one block adds up, 0.045 us each: 1.2 ms where 8 neighbours in the vocabulary have 27500 of 65536 places.

#include "common.cuh"

constexpr int WARPS = 8;  // of a block

// A row's channels are SPANS equal parts, as in train_gpt2_cuda.py's encoder_grid; a lane has up to PACKS packs of one, LANES apart.
constexpr int LANES = 32 * PACK, SPANS = (C + 4 * LANES - 1) / (4 * LANES), PACKS = (C + SPANS * LANES - 1) / (SPANS * LANES);
__device__ inline int first_channel() { return (SPANS > 1 ? blockIdx.y : 0) * PACKS * LANES + threadIdx.x % 32 * PACK; }
__device__ inline bool has_pack(int c, int p) { return SPANS * PACKS * LANES == C || c + p * LANES < C; }

__device__ inline Floats sum_of(const Floats& a, const Floats& b) {
    Floats sum;
#pragma unroll
    for (int k = 0; k < PACK; k++) sum.x[k] = a.x[k] + b.x[k];
    return sum;
}

// A warp a row, which is looked up once. Block (32 * WARPS); grid (N / WARPS, SPANS).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
encoder_forward(stream_element* out, const int* inp, const element* wte, const element* wpe, int N, int T) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, c = first_channel();
    if (row >= N) return;
    const element* const token = wte + int64(inp[row]) * C + c;
    const element* const position = wpe + int64(row % T) * C + c;
    uint4 packs[PACKS][2];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!has_pack(c, p)) continue;
        packs[p][0] = load_bits(token + p * LANES);
        packs[p][1] = load_bits(position + p * LANES);
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (has_pack(c, p)) store(out + int64(row) * C + c + p * LANES, sum_of(unpack(packs[p][0]), unpack(packs[p][1])));
    }
}

// sums += this lane's packs of rows begin .. end - 1, in their order; at(i): where row i's channel c is. AT_ONCE rows are underway at once.
template <int AT_ONCE, int PACKS, class At>
__device__ inline void add_rows(Floats (&sums)[PACKS], int c, int begin, int end, const At& at) {
    for (int first = begin; first < end; first += AT_ONCE) {
        uint4 rows[AT_ONCE][PACKS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const element* const row = at(min(first + i, end - 1));
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) rows[i][p] = load_bits(row + p * LANES);
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

constexpr int LONG = 16;  // rows: longer runs are shared by the warps of a block

// order (N): the places b*T+t, sorted by token, earlier ones first; first (N + 1): where each token's run starts in it, N after the last
// one; tokens (N): of each run. A warp adds up one run after the other, one of the SPANS of its channels; what it needs to know of the next
// one is underway meanwhile. Block (32 * WARPS); grid (any, SPANS).
extern "C" __global__ void __launch_bounds__(32 * WARPS, PACKS > 3 || SPANS > 1 ? 2 : 3)
encoder_backward_wte(gradient* dwte, const element* dout, const int* order, const int* first, const int* tokens, int N) {
    __shared__ Floats parts[WARPS][PACKS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = first_channel(), step = gridDim.x * WARPS;
    const auto first_of = [&](int run) { return first[min(run + min(lane, WARPS), N)]; };
    const auto token_of = [&](int run) { return tokens[min(run + min(lane, WARPS), N - 1)]; };
    const auto row = [&](int i) { return dout + int64(order[i]) * C + c; };

    int run = blockIdx.x * WARPS, next_begins = first_of(run), next_tokens = token_of(run);
    for (; run < N; run += step) {
        // Lane i: where the block's i-th run begins, its rows (0 from lane WARPS on) and its token.
        const int begins = next_begins, lengths = __shfl_down_sync(0xffffffff, begins, 1) - begins, of = next_tokens;
        if (__shfl_sync(0xffffffff, begins, 0) == N) return;  // no more runs
        next_begins = first_of(run + step), next_tokens = token_of(run + step);

        const int begin = __shfl_sync(0xffffffff, begins, warp), length = __shfl_sync(0xffffffff, lengths, warp);
        if (0 < length && length <= LONG) {
            gradient* const out = dwte + int64(__shfl_sync(0xffffffff, of, warp)) * C + c;
            Floats before[PACKS], sums[PACKS] = {};
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) before[p] = load(out + p * LANES);
            }
            add_rows<2>(sums, c, begin, begin + length, row);
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) store(out + p * LANES, sum_of(sums[p], before[p]));
            }
        }
        for (uint32 left = __ballot_sync(0xffffffff, lengths > LONG); left; left &= left - 1) {
            const int i = __ffs(left) - 1, begin = __shfl_sync(0xffffffff, begins, i), length = __shfl_sync(0xffffffff, lengths, i);
            const int share = (length + WARPS - 1) / WARPS;
            gradient* const out = dwte + int64(__shfl_sync(0xffffffff, of, i)) * C + c + warp * LANES;  // in the end, a warp a pack
            Floats sums[PACKS] = {};
            add_rows<2>(sums, c, begin + min(warp * share, length), begin + min((warp + 1) * share, length), row);
#pragma unroll
            for (int p = 0; p < PACKS; p++) parts[warp][p][lane] = sums[p];
            __syncthreads();
            if (warp < PACKS && has_pack(c, warp)) {
                const Floats before = load(out);
                Floats sum = parts[0][warp][lane];
                for (int w = 1; w < WARPS; w++) sum = sum_of(sum, parts[w][warp][lane]);
                store(out, sum_of(sum, before));
            }
            __syncthreads();  // parts is free
        }
    }
}

// One thread a pack of dwpe; grid (maxT*C / PACK / 256).
extern "C" __global__ void __launch_bounds__(256, 3)
encoder_backward_wpe(gradient* dwpe, const element* dout, int accumulate, int B, int T, int maxT) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(maxT) * C) return;
    const int t = i / C;
    Floats sum[1] = {};
    if (accumulate) sum[0] = load(dwpe + i);
    const int64 batch = int64(T) * C;
    if (t < T) add_rows<16>(sum, 0, 0, B, [&](int b) { return dout + b * batch + i; });  // one pack, that of channel 0 as it were
    store(dwpe + i, sum[0]);
}
