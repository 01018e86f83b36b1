// The matmuls of FP8 operands, gradients in E5M2, all else in E4M3, for Hopper (sm_90a). In shared
// memory, wgmma asks for operands of 8 bits with the inner dimension K contiguous; a (K,M), below, is
// transposed on its way to registers.
//
//     matmul_fp8                 out (M,N) = factor * a (M,K) @ b (N,K)^T + bias                  out =
//     matmul_fp8_qknorm          the same, and QK-norm of queries and keys                        out =, rstd =
//     matmul_fp8_gelu            the same, and gelu = GELU(out), of the rounded out, in 8 bits    out =, gelu =
//     matmul_fp8_inp             dinp (M,N) = factor * a (M,K) @ b (N,K)^T, a a gradient          dinp =
//     matmul_fp8_gelu_backward   the same, times GELU'(inp), in 8 bits                            dinp =
//                                partials[tile] = column sums of dinp                             partials =
//     matmul_fp8_weight          dweight (M,N) = factor * a (K,M)^T @ b (N,K)^T, a a gradient     dweight =
//     matmul_fp8_weight_across   dweight (N,M) = the same, transposed, b a gradient               dweight =
//     matmul_fp8_classifier_inp  as matmul_fp8_inp, for a long K                                  dinp =
//
// out, inp (M,N), bias (N): bfloat16; factor = scale / *a_scale / *b_scale, where llmc/gpu/fp8.py
// has the operands' scales. What results in 8 bits is written times its own scale.
//
// All but the last three are hopper/matmul.cuh's pipeline. Its accumulators, in the tensor cores,
// keep about 14 bits: enough for a few thousand products, but the B*T or Vp of them that the last
// three add up would be off by percents
// (DeepSeek-V3 2024, https://arxiv.org/abs/2412.19437, section 3.3.2). There, each step's sums are
// added in float32. As that takes as many registers again, two consumers share a tile, 64 rows
// each; one adds while the other multiplies.

#define MATMUL_FP8 1
#include "fp8.cuh"
#include "gelu.cuh"
#include "hopper/matmul.cuh"

// Block (384, with GELU or QK-norm 512); grid (at most as many blocks as items); shared memory: as
// in matmul.cu. Boxes of the maps, rows x bytes: a 128 x 128, b 192 x 128 (narrow: 160 x 128, with
// GELU or QK-norm: 128 x 128); rows x columns: out 128 x 64 (narrow, with QK-norm: 128 x 32).
template <int BN, bool A_E5M2>
__device__ __forceinline__ void multiply(const TensorMap& out, const TensorMap& a,
                                         const TensorMap& b, const element* bias,
                                         const float* a_scale, const float* b_scale, float scale,
                                         const Sizes& z) {
    matmul<BN, 0, 0, false, 1, CONSUMERS, A_E5M2>(
        a, b, z, [&](Accumulators<BN>& acc, const Item& item, element* strips) {
            store_tile<BN>(out, acc, item, strips, scale * factor_of(a_scale, b_scale), bias, z.N);
        });
}

MATMUL matmul_fp8(MAP out, MAP a, MAP b, const element* bias, const float* a_scale,
                  const float* b_scale, float scale,
                  int M, int N, int K, int band) {
    multiply<WIDE_BN, false>(out, a, b, bias, a_scale, b_scale, scale, {M, N, K, band, 1});
}

MATMUL matmul_fp8_narrow(MAP out, MAP a, MAP b, const element* bias, const float* a_scale,
                         const float* b_scale,
                         float scale, int M, int N, int K, int band) {
    multiply<NARROW_BN, false>(out, a, b, bias, a_scale, b_scale, scale, {M, N, K, band, 1});
}

MATMUL matmul_fp8_inp(MAP out, MAP a, MAP b, const element* bias, const float* a_scale,
                      const float* b_scale, float scale, int M, int N, int K, int band) {
    multiply<WIDE_BN, true>(out, a, b, bias, a_scale, b_scale, scale, {M, N, K, band, 1});
}

MATMUL matmul_fp8_inp_narrow(MAP out, MAP a, MAP b, const element* bias, const float* a_scale,
                             const float* b_scale, float scale, int M, int N, int K, int band) {
    multiply<NARROW_BN, true>(out, a, b, bias, a_scale, b_scale, scale, {M, N, K, band, 1});
}

// With GELU or QK-norm, an epilogue takes longer than a mainloop, mostly waiting for its own
// results: a warp for each scheduler is not enough. So there are three consumers, with tiles of 128
// columns.
constexpr int GELU_CONSUMERS = 3, GELU_BN = 128, GELU_THREADS = MATMUL_GELU_THREADS;
static_assert(GELU_THREADS == (1 + GELU_CONSUMERS) * WARPGROUP, "as launched");
static_assert(MATMUL_FP8_GELU_SHARED ==
                  (MATMUL_STAGES * (BM + GELU_BN) * BK + 2 * GELU_CONSUMERS * STRIP)
                      * sizeof(element),
              "shared memory: the steps, and two strips for each consumer");

#if QK_NORM
#include "rope.cuh"

// acc * factor + bias, then its queries and keys normalized, scaled and rotated, as qknorm.cu does,
// but before they are rounded. A tile has whole heads; units are 8 columns, of which a thread has
// two.
__device__ __forceinline__ void qknorm_tile(Accumulators<GELU_BN>& acc, float* rstd,
                                            const element* bias,
                                            const float2* rope, float factor, float scale,
                                                float eps, int T,
                                            const Item& item, const Sizes& z) {
    constexpr int HEAD = HS / 8;  // units
    const Layout at;
#pragma unroll
    for (int unit = 0; unit < GELU_BN / 8; unit++) {
        const int c = item.column + 8 * unit;
        const float2 b = as_floats(c < z.N ? *reinterpret_cast<const uint32*>(bias + c + 2 * at.t)
                                   : 0);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float* const x = &acc[k / 2][4 * unit + k % 2 * 2];
            x[0] = x[0] * factor + b.x, x[1] = x[1] * factor + b.y;
        }
    }
#pragma unroll
    for (int first = 0; first < GELU_BN / 8; first += HEAD) {
        const int c = item.column + 8 * first;
        if (c >= Q + KV) return;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = item.row + at.row(k);
            const float2* const angles = rope + int64(row % T) * (HS / 2) + at.t;
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; j < HEAD; j++) {
                const float* const x = &acc[k / 2][4 * (first + j) + k % 2 * 2];
                squares += x[0] * x[0] + x[1] * x[1];
            }
            const float r = 1.0f / sqrtf(quad_sum(squares) / HS + eps),
                times = c < Q ? r * scale : r;
            if (at.t == 0 && row < z.M) rstd[int64(row) * (NH + NKV) + c / HS] = r;
#pragma unroll
            for (int j = 0; j < HEAD; j++) {
                float* const x = &acc[k / 2][4 * (first + j) + k % 2 * 2];
                const bool rotates = 4 * j < ROTATED_PAIRS;
                x[0] *= times, x[1] *= times;
                rotate(x[0], x[1], rotates ? angles[4 * j] : float2{1.0f, 0.0f});
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(GELU_THREADS, 1)
matmul_fp8_qknorm(MAP out, float* rstd, MAP a, MAP b, const element* bias, const float* a_scale,
                  const float* b_scale,
                  const float2* rope, float scale, float eps, int T, int M, int N, int K,
                      int band) {
    const Sizes z = {M, N, K, band, 1};
    matmul<GELU_BN, 0, 0, false, 1, GELU_CONSUMERS>(
        a, b, z, [&](Accumulators<GELU_BN>& acc, const Item& item, element* strips) {
            qknorm_tile(acc, rstd, bias, rope, factor_of(a_scale, b_scale), scale, eps, T, item, z);
            store_tile<GELU_BN>(out, acc, item, strips, 1.0f, nullptr, N);
        });
}
#endif

constexpr int HALF_COLUMNS = 32, HALF_STRIP = STRIP / 2;  // a half strip: elements of 128 x 32

// A warp's squares of a half strip in 8 bits, of 128 x 32 numbers, swizzled as TMA expects them.
// Squares and a thread's numbers of one are as in matmul.cuh. Two squares, of 16 columns of both
// halves, are worked on together: less waiting.
struct ByteSquares {
    unsigned char* row;  // of this lane in two squares' four 8 x 8 matrices of 16 bits
    int swizzle;
    __device__ ByteSquares(element* half_strip) {
        const int lane = threadIdx.x % 32, half = lane / 16, warp = threadIdx.x % WARPGROUP / 32;
        row = reinterpret_cast<unsigned char*>(half_strip) + (half * 64 + warp * 16 + lane % 16)
            * HALF_COLUMNS;
        swizzle = lane % 8 / 4;
    }
    __device__ void store(const uint32 (&rows)[4], int c) const {  // of squares 2c and 2c + 1
        store_tiles(rows, row + (c ^ swizzle) * 16);
    }
    __device__ void load(float (&x)[16], int c) const {
        uint32 rows[4];
        load_tiles<0>(rows, reinterpret_cast<const element*>(row + (c ^ swizzle) * 16));
        floats_of_squares(x, rows);
    }
};

// A tile's accumulators * factor + bias, rounded: [half][2 * j + k] are columns 8j + 2t and 8j + 2t
// + 1 of row g + 8k of a half. They take half as many registers, and leave the others to what
// follows. What is beyond M and N becomes 0.
typedef uint32 Pairs[2][GELU_BN / 4];

// Products of bfloat16.
__device__ inline uint32 times(uint32 pair, uint32 factors) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(factors));
    return pair;
}

template <bool HAS_BIAS>
__device__ __forceinline__ void round_tile(Pairs& pairs, const Accumulators<GELU_BN>& acc,
                                           float factor,
                                           const element* bias, const Item& item, const Sizes& z) {
#pragma unroll
    for (int j = 0; j < GELU_BN / 8; j++) {
        const uint32 factors = as_pair(factor, factor);
        // the compiler moves nothing across: more would take too many registers
        if (j % 2 == 0) __syncwarp();
        float2 b = {0.0f, 0.0f};
        if (HAS_BIAS) {
            const int c = item.column + 8 * j + threadIdx.x % 4 * 2;
            b = as_floats(c < z.N ? *reinterpret_cast<const uint32*>(bias + c) : 0);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float* const x = &acc[k / 2][4 * j + k % 2 * 2];
            pairs[k / 2][2 * j + k % 2] = HAS_BIAS
                ? as_pair(x[0] * factor + b.x, x[1] * factor + b.y)
                                                   // the same, and faster
                                                   : times(as_pair(x[0], x[1]), factors);
        }
    }
    if (item.row + BM <= z.M && item.column + GELU_BN <= z.N) return;
    const Layout at;
#pragma unroll
    for (int j = 0; j < GELU_BN / 8; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (item.row + at.row(k) >= z.M || item.column + 8 * j >= z.N)
                pairs[k / 2][2 * j + k % 2] = 0;
        }
    }
}

// The amax and counts of a tile, padding beyond M and N excluded.
__device__ inline AmaxStats noted_of_tile(float scale, const Item& item, const Sizes& z,
                                          bool is_e5m2 = false) {
    AmaxStats noted(scale, is_e5m2);
    if (leads_warpgroup()) {
        noted.underflowed = 128
            * (min(BM, z.M - item.row) * min(GELU_BN, z.N - item.column) - BM * GELU_BN);
    }
    return noted;
}

// half_strip (128 x 32) = the tile's columns from 32 * s on. s is not known at compile time, so
// that the loop over half strips need not be unrolled: 60 KB of code would not fit into the
// instruction cache.
template <int CANDIDATE = 0>
__device__ __forceinline__ void fill_half_strip(const Squares<HALF_COLUMNS>& half_strip,
                                                const Pairs& pairs,
                                                int s) {
    if (s == CANDIDATE) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint32* const p = &pairs[n % 2][8 * CANDIDATE + n / 2 * 4];
            half_strip.store({p[0], p[1], p[2], p[3]}, n);
        }
        // else the compiler may merge the branches: pairs in local memory
        asm volatile("// %0" ::"n"(CANDIDATE));
    } else if constexpr (CANDIDATE + 1 < GELU_BN / HALF_COLUMNS) {
        fill_half_strip<CANDIDATE + 1>(half_strip, pairs, s);
    }
}

// Boxes of the maps: out 128 x 32; in 8 bits 128 x 32; a, b as above. Squared ReLU's out is not
// stored: see gelu.cuh.
extern "C" __global__ void __launch_bounds__(GELU_THREADS, 1)
matmul_fp8_gelu(MAP out, MAP gelu, MAP a, MAP b, const element* bias, const float* a_scale,
                const float* b_scale,
                const float* gelu_scale, int* largest, int64* counts, int M, int N, int K,
                    int band) {
    typedef Accumulators<GELU_BN> Tile;
    const Sizes z = {M, N, K, band, 1};
    matmul<GELU_BN, 0, 0, false, 1,
        GELU_CONSUMERS>(a, b, z, [&](Tile& acc, const Item& item, element* strips) {
        const float factor = factor_of(a_scale, b_scale);
        const uint32 scales = as_pair(*gelu_scale, *gelu_scale);
        AmaxStats noted = noted_of_tile(*gelu_scale, item, z);
        Pairs pairs_of_tile;
        round_tile<true>(pairs_of_tile, acc, factor, bias, item, z);
        wait_strip_empty<0>();
#pragma unroll 1
        for (int s = 0; s < GELU_BN / HALF_COLUMNS; s++) {
        element* const strip = strips + s % 2 * STRIP;
        const int column = item.column + HALF_COLUMNS * s;
        const Squares<HALF_COLUMNS> outs(strip);
        const ByteSquares gelus(strip + HALF_STRIP);
        if (s > 1) wait_strip_empty<1>();
        fill_half_strip(outs, pairs_of_tile, s);
        __syncwarp();
#pragma unroll 1
        for (int c = 0; c < 2; c++) {
        uint32 pairs[2][4], results[8], rows[4];
        float y[16];
        Gate gate[16];
        outs.load(pairs[0], 2 * c);
        outs.load(pairs[1], 2 * c + 1);
#pragma unroll
        for (int k = 0; k < 16; k++) y[k] = number(pairs[k / 8], k % 8);
        if (!MODEL_RELU2) gates(gate, y);
        const auto result =
            [&](int k) { return MODEL_RELU2 ? ::gelu(y[k]) : __fmul_rn(y[k], gate[k].s); };
#pragma unroll
        // rounded to bfloat16 first, so that it can be recomputed from out
        for (int k = 0; k < 16; k += 2) {
        results[k / 2] = as_pair(result(k), result(k + 1));
        const float2 scaled = as_floats(times(results[k / 2], scales));
        y[k] = scaled.x, y[k + 1] = scaled.y;
        }
        round_squares(rows, y);
        noted.add(results, rows);
        gelus.store(rows, c);
        }
        fence_for_async();
        warpgroup_sync();
        if (leads_warpgroup()) {
        if (!MODEL_RELU2) store_box(&out, strip, column, item.row, 0);
        store_box(&gelu, strip + HALF_STRIP, column, item.row, 0);
        stores_commit();
        }
        }
        noted.publish(largest, counts);
    });
}

// Each consumer has room for four half strips: two of inp, one of dout @ weight, and one of dinp in
// 8 bits. Its first thread loads inp's: two before the mainloop, the others later, from the L2
// cache. Boxes: inp 128 x 32. Squared ReLU reads gelu, in 8 bits, not inp.
extern "C" __global__ void __launch_bounds__(GELU_THREADS, 1)
matmul_fp8_gelu_backward(MAP dinp, float* partials, MAP a, MAP b, MAP inp, MAP gelu,
                         const float* a_scale,
                         const float* b_scale, const float* gelu_scale, const float* dinp_scale,
                             int* largest,
                         int64* counts, int M, int N, int K, int band) {
    const Sizes z = {M, N, K, band, 1};
    const TensorMap& read = MODEL_RELU2 ? gelu : inp;
    constexpr int STRIPS = GELU_BN / HALF_COLUMNS;
    __shared__ Mbarrier inp_full[GELU_CONSUMERS][2];         // guards the half strips of inp
    // column sums over the rows of each warp
    __shared__ float sums[GELU_CONSUMERS][4][HALF_COLUMNS];
    if (threadIdx.x == 0) {
        for (int k = 0; k < 2 * GELU_CONSUMERS; k++) mbarrier_init(&inp_full[k / 2][k % 2], 1);
    }
    const int consumer = max(warpgroup() - 1, 0);
    int current = 0;  // which of the consumer's half strips this is
    const auto load_strip = [&](const Item& item, element* strips, int s, int number) {
        Mbarrier* const full = &inp_full[consumer][number % 2];
        mbarrier_arrive_expect_tx(full, HALF_STRIP * (MODEL_RELU2 ? 1 : sizeof(element)));
        load_box(strips + number % 2 * HALF_STRIP, &read, full, item.column + HALF_COLUMNS * s,
                 item.row, 0);
    };
    matmul<GELU_BN, 0, 0, false, 1, GELU_CONSUMERS, true>(
        a, b, z,
        [&](Accumulators<GELU_BN>& acc, const Item& item, element* strips) {
            const float unscale = inverse_of_scale(*dinp_scale);
            const float factor = *dinp_scale * factor_of(a_scale, b_scale);
            const float root = MODEL_RELU2 ? gate(inverse_of_scale(*gelu_scale)).s : 1.0f;
            element *const dgelu = strips + STRIP, *const result = dgelu + HALF_STRIP;
            const Squares<HALF_COLUMNS> dgelus(dgelu);
            const ByteSquares dinps(result);
            AmaxStats noted = noted_of_tile(1.0f, item, z, true);
            Pairs pairs_of_tile;
            round_tile<false>(pairs_of_tile, acc, factor, nullptr, item, z);
#pragma unroll 1
            for (int s = 0; s < STRIPS; s++, current++) {
                const int column = item.column + HALF_COLUMNS * s;
                element* const inp_strip = strips + current % 2 * HALF_STRIP;
                const Squares<HALF_COLUMNS> inps(inp_strip);
                float* const of_warp = sums[consumer][threadIdx.x % WARPGROUP / 32];
                fill_half_strip(dgelus, pairs_of_tile, s);
                wait_strip_empty<0>();
                mbarrier_wait(&inp_full[consumer][current % 2], current / 2 & 1);
                __syncwarp();
#pragma unroll 1
                for (int c = 0; c < 2; c++) {
                    uint32 pairs[2][4], rows[4];
                    float x[16], total[4];
                    Gate gate[16];
                    if (MODEL_RELU2) {
                        ByteSquares(inp_strip).load(x, c);
                    } else {
                        inps.load(pairs[0], 2 * c);
                        inps.load(pairs[1], 2 * c + 1);
#pragma unroll
                        for (int k = 0; k < 16; k++) x[k] = number(pairs[k / 8], k % 8);
                    }
                    dgelus.load(pairs[0], 2 * c);
                    dgelus.load(pairs[1], 2 * c + 1);
                    gates(gate, x);
#pragma unroll
                    for (int k = 0; k < 16; k++) {
                        x[k] = number(pairs[k / 8], k % 8)
                            * (root * gelu_derivative(x[k], gate[k]));
                    }
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        // row g, then row g + 8, of both halves
                        const int first = k / 2 * 4 + k % 2;
                        total[k] = (x[first] + x[first + 2]) + (x[first + 8] + x[first + 10]);
                    }
                    round_squares<true>(rows, x);
                    noted.add(x, rows);
                    dinps.store(rows, c);
                    sum_columns(of_warp + 16 * c, total);
                }
                fence_for_async();
                warpgroup_sync();
                if (leads_warpgroup()) {
                    store_box(&dinp, result, column, item.row, 0);
                    stores_commit();
                    if (s + 2 < STRIPS) load_strip(item, strips, s + 2, current + 2);
                }
                const int c = threadIdx.x % WARPGROUP;
                if (c < HALF_COLUMNS && column + c < z.N) {
                    const float(&of_warps)[4][HALF_COLUMNS] = sums[consumer];
                    partials[int64(item.row / BM) * z.N + column + c] =
                        (of_warps[0][c] + of_warps[1][c] + of_warps[2][c] + of_warps[3][c])
                            * unscale;
                }
            }
            // if it overflowed: a large one
            noted.largest = fminf(noted.largest, 0x1p127f) * unscale;
            noted.publish(largest, counts);
        },
        Nothing{},
        [&](const Item& item, element* strips) {  // before the mainloop
            if (!leads_warpgroup()) return;
            for (int s = 0; s < 2; s++) load_strip(item, strips, s, current + s);
            for (int s = 2; s < STRIPS; s++)
                prefetch_box(&read, item.column + HALF_COLUMNS * s, item.row, 0);
        });
}

// A's fragments of one step, as wgmma takes them from registers, for a warp's 16 columns of a stage
// of 128 rows (k) x 128 bytes (m). Of 8-bit numbers, ldmatrix transposes pairs; a byte_perm of two
// of them completes it: bytes are then in the order of rows of fp8.cuh, as B's are, and lane 4g + t
// has, in rows g and g + 8 of the fragment, the columns that the order of columns has in places 2g
// and 2g + 1.
__device__ inline void load_transposed(uint32 (&a)[4][4], const element* stage, int columns) {
    const int lane = threadIdx.x % 32;
    const element* const from = stage + lane * 64 + (columns / 16 ^ lane % 8) * 8;
#pragma unroll
    for (int slice = 0; slice < 4; slice++) {  // 32 of K
        uint32 x[4];
        load_tiles<1>(x, from + slice * (32 * 64));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            a[slice][k] = __byte_perm(x[k / 2 * 2], x[k / 2 * 2 + 1],
                                      k % 2 ? ODD_TRANSPOSED : EVEN_TRANSPOSED);
        }
    }
}

// out = factor * a @ b^T, with sums in float32. A_IS_TRANSPOSED: a is (K,M), else (M,K). ACROSS:
// out is (N,M), and b the gradient, not a. partials, done: see items.cuh; a half of a tile, 64 rows,
// stands for a tile there.
template <bool A_IS_TRANSPOSED, bool ACROSS, class Number>
__device__ __forceinline__ void multiply_long(Number* out, float4* partials, int* done,
                                              const TensorMap& a, const TensorMap& b, float factor,
                                              const Sizes& z) {
    constexpr int BN = MATMUL_FP8_LONG_BN, STAGE = (BM + (BN + 63) / 64 * 64) * BK,
        STAGES = STAGES_ROOM / STAGE;
    constexpr int SUMS = BN / 2, QUADS = SUMS / 4;  // of a thread: floats, float4s
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> step_ring;
    if (threadIdx.x == 0) {
        step_ring.init(1, 4 * CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS<false>>();
        if (threadIdx.x == 0) load_steps<BN, A_IS_TRANSPOSED, 0, 1>(a, b, z, step_ring, stages);
        return;
    }
    take_registers<COMPUTE_REGISTERS<false>>();
    const int half = warpgroup() - 1, thread = threadIdx.x % WARPGROUP,
        first_row = half * 64 + thread / 32 * 16;
    const int g = thread % 32 / 4, t = thread % 4;
    Item item;
    for (int w = blockIdx.x, n = 0; pick<BM, BN, STEP>(item, w, z); w += gridDim.x) {
        float sums[SUMS] = {};
        for (int step = item.begin; step < item.end; step++, n++) {
            float products[SUMS];
            uint32 of_a[4][4];
            const element* const from = stages + n % STAGES * STAGE;
            const unsigned long long a_at = descriptor(from) + half * 512,
                b_at = descriptor(from + BM * BK);
            step_ring.wait_full(n);
            if (A_IS_TRANSPOSED) load_transposed(of_a, from, first_row);
            wgmma_fence();
#pragma unroll
            for (int slice = 0; slice < 4; slice++) {
                if (A_IS_TRANSPOSED) {
                    wgmma<0, !ACROSS, ACROSS>(products, of_a[slice], b_at + slice * 2, slice > 0);
                } else {
                    wgmma<0, 0, true>(products, a_at + slice * 2, b_at + slice * 2, slice > 0);
                }
            }
            wgmma_commit();
            wgmma_wait<0>(products);
            step_ring.release(n);
#pragma unroll
            for (int j = 0; j < SUMS; j++) sums[j] += products[j];
        }

        const int tile = 2 * item.tile + half;
        const auto quad = [&](int j) { return sums + 4 * j; };
        float4* const of_tile = partials + int64(tile) * (WARPGROUP * QUADS);
        if (!add_splits<WARPGROUP,
            QUADS>(of_tile, done + tile, item, z.splits, quad, warpgroup_sync)) continue;
        const int row = item.row + first_row + (A_IS_TRANSPOSED ? g % 2 * 7 + g : g),
            next = A_IS_TRANSPOSED ? 1 : 8;
#pragma unroll
        // (row, c), (row, c + 1), (row + next, c), (row + next, c + 1)
        for (int j = 0; j < QUADS; j++) {
            float* const x = quad(j);
            const int c = item.column + 8 * j + 2 * t;
            if (row >= z.M || c >= z.N) continue;
            if (ACROSS) {
                for (int k = 0; k < 2; k++)
                    put_pair(out + int64(c + k) * z.M + row, x[k] * factor, x[2 + k] * factor);
                continue;
            }
            put_pair(out + int64(row) * z.N + c, x[0] * factor, x[1] * factor);
            if (row + next < z.M)
                put_pair(out + int64(row + next) * z.N + c, x[2] * factor, x[3] * factor);
        }
    }
}

MATMUL matmul_fp8_weight(gradient* dweight, float4* partials, int* done, MAP a, MAP b,
                         const float* a_scale, const float* b_scale, float scale, int M, int N,
                         int K, int band, int splits) {
    multiply_long<true, false>(dweight, partials, done, a, b, scale * factor_of(a_scale, b_scale),
                               {M, N, K, band, splits});
}

MATMUL matmul_fp8_weight_across(gradient* dweight, float4* partials, int* done, MAP a, MAP b,
                                const float* a_scale, const float* b_scale, float scale, int M,
                                int N, int K, int band, int splits) {
    multiply_long<true, true>(dweight, partials, done, a, b, scale * factor_of(a_scale, b_scale),
                              {M, N, K, band, splits});
}

MATMUL matmul_fp8_classifier_inp(element* dinp, float4* partials, int* done, MAP a, MAP b,
                                 const float* a_scale, const float* b_scale, float scale, int M,
                                 int N, int K, int band, int splits) {
    multiply_long<false, false>(dinp, partials, done, a, b, scale * factor_of(a_scale, b_scale),
                                {M, N, K, band, splits});
}
