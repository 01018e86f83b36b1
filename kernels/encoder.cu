// Token and position embedding.
//
//     forward   out[b,t] = wte[inp[b,t]] + wpe[t], where there is a wpe                     out =
//     backward  dwte[token] += the sum of dout over the positions of the token             dwte +=
//               dwpe[t] = the sum of dout over b, 0 for t >= T                             dwpe =
//
// out (B,T,C), of the residual stream's type; dout (B,T,C); inp (B,T) int32; wte, dwte (Vp,C); wpe,
// dwpe (maxT,C).
//
// Bound by bytes: B*T*C elements and the rows of dwte whose tokens occur, all read and written.
//
// The gradient of wte sums the rows of dout by token. With atomics, its bits would change from run
// to run. Instead, the host sorts the positions by token while the GPU works on the previous step,
// and a warp adds up one token's rows in that order. Blocks are persistent and prefetch where the
// next token's rows are; the limit is reading rows in random order. (NVRTC serializes loads to save
// registers, unless __launch_bounds__ tells it how few blocks there are.)
//
// In text, a space or a comma may be at thousands of positions, which would keep one block busy
// long after the others are done. So a token at more than ENCODER_PIECE positions is cut into
// pieces (sort_tokens of llmc/gpu/batch.py), and a second kernel adds up their sums, in an order
// that does not depend on the grid.

#include "common.cuh"

constexpr int WARPS = ENCODER_THREADS / 32;  // of a block

// Each row is cut into SPANS parts, one per blockIdx.y. A warp takes WARP_ELEMENTS at a time, a
// lane up to PACKS packs.
constexpr int WARP_ELEMENTS = 32 * PACK, SPANS = ENCODER_SPANS;
constexpr int PACKS = (C + SPANS * WARP_ELEMENTS - 1) / (SPANS * WARP_ELEMENTS);

static_assert(PACKS <= 4, "a lane keeps at most 4 packs of a row in registers");

// The channel c at which this lane's first pack begins; whether its pack p, at c + p *
// WARP_ELEMENTS, exists.
__device__ inline int first_channel() {
    return (SPANS > 1 ? blockIdx.y : 0) * PACKS * WARP_ELEMENTS + threadIdx.x % 32 * PACK;
}
__device__ inline bool has_pack(int c, int p) {
    return SPANS * PACKS * WARP_ELEMENTS == C || c + p * WARP_ELEMENTS < C;
}

// One warp per row, or part of one, looks up the token. Block (ENCODER_THREADS); grid (N / WARPS,
// SPANS).
extern "C" __global__ void __launch_bounds__(ENCODER_THREADS, 4)
encoder_forward(residual_element* out, const int* inp, const element* wte, const element* wpe,
                int N, int T) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, c = first_channel();
    if (row >= N) return;
    const element* const token = wte + int64(inp[row]) * C + c;
    const element* const position = wpe + int64(row % T) * C + c;
    uint4 packs[PACKS][2];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!has_pack(c, p)) continue;
        packs[p][0] = load_bits(token + p * WARP_ELEMENTS);
        packs[p][1] = wpe ? load_bits(position + p * WARP_ELEMENTS) : uint4{};
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (!has_pack(c, p)) continue;
        store(out + int64(row) * C + c + p * WARP_ELEMENTS,
              unpack(packs[p][0]) + unpack(packs[p][1]));
    }
}

// sums += this lane's packs of rows begin .. end - 1, in that order; at(i): the address of the
// lane's first pack of row i, at channel c. AT_ONCE rows are loaded at a time.
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
                if (first + i < end) sums[p] = sums[p] + unpack(rows[i][p]);
            }
        }
    }
}

// order (N): the positions b*T+t, in pieces of one token each. piece_begins (N + 1): where in
// `order` each piece begins, N after the last one. piece_tokens (N): the token of each piece, or
// ~token if the token has several: then the sums of piece i go to row i of partials (rows, C), for
// encoder_backward_wte_cut. A token's only piece is added to dwte. A warp adds up one piece after
// another, over its span of the channels, and prefetches where its next piece begins. Block
// (ENCODER_THREADS); grid (any number of blocks, SPANS).
extern "C" __global__ void __launch_bounds__(ENCODER_THREADS, PACKS > 3 || SPANS > 1 ? 2 : 3)
encoder_backward_wte(gradient* dwte, float* partials, const element* dout, const int* order,
                     const int* piece_begins,
                     const int* piece_tokens, int N) {
    struct Piece {
        int begin, end, token;
    };
    const int c = first_channel(), step = gridDim.x * WARPS;
    const auto row = [&](int position) { return dout + int64(order[position]) * C + c; };
    const auto piece_at = [&](int i) {
        return Piece{piece_begins[min(i, N)], piece_begins[min(i + 1, N)],
                     piece_tokens[min(i, N - 1)]};
    };

    int i = blockIdx.x * WARPS + threadIdx.x / 32;
    for (Piece piece = piece_at(i), next; piece.begin < N; piece = next, i += step) {
        next = piece_at(i + step);
        Floats sums[PACKS] = {};
        if (piece.token < 0) {
            float* const out = partials + int64(i) * C + c;
            add_rows<2>(sums, c, piece.begin, piece.end, row);
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) store(out + p * WARP_ELEMENTS, sums[p]);
            }
        } else {
            gradient* const out = dwte + int64(piece.token) * C + c;
            Floats before[PACKS];
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) before[p] = load(out + p * WARP_ELEMENTS);
            }
            add_rows<2>(sums, c, piece.begin, piece.end, row);
#pragma unroll
            for (int p = 0; p < PACKS; p++) {
                if (has_pack(c, p)) store(out + p * WARP_ELEMENTS, sums[p] + before[p]);
            }
        }
    }
}

// dwte += the sums in partials of each token with several pieces, which come first. A block takes
// the tokens whose first piece is number blockIdx.x, blockIdx.x + gridDim.x, ..., and WARP_ELEMENTS
// channels of their rows; each of its warps adds up every WARPS-th row. Block (ENCODER_THREADS);
// grid (any number, C / WARP_ELEMENTS rounded up).
extern "C" __global__ void __launch_bounds__(ENCODER_THREADS, 2)
encoder_backward_wte_cut(gradient* dwte, const float* partials, const int* piece_tokens, int N) {
    __shared__ Floats warp_sums[WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
        c = blockIdx.y * WARP_ELEMENTS + lane * PACK;
    for (int begin = blockIdx.x; begin < N && piece_tokens[begin] < 0; begin += gridDim.x) {
        const int cut_token = piece_tokens[begin];
        if (begin > 0 && piece_tokens[begin - 1] == cut_token) continue;  // another block has it
        int end = begin, found;
        do {
            const int i = end + threadIdx.x;
            // also, warp 0 is done with warp_sums
            found = __syncthreads_count(i < N && piece_tokens[i] == cut_token);
            end += found;
        } while (found == ENCODER_THREADS);

        Floats sum = {};
        if (c < C) {
#pragma unroll 8
            for (int i = begin + warp; i < end; i += WARPS)
                sum = sum + load(partials + int64(i) * C + c);
        }
        warp_sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c < C) {
            for (int w = 1; w < WARPS; w++) sum = sum + warp_sums[w][lane];
            gradient* const out = dwte + int64(~cut_token) * C + c;
            store(out, sum + load(out));
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
    // add_rows gets the address of the pack itself, so the pack's channel is 0
    if (t < T) add_rows<16>(sum, 0, 0, B, [&](int b) { return dout + b * batch + i; });
    store(dwpe + i, sum[0]);
}
