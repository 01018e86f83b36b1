// Matmuls for Hopper (sm_90a), bfloat16: epilogues of hopper/matmul.cuh's pipeline, where it says
// what bounds them.
//
//     matmul_forward             out = inp @ weight^T + bias                               out =
//     matmul_forward_gelu        the same, and gelu = GELU(out), of the rounded out        out =, gelu =
//     matmul_backward_inp        dinp = scale * dout @ weight                              dinp =
//     matmul_backward_inp_gelu   dinp = dout @ weight * GELU'(inp)                         dinp =
//                                partials[tile] = column sums of dinp                      partials =
//     matmul_backward_weight     dweight = scale * dout^T @ inp                            dweight =
//
// inp (rows,C), weight (OC,C), out, dout (rows,OC), bias (OC); in matmul_backward_inp_gelu, inp is
// GELU's. (With MODEL_RELU2, out is neither written nor rounded, and inp is the result: see
// gelu.cuh.)
//
// Two kernels have a side job. In matmul_forward_gelu, the epilogue only writes out's strips to
// shared memory; a fourth warpgroup applies GELU and stores both by TMA. In
// matmul_backward_inp_gelu, the epilogue has time to multiply by GELU's derivative, but not to wait
// for TMA; a warp of the producer's prefetches inp's strips, stores dinp's.
//
// dweight has few tiles and a long inner dimension. If the tiles are too few for the
// multiprocessors, the inner dimension is split among blocks (split-K, items.cuh).

#include "gelu.cuh"
#include "hopper/matmul.cuh"

// out = GELU(strip). The next square's exponentials are issued between this one's reciprocals, to
// wait for neither.
__device__ __forceinline__ void gelu_strip(element* out, element* strip) {
    const Squares from(strip), to(out);
    uint32 x[3][4];
    float e[2][8];
    const auto begin = [&](int n, int k) { e[n % 2][k] = begin_gate(number(x[n % 3], k)); };
    from.load(x[0], 0);
    from.load(x[1], 1);
#pragma unroll
    for (int k = 0; k < 8; k++) begin(0, k);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float(&s)[8] = e[n % 2];
        if (n < 6) from.load(x[(n + 2) % 3], n + 2);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            s[k] = end_gate(s[k]);
            if (n < 7) begin(n + 1, k);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = __fmul_rn(number(x[n % 3], k), s[k]);
        to.store(s, n);
    }
}

// For all kernels below: block (384), in matmul_forward_gelu (512); grid (at most as many blocks as
// items); shared memory: STAGES_ROOM + 4 * STRIP elements. Boxes of the maps, rows x columns: A 128
// x 64, across 64 x 64; B 192 x 64 (narrow: 160 x 64), across 64 x 64; out, and the tensors like
// it, 128 x 64 (narrow: 128 x 32).
template <int BN>
__device__ __forceinline__ void forward(const TensorMap& out, const TensorMap& inp,
                                        const TensorMap& weight,
                                        const element* bias, const Sizes& z) {
    matmul<BN, 0, 0>(inp, weight, z, [&](Accumulators<BN>& acc, const Item& item, element* strips) {
        store_tile<BN>(out, acc, item, strips, 1.0f, bias, z.N);
    });
}

MATMUL matmul_forward(MAP out, MAP inp, MAP weight, const element* bias, int M, int N, int K,
                      int band) {
    forward<WIDE_BN>(out, inp, weight, bias, {M, N, K, band, 1});
}

// 1600 columns are 10 narrow tiles, or 8.3 wide ones, where the ninth would be mostly empty.
MATMUL matmul_forward_narrow(MAP out, MAP inp, MAP weight, const element* bias, int M, int N, int K,
                             int band) {
    forward<NARROW_BN>(out, inp, weight, bias, {M, N, K, band, 1});
}

#if MODEL_RELU2
// Squared ReLU takes no special function, and out is not stored: the backward pass reads the
// result. So the consumers apply it, and GELU's warpgroup, launched all the same, is idle.
extern "C" __global__ void __launch_bounds__(THREADS + WARPGROUP, 1)
matmul_forward_gelu(MAP, MAP gelu_out, MAP inp, MAP weight, const element* bias, int M, int N,
                    int K, int band) {
    matmul<WIDE_BN, 0, 0, true>(
        inp, weight, {M, N, K, band, 1},
            [&](Accumulators<WIDE_BN>& acc, const Item& item, element* strips) {
            store_tile<WIDE_BN>(gelu_out, acc, item, strips, 1.0f, bias, N,
                                [](float x) { return gelu(x); });
        });
}
#else
extern "C" __global__ void __launch_bounds__(THREADS + WARPGROUP, 1)
matmul_forward_gelu(MAP out, MAP gelu_out, MAP inp, MAP weight, const element* bias, int M, int N,
                    int K, int band) {
    constexpr int BN = WIDE_BN, STRIPS = BN / 64;  // strips of a tile
    extern __shared__ __align__(1024) element stages[];
    // guards `strips`, of out: filled by the consumers, emptied by the side job
    __shared__ Ring<2> strip_ring;
    __shared__ int2 strip_at[2];        // the strips' columns and rows in out
    // guards the ring's order: a phase ends when all strips of a tile are in
    __shared__ Mbarrier epilogue_turn;
    element *const strips = stages + STAGES_ROOM, *const gelus = strips + 2 * STRIP;
    if (threadIdx.x == 0) {
        strip_ring.init(WARPGROUP, WARPGROUP);
        mbarrier_init(&epilogue_turn, WARPGROUP);
    }
    int tile = warpgroup() - 1;  // which of the block's tiles this consumer is at
    matmul<BN, 0, 0, true>(
        inp, weight, {M, N, K, band, 1},
        [&](Accumulators<BN>& acc, const Item& item, element*) {  // epilogue
            // Wait for the turn: all strips of the previous tile are in the ring. Else the
            // consumer, or without warpgroup_sync() a warp, would wait for phases too far ahead for
            // parity to tell them apart.
            warpgroup_sync();
            if (tile > 0) mbarrier_wait(&epilogue_turn, (tile & 1) ^ 1);
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                const int n = tile * STRIPS + s;
                element* strip = strips + n % 2 * STRIP;
                strip_ring.wait_empty(n);
                fill_strip<BN, 64>(strip, acc, s, 1.0f, bias, item.column, N);
                if (leads_warpgroup()) strip_at[n % 2] = int2{item.column + 64 * s, item.row};
                fence_for_async();
                mbarrier_arrive(&strip_ring.full[n % 2]);
            }
            mbarrier_arrive(&epilogue_turn);
            tile += CONSUMERS;
        },
        [&] {  // side job, of the GELU warpgroup: apply GELU to each strip, store both
            const int tiles = (M + BM - 1) / BM * ((N + BN - 1) / BN), stride = gridDim.x;
            // strips of this block
            const int count = (tiles - int(blockIdx.x) + stride - 1) / stride * STRIPS;
            for (int n = 0; n < count; n++) {
                element *strip = strips + n % 2 * STRIP, *gelu = gelus + n % 2 * STRIP;
                strip_ring.wait_full(n);
                const int2 at = strip_at[n % 2];
                if (leads_warpgroup()) {
                    store_box(&out, strip, at.x, at.y, 0);
                    stores_commit();
                }
                __syncwarp();
                gelu_strip(gelu, strip);
                // TMA has read gelu of strip n - 1: n + 1 will overwrite it
                if (leads_warpgroup()) stores_wait<1>();
                fence_for_async();
                warpgroup_sync();
                if (leads_warpgroup()) {
                    store_box(&gelu_out, gelu, at.x, at.y, 0);
                    stores_commit();
                    stores_wait<1>();  // TMA has read the strip of out
                }
                mbarrier_arrive(&strip_ring.empty[n % 2]);
            }
            if (leads_warpgroup()) stores_wait<0>();
        });
}
#endif

MATMUL matmul_backward_inp(MAP dinp, MAP dout, MAP weight, float scale, int M, int N, int K,
                           int band) {
    constexpr int BN = WIDE_BN;
    matmul<BN, 0, 1>(dout, weight, {M, N, K, band, 1},
                     [&](Accumulators<BN>& acc, const Item& item, element* strips) {
        store_tile<BN>(dinp, acc, item, strips, scale, nullptr, N);
    });
}

MATMUL matmul_backward_inp_gelu(MAP dinp, float* partials, MAP dout, MAP weight, MAP inp, int M,
                                int N, int K,
                                int band) {
    // strips of a tile; slots for inp's, later dinp's
    constexpr int BN = WIDE_BN, STRIPS = BN / 64, SLOTS = 4;
    extern __shared__ __align__(1024) element stages[];
    // guard `slots`: inp is loaded, dinp written
    __shared__ Mbarrier inp_full[SLOTS], dinp_full[SLOTS];
    // a strip's column sums over the rows of each warp
    __shared__ float sums[2][4][64];
    // guards `sums`: the side job has read them
    __shared__ Mbarrier sums_empty[2];
    element* const slots = stages + STAGES_ROOM;
    if (threadIdx.x == 0) {
        for (int k = 0; k < SLOTS; k++)
            mbarrier_init(&inp_full[k], 1), mbarrier_init(&dinp_full[k], WARPGROUP);
        for (int k = 0; k < 2; k++) mbarrier_init(&sums_empty[k], 32);
    }
    const Sizes z = {M, N, K, band, 1};
    int current = (warpgroup() - 1) * STRIPS;  // which of the block's strips this consumer is at
    matmul<BN, 0, 1>(
        dout, weight, z,
        // epilogue: inp becomes dinp; column sums
        [&](Accumulators<BN>& acc, const Item& item, element*) {
#pragma unroll
            for (int s = 0; s < STRIPS; s++, current++) {
                const Squares strip(slots + current % SLOTS * STRIP);
                float* const of_warp = sums[current % 2][threadIdx.x % WARPGROUP / 32];
                mbarrier_wait(&inp_full[current % SLOTS], current / SLOTS & 1);
                if (current >= 2) mbarrier_wait(&sums_empty[current % 2], (current / 2 & 1) ^ 1);
                __syncwarp();
                uint32 next[4];
                strip.load(next, 0);
                float total[4];
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    float x[8];
                    Gate g[8];
#pragma unroll
                    for (int k = 0; k < 8; k++) x[k] = number(next, k);
                    if (n < 7) strip.load(next, n + 1);
                    gates(g, x);
#pragma unroll
                    for (int k = 0; k < 8; k++) {
                        x[k] = acc[n % 2][4 * (8 * s + n / 2 * 2) + k]
                            * gelu_derivative(x[k], g[k]);
                    }
                    strip.store(x, n);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int first = k / 2 * 4 + k % 2;  // row g, then row g + 8
                        total[k] = (n % 2 ? total[k] + x[first] : x[first]) + x[first + 2];
                    }
                    if (n % 2) sum_columns(of_warp + n / 2 * 16, total);
                }
                fence_for_async();
                mbarrier_arrive(&dinp_full[current % SLOTS]);
            }
            current += (CONSUMERS - 1) * STRIPS;
        },
        [&] {  // side job, of one warp: also the column sums
            const int lane = threadIdx.x % 32;
            if (threadIdx.x / 32 != 1) return;
            exchange_strips<64>(
                slots, inp_full, dinp_full, z,
                [&](const Item& at, element* to,
                    Mbarrier* full) { load_box(to, &inp, full, at.column, at.row, 0); },
                [&](const Item& at,
                    const element* from) { store_box(&dinp, from, at.column, at.row, 0); },
                [&](const Item& item, int n) {
                    const float(&of_warps)[4][64] = sums[n % 2];
                    for (int c = lane; c < 64 && item.column + c < N; c += 32) {
                        partials[int64(item.row / BM) * N + item.column + c] =
                            of_warps[0][c] + of_warps[1][c] + of_warps[2][c] + of_warps[3][c];
                    }
                    mbarrier_arrive(&sums_empty[n % 2]);
                    // all lanes are here before lane 0's next load lets a consumer go on
                    __syncwarp();
                });
        });
}

// partials, done: see items.cuh. Boxes of dweight: 128 x 32.
MATMUL matmul_backward_weight(MAP dweight, float4* partials, int* done, MAP dout, MAP inp,
                              float scale, int M, int N,
                              int K, int band, int splits) {
    constexpr int BN = WIDE_BN;
    constexpr int STRIP_COLUMNS = MATMUL_NARROW_STRIP;  // columns of a strip
    matmul<BN, 1, 1>(dout, inp, {M, N, K, band, splits},
                     [&](Accumulators<BN>& acc, const Item& item, element* strips) {
        constexpr int QUADS = BN / 4;  // of a thread
        const auto quad = [&](int j) { return &acc[j / (QUADS / 2)][j % (QUADS / 2) * 4]; };
        float4* const of_tile = partials + int64(item.tile) * (BM * BN / 4);
        if (!add_splits<WARPGROUP,
            QUADS>(of_tile, done + item.tile, item, splits, quad, warpgroup_sync)) return;
        const Layout at;
#pragma unroll
        for (int s = 0; s < BN / STRIP_COLUMNS; s++) {
            element* const strip = strips + s % 2 * STRIP;
            s == 0 ? wait_strip_empty<0>() : wait_strip_empty<1>();
#pragma unroll
            for (int unit = 0; unit < STRIP_COLUMNS / 8; unit++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float* x = &acc[k / 2][4 * (STRIP_COLUMNS / 8 * s + unit) + k % 2 * 2];
                    put_pair(at.pair_of_32<gradient>(strip, unit, k), x[0] * scale, x[1] * scale);
                }
            }
            store_strip(dweight, strip, item, STRIP_COLUMNS * s);
        }
    });
}
