// The matmuls that Llama has beside those of matmul.cu, bound by the same: with SwiGLU, its
// gradient, or RoPE in the epilogue. Formulas: swiglu.cuh, rope.cuh.
//
//     matmul_forward_swiglu        out = inp @ weight^T: up, then gate                            out =
//                                  swiglu = up * gate * sigmoid(gate), of the rounded out         swiglu =
//     matmul_backward_inp_swiglu   dinp = SwiGLU's gradient at inp, its input, for dout @ weight  dinp =
//     matmul_forward_rope          out = inp @ weight^T, queries and keys rotated                 out =
//
// A tile of matmul_forward_swiglu is 96 columns of up and the 96 columns of gate that belong to
// them, so that a thread has both of a pair in its accumulators. matmul_backward_inp_swiglu has
// matmul_backward_inp_gelu's side job: a warp of the producer warpgroup prefetches strips of up and
// gate and stores those of their gradients.
//
// What has halves, up and gate, has maps in which the half is a dimension of its own: out, inp and
// dinp as (N,2,F), weight as (2,F,C). F need not be a multiple of a tile's width: what lies beyond
// is zero, and not stored.

#include "hopper/matmul.cuh"
#include "rope.cuh"
#include "swiglu.cuh"

static_assert(HS % 16 == 0, "RoPE: two units of 8 columns are of one head");

constexpr int HALF_STRIP = STRIP / 2;  // elements of a strip of 32 columns
static_assert(MATMUL_STRIP == 64 && MATMUL_NARROW_STRIP == 32,
              "a strip's room is that of two strips of 32 columns");

// As the kernels of matmul.cu: block (384), grid (at most as many blocks as items), shared memory.
// Boxes of the maps, rows x columns: inp and dout 128 x 64; weight 96 x 64, 64 x 64 in the backward
// pass, for RoPE 192 x 64 (narrow: 160 x 64); out for RoPE 128 x 64 (narrow: 128 x 32); all others
// 128 x 32, of one half.

// Of the rounded up and gate, so that swiglu.cu recomputes the same bits from out.
MATMUL matmul_forward_swiglu(MAP out, MAP swiglu_out, MAP inp, MAP weight, int M, int N, int K,
                             int band) {
    constexpr int BN = WIDE_BN, UNITS = BN / 2 / 8;  // of 8 columns of up
    static_assert(UNITS % 4 == 0, "strips of 32 columns");
    matmul<BN, 0, 0, false, 2>(
        inp, weight, {M, N, K, band, 1},
            [&](Accumulators<BN>& acc, const Item& item, element* strips) {
#pragma unroll
            for (int s = 0; s < UNITS / 4; s++) {
                const Squares<32> ups(strips), gates(strips + HALF_STRIP),
                    swiglus(strips + 2 * HALF_STRIP);
                wait_strip_empty<0>();
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float* const x = &acc[n % 2][4 * (4 * s + n / 2 * 2)];
                    uint32 up[4], gate_pairs[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        up[k] = as_pair(x[2 * k], x[2 * k + 1]);
                        gate_pairs[k] = as_pair(x[4 * UNITS + 2 * k], x[4 * UNITS + 2 * k + 1]);
                    }
                    ups.store(up, n);
                    gates.store(gate_pairs, n);
                    float gate[8], sigmoid[8], y[8];
#pragma unroll
                    for (int k = 0; k < 8; k++) gate[k] = number(gate_pairs, k);
                    sigmoids(sigmoid, gate);
#pragma unroll
                    for (int k = 0; k < 8; k++) y[k] = swiglu(number(up, k), gate[k], sigmoid[k]);
                    swiglus.store(y, n);
                }
                fence_for_async();
                warpgroup_sync();
                if (leads_warpgroup()) {
                    const int column = item.column + 32 * s;
                    store_box(&out, strips, column, 0, item.row);
                    store_box(&out, strips + HALF_STRIP, column, 1, item.row);
                    store_box(&swiglu_out, strips + 2 * HALF_STRIP, column, item.row, 0);
                    stores_commit();
                }
            }
        });
}

// A slot holds a strip of up and the strip of gate beside it, later those of dup and dgate.
MATMUL matmul_backward_inp_swiglu(MAP dinp, MAP dout, MAP weight, MAP inp, int M, int N, int K,
                                  int band) {
    // pairs of strips of a tile; slots for them
    constexpr int BN = WIDE_BN, STRIPS = BN / 32, SLOTS = 4;
    extern __shared__ __align__(1024) element stages[];
    // guard `slots`: inp is loaded, dinp written
    __shared__ Mbarrier inp_full[SLOTS], dinp_full[SLOTS];
    // guards their order: a phase ends when the epilogue of a tile does
    __shared__ Mbarrier epilogue_turn;
    element* const slots = stages + STAGES_ROOM;
    if (threadIdx.x == 0) {
        for (int k = 0; k < SLOTS; k++)
            mbarrier_init(&inp_full[k], 1), mbarrier_init(&dinp_full[k], WARPGROUP);
        mbarrier_init(&epilogue_turn, WARPGROUP);
    }
    const Sizes z = {M, N, K, band, 1};
    int tile = warpgroup() - 1;  // which of the block's tiles this consumer is at
    matmul<BN, 0, 1>(
        dout, weight, z,
        [&](Accumulators<BN>& acc, const Item& item, element*) {  // epilogue: inp becomes dinp
            // Wait for the turn, because of parity, as in matmul_forward_gelu: once the previous
            // tile's strips are done, no slot is two phases behind what this tile waits for.
            warpgroup_sync();
            if (tile > 0) mbarrier_wait(&epilogue_turn, (tile & 1) ^ 1);
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                const int current = tile * STRIPS + s;
                element* const slot = slots + current % SLOTS * STRIP;
                const Squares<32> ups(slot), gates(slot + HALF_STRIP);
                mbarrier_wait(&inp_full[current % SLOTS], current / SLOTS & 1);
                __syncwarp();
                uint32 next[4];  // the next square of gate
                gates.load(next, 0);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float* const x = &acc[n % 2][4 * (4 * s + n / 2 * 2)];
                    uint32 up[4], gate_pairs[4];
                    ups.load(up, n);
                    float gate[8], sigmoid[8];
#pragma unroll
                    for (int k = 0; k < 8; k++) gate[k] = number(next, k);
                    if (n < 3) gates.load(next, n + 1);
                    sigmoids(sigmoid, gate);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int i = 2 * k, j = i + 1;
                        const float2 left =
                            swiglu_gradient(x[i], number(up, i), gate[i], sigmoid[i]);
                        const float2 right =
                            swiglu_gradient(x[j], number(up, j), gate[j], sigmoid[j]);
                        up[k] = as_pair(left.x, right.x);
                        gate_pairs[k] = as_pair(left.y, right.y);
                    }
                    ups.store(up, n);
                    gates.store(gate_pairs, n);
                }
                fence_for_async();
                mbarrier_arrive(&dinp_full[current % SLOTS]);
            }
            mbarrier_arrive(&epilogue_turn);
            tile += CONSUMERS;
        },
        [&] {  // side job, of one warp's first thread
            if (threadIdx.x != 32) return;
            exchange_strips<32>(
                slots, inp_full, dinp_full, z,
                [&](const Item& at, element* to, Mbarrier* full) {
                    load_box(to, &inp, full, at.column, 0, at.row);
                    load_box(to + HALF_STRIP, &inp, full, at.column, 1, at.row);
                },
                [&](const Item& at, const element* from) {
                    store_box(&dinp, from, at.column, 0, at.row);
                    store_box(&dinp, from + HALF_STRIP, at.column, 1, at.row);
                });
        });
}

// Queries and keys are rotated, as rope.cu does, but before they are rounded. Row n is at position
// n % T of rope.
template <int BN>
__device__ __forceinline__ void forward_rope(const TensorMap& out, const TensorMap& inp,
                                             const TensorMap& weight,
                                             const float2* rope, int T, const Sizes& z) {
    constexpr int HEAD = HS / 8, UNITS = BN / 8;  // units of 8 columns: of a head, and of a tile
    static_assert(HEAD <= UNITS, "a tile has each pair of a head");
    matmul<BN, 0, 0>(inp, weight, z, [&](Accumulators<BN>& acc, const Item& item, element* strips) {
        const Layout at;
        if (item.column < Q + KV) {
            const float2* angles[4];  // of the thread's rows
#pragma unroll
            for (int k = 0; k < 4; k++)
                angles[k] = rope + int64((item.row + at.row(k)) % T) * (HS / 2) + at.t;
#pragma unroll
            // two units at a time: 8 loads in flight
            for (int first = 0; first < HEAD; first += 2) {
                float2 angle[2][4];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    angle[j / 4][j % 4] =
                        angles[j % 4][(item.column + 8 * (first + j / 4)) % HS / 2];
                }
#pragma unroll
                for (int unit = first; unit < UNITS; unit += HEAD) {
                    if (item.column + 8 * unit >= Q + KV) break;
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float* x = &acc[j % 4 / 2][4 * (unit + j / 4) + j % 2 * 2];
                        rotate(x[0], x[1], angle[j / 4][j % 4]);
                    }
                }
            }
        }
        store_tile<BN>(out, acc, item, strips, 1.0f, nullptr, z.N);
    });
}

MATMUL matmul_forward_rope(MAP out, MAP inp, MAP weight, const float2* rope, int T, int M, int N,
                           int K, int band) {
    forward_rope<WIDE_BN>(out, inp, weight, rope, T, {M, N, K, band, 1});
}

MATMUL matmul_forward_rope_narrow(MAP out, MAP inp, MAP weight, const float2* rope, int T, int M,
                                  int N, int K,
                                  int band) {
    forward_rope<NARROW_BN>(out, inp, weight, rope, T, {M, N, K, band, 1});
}
