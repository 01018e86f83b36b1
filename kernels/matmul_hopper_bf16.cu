// Matrix products for Hopper (sm_90a), bfloat16, with what stands beside them done in the epilogue.
//
// The kernels, their arguments and formulas are those of matmul.cuh.
//
// A block stays on its multiprocessor and takes items, tiles of 128 x 192 of `out`, or of 128 x 160 ("narrow"), one after the other. It is
// three warpgroups: one thread of the first has TMA bring 128 x 64 of A and 64 x 192 of B at a time, always some steps ahead, over the end
// of a tile too. The other two compute, each a tile of its own, in turns: while the tensor cores work on one group's tile, the other rounds
// its own, applies what the epilogue asks for, and hands it to TMA to write. So the epilogue costs nothing as long as it is shorter than a
// tile's product: 12 steps of 768 cycles when the inner dimension is 768. GELU would not be, with the few registers that 192 sums leave it:
// a fourth warpgroup does it, of what the computing ones have put into shared memory. Its derivative is just about; there, a warp of the
// loading group brings inp ahead and writes the results, so that the computing ones never wait for TMA.
//
// dweight has few tiles and a long inner dimension: that is split among blocks where there are too few tiles for the multiprocessors.
// Each part adds its sums to those of the parts before it, in their order, so that the result does not depend on who was first. What is
// there is read with several loads underway; a gradient that is added to is brought by TMA.
//
// Bound by the tensor cores, 2048 multiply-adds a cycle and multiprocessor, and nearly as much by shared memory: a step of 768 cycles moves
// 40 KB in and 64 KB to the tensor cores, at 128 bytes a cycle 832. Large products are bound by power. H200, GPT-2 124M, all products of a
// step together, beside cuBLASLt with searched algorithms: with GELU 1.00 times as fast at B=4, 1.05 at B=32 and 1.06 at 64; the products
// alone 0.95, 0.99 and 1.01. fc with GELU at B=64: 0.46 ms, 0.63 with cuBLASLt and a kernel for GELU. The ladder is in
// dev/kernels/matmul_hopper.cu, what was tried in dev/products.md.

#include "hopper.cuh"
#include "matmul.cuh"
#include "mma.cuh"

static_assert(sizeof(element) == 2, "TF32 and float32 are in matmul.cu");

constexpr int BM = 128, BK = 64;  // BN, the columns of a tile, is 192 or 160
constexpr int GROUPS = 2;  // that compute
constexpr int THREADS = (1 + GROUPS) * GROUP;
constexpr int HELPER = 1 + GROUPS;  // the warpgroup that does GELU, where one does
// A thread's, in sum 3 * 168 or, with a helper, 4 * 128. With fewer, the computing groups' products wait for one another.
template <bool HELPED>
constexpr int LOADER_REGISTERS = HELPED ? 24 : 40;
template <bool HELPED>
constexpr int COMPUTE_REGISTERS = HELPED ? 224 : 232;
constexpr int HELPER_REGISTERS = 40;
constexpr int STAGES_ROOM = 80 << 10;  // elements that the steps of both operands have room for
constexpr int STRIP = BM * 64;         // elements of 64 columns of a tile of out
constexpr int OWN = 1;                 // the first of the hardware's barriers for one group alone

template <int BN>
using Sums = float[2][BN / 2];  // a thread's share of a tile: of the rows from 0 and from 64 on

// Where a thread's sums belong: sums[k / 2][4 * j + k % 2 * 2] and the next are two columns, from 8 * j + 2 * t on, of row(k), k = 0 .. 3.
struct Place {
    int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4, first = threadIdx.x % GROUP / 32 * 16 + g;
    __device__ int row(int k) const { return first + k % 2 * 8 + k / 2 * 64; }

    // The two columns from 8 * unit + 2 * t on in row(k) of a strip of 64, which lies as TMA wants it.
    __device__ uint32* pair(element* strip, int unit, int k) const {
        return reinterpret_cast<uint32*>(strip) + first * 32 + (unit ^ g) * 4 + t + (k % 2 * 8 + k / 2 * 64) * 32;
    }

    // The same in a strip of 32 columns, of elements or of gradients, bfloat16 or float32: 64 or 128 bytes a row.
    template <class Number>
    __device__ Number* pair_of_32(void* strip, int unit, int k) const {
        constexpr int ROW = 32 * sizeof(Number);
        const int byte = (8 * unit + 2 * t) * int(sizeof(Number)), turned = ROW == 128 ? g : g / 2;
        return reinterpret_cast<Number*>(static_cast<char*>(strip) + row(k) * ROW + ((byte / 16) ^ turned) * 16 + byte % 16);
    }
};

__device__ inline bool first_of_group() { return threadIdx.x % GROUP == 0; }
__device__ inline void group_wait() { barrier_wait(OWN + warpgroup(), GROUP); }

struct Nothing {
    __device__ void operator()() const {}
};

// For each of the block's tiles, in the group that computes it: the product, and finish(sums, item, strips). `strips` is room for two
// strips that belongs to the group. finish() must bring the group's warps together: see `turn`. help() is called once in each warp of a
// fourth group, if there is one, else in each warp of the loading group that does not load.
template <int BN, int A_ACROSS, int B_ACROSS, bool HELPED = false, class Finish, class Help = Nothing>
__device__ __forceinline__ void multiply(const TensorMap& a_map, const TensorMap& b_map, const Sizes& z, Finish finish,
                                         Help help = {}) {
    constexpr int BOXES = (BN + 63) / 64, STAGE = (BM + BOXES * 64) * BK, STAGES = STAGES_ROOM / STAGE;
    constexpr int LOADED = (BM + (B_ACROSS ? BOXES * 64 : BN)) * BK;  // elements of a step
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> ring;
    __shared__ Barrier turn;  // ends a phase with each item whose last product is begun
    if (threadIdx.x == 0) {
        ring.make(1, 4);
        barrier_make(&turn, 4);
        fence_barriers();
    }
    __syncthreads();
    Item item;

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS<HELPED>>();
        if (!HELPED && threadIdx.x >= 32) help();
        if (threadIdx.x > 0) return;
        for (int w = blockIdx.x, n = 0; pick<BM, BN, BK>(item, w, z); w += gridDim.x) {
            for (int step = item.begin; step < item.end; step++, n++) {
                element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                Barrier* full = &ring.full[n % STAGES];
                ring.wait_for_room(n);
                barrier_expect(full, LOADED * sizeof(element));
                if (A_ACROSS) {
                    for (int j = 0; j < BM / 64; j++) load_box(a + j * 64 * BK, &a_map, full, item.row + 64 * j, step * BK, 0);
                } else {
                    load_box(a, &a_map, full, step * BK, item.row, 0);
                }
                if (B_ACROSS) {
                    for (int j = 0; j < BOXES; j++) load_box(b + j * 64 * BK, &b_map, full, item.column + 64 * j, step * BK, 0);
                } else {
                    load_box(b, &b_map, full, step * BK, item.column, 0);
                }
            }
        }
    } else if (HELPED && warpgroup() == HELPER) {
        give_registers<HELPER_REGISTERS>();
        help();
    } else {
        take_registers<COMPUTE_REGISTERS<HELPED>>();
        const int group = warpgroup() - 1;
        element* const strips = stages + STAGES_ROOM + group * 2 * STRIP;
        int steps;
        for (int w = blockIdx.x, i = 0, n = 0;; w += gridDim.x, i++, n += steps) {
            steps = steps_of<BM, BN, BK>(w, z);
            if (i % GROUPS == group) {
                if (!pick<BM, BN, BK>(item, w, z)) break;
                Sums<BN> sums;  // the first product overwrites them
                // A barrier knows this phase from the one before, and from no other: do not wait for what comes long after.
                if (i > 0) barrier_wait(&turn, (i & 1) ^ 1);
                for (int k = 0; k < steps; k++) {
                    const element *a = stages + (n + k) % STAGES * STAGE, *b = a + BM * BK;
                    const unsigned long long of_a = A_ACROSS ? describe_across(a) : describe(a);
                    const unsigned long long of_b = B_ACROSS ? describe_across(b) : describe(b);
                    ring.wait(n + k);
                    wgmma_fence();
#pragma unroll
                    for (int part = 0; part < BK / 16; part++) {  // 16 of the inner dimension: 32 bytes of each row, or 16 rows
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            wgmma<A_ACROSS, B_ACROSS>(sums[half], of_a + half * 512 + part * (A_ACROSS ? 128 : 2),
                                                      of_b + part * (B_ACROSS ? 128 : 2), k > 0 || part > 0);
                        }
                    }
                    wgmma_commit();
                    if (k > 0) {
                        wgmma_wait<1>();
                        ring.release(n + k - 1);
                    }
                }
                if (threadIdx.x % 32 == 0) barrier_arrive(&turn);
                wgmma_wait<0>();
                pin(sums[0]);
                pin(sums[1]);
                ring.release(n + steps - 1);
                finish(sums, item, strips);
            }
        }
        if (first_of_group()) stores_wait<0>();  // shared memory stays until TMA has read it
    }
}

// Before a strip is filled: all but the newest PENDING that were written are read, so that there is room.
template <int PENDING>
__device__ inline void claim() {
    if (first_of_group()) stores_wait<PENDING>();
    group_wait();
}

// A strip, of the tile's columns from `right` on, is complete: the group's first thread has TMA write it. From there on it is that thread
// that knows when it is read.
__device__ inline void write_strip(const TensorMap& map, const element* strip, const Item& item, int right) {
    fence_for_async();
    group_wait();
    if (first_of_group()) {
        store_box(&map, strip, item.column + right, item.row, 0);
        stores_commit();
    }
}

// strip = (sums of its columns) * scale + bias, rounded.
template <int BN, int WIDE>
__device__ __forceinline__ void fill_strip(element* strip, const Sums<BN>& sums, int s, float scale, const element* bias, int column,
                                           int N) {
    const Place at;
#pragma unroll
    for (int unit = 0; unit < WIDE / 8; unit++) {
        const int c = column + WIDE * s + 8 * unit + 2 * at.t;
        const float2 b = bias && c < N ? as_floats(*reinterpret_cast<const uint32*>(bias + c)) : float2{0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float* x = &sums[k / 2][4 * (WIDE / 8 * s + unit) + k % 2 * 2];
            uint32* pair = WIDE == 64 ? at.pair(strip, unit, k) : reinterpret_cast<uint32*>(at.pair_of_32<element>(strip, unit, k));
            *pair = as_pair(x[0] * scale + b.x, x[1] * scale + b.y);
        }
    }
}

// A strip of 64 columns as a warp's 8 squares of 16 x 16: number n has columns from n / 2 * 16 on, and the warp's 16 of the rows from
// n % 2 * 64 on. Of a square, a thread has four pairs: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
struct Squares {
    element* row;  // where this lane's row of a square's four matrices of 8 x 8 begins, but for `turned`
    int turned;
    __device__ Squares(element* strip) {
        const int lane = threadIdx.x % 32, r = threadIdx.x % GROUP / 32 * 16 + lane % 16;
        row = strip + r * 64;
        turned = lane / 16 ^ r % 8;
    }
    __device__ element* at(int n) const { return row + n % 2 * (64 * 64) + (n / 2 * 2 ^ turned) * 8; }
    __device__ void load(uint32 (&pairs)[4], int n) const { load_tiles<0>(pairs, at(n)); }
    __device__ void store(const uint32 (&pairs)[4], int n) const { store_tiles(pairs, at(n)); }
};

__device__ inline float number(const uint32 (&pairs)[4], int k) {
    const float2 both = as_floats(pairs[k / 2]);
    return k % 2 ? both.y : both.x;
}

// out = GELU(strip). 2^ of the next square's numbers is asked for between the inverses of this one's, so that neither is waited for.
__device__ __forceinline__ void gelu_strip(element* out, element* strip) {
    const Squares from(strip), to(out);
    uint32 x[3][4];
    float e[2][8];
    const auto begin = [&](int n, int k) { e[n % 2][k] = power_of_2(away(number(x[n % 3], k))); };
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
            s[k] = inverse_of_1_plus(s[k]);
            if (n < 7) begin(n + 1, k);
        }
        uint32 pairs[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            pairs[k] = as_pair(__fmul_rn(number(x[n % 3], 2 * k), s[2 * k]), __fmul_rn(number(x[n % 3], 2 * k + 1), s[2 * k + 1]));
        }
        to.store(pairs, n);
    }
}

template <int BN>
__device__ __forceinline__ void write_tile(const TensorMap& map, const Sums<BN>& sums, const Item& item, element* strips, float scale,
                                           const element* bias, int N) {
    constexpr int WIDE = BN % 64 ? 32 : 64;  // columns of a strip
#pragma unroll
    for (int s = 0; s < BN / WIDE; s++) {
        element* strip = strips + s % 2 * STRIP;
        s == 0 ? claim<0>() : claim<1>();
        fill_strip<BN, WIDE>(strip, sums, s, scale, bias, item.column, N);
        write_strip(map, strip, item, WIDE * s);
    }
}

// Block (384), of matmul_forward_gelu (512); grid (not more blocks than items). Shared memory: STAGES_ROOM + 4 * STRIP elements. Boxes of
// the maps: A 128 x 64 (rows x columns), across 64 x 64; B 192 x 64 (narrow: 160 x 64), across 64 x 64; out, and what is beside it, 128 x
// 64 (narrow: 128 x 32).
template <int BN>
__device__ __forceinline__ void forward(const TensorMap& out, const TensorMap& inp, const TensorMap& weight, const element* bias,
                                        const Sizes& z) {
    multiply<BN, 0, 0>(inp, weight, z, [&](Sums<BN>& sums, const Item& item, element* strips) {
        write_tile<BN>(out, sums, item, strips, 1.0f, bias, z.N);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_forward(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
               const element* bias, int M, int N, int K, int band) {
    forward<192>(out, inp, weight, bias, {M, N, K, band, 1});
}

// 1600 columns are 10 narrow tiles, but 8.3 others.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_forward_narrow(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap inp,
                      const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K, int band) {
    forward<160>(out, inp, weight, bias, {M, N, K, band, 1});
}

extern "C" __global__ void __launch_bounds__(THREADS + GROUP, 1)
matmul_forward_gelu(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap gelu_out,
                    const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight, const element* bias, int M, int N,
                    int K, int band) {
    constexpr int BN = 192, ACROSS = BN / 64;  // strips of a tile
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<2> ring;     // of strips of out, which the groups fill and the helping one empties
    __shared__ int2 where[2];    // they lie: column, row
    __shared__ Barrier in_turn;  // ends a phase with each tile that is in the ring
    element *const strips = stages + STAGES_ROOM, *const gelus = strips + 2 * STRIP;
    if (threadIdx.x == 0) {
        ring.make(GROUP, GROUP);
        barrier_make(&in_turn, GROUP);
    }
    int tile = warpgroup() - 1;  // of the block's, the one at hand
    multiply<BN, 0, 0, true>(
        inp, weight, {M, N, K, band, 1},
        [&](Sums<BN>& sums, const Item& item, element*) {
            // Until the tile before is in the ring, that does not know the phases that this one waits for; nor does in_turn until all warps
            // of the group have given theirs: see `turn`.
            group_wait();
            if (tile > 0) barrier_wait(&in_turn, (tile & 1) ^ 1);
#pragma unroll
            for (int s = 0; s < ACROSS; s++) {
                const int n = tile * ACROSS + s;
                element* strip = strips + n % 2 * STRIP;
                ring.wait_for_room(n);
                fill_strip<BN, 64>(strip, sums, s, 1.0f, bias, item.column, N);
                if (first_of_group()) where[n % 2] = int2{item.column + 64 * s, item.row};
                fence_for_async();
                barrier_arrive(&ring.full[n % 2]);
            }
            barrier_arrive(&in_turn);
            tile += GROUPS;
        },
        [&] {
            const int tiles = (M + BM - 1) / BM * ((N + BN - 1) / BN), stride = gridDim.x;
            const int count = (tiles - int(blockIdx.x) + stride - 1) / stride * ACROSS;  // of the block's strips
            for (int n = 0; n < count; n++) {
                element *strip = strips + n % 2 * STRIP, *gelu = gelus + n % 2 * STRIP;
                ring.wait(n);
                const int2 at = where[n % 2];
                if (first_of_group()) {
                    store_box(&out, strip, at.x, at.y, 0);
                    stores_commit();
                }
                __syncwarp();
                gelu_strip(gelu, strip);
                if (first_of_group()) stores_wait<1>();  // the GELUs of the strip before are read, and what comes next has room
                fence_for_async();
                group_wait();
                if (first_of_group()) {
                    store_box(&gelu_out, gelu, at.x, at.y, 0);
                    stores_commit();
                    stores_wait<1>();  // TMA, too, has read the strip
                }
                barrier_arrive(&ring.empty[n % 2]);
            }
            if (first_of_group()) stores_wait<0>();
        });
}

template <int BN>
__device__ __forceinline__ void backward_inp(const TensorMap& dinp, const TensorMap& dout, const TensorMap& weight, float scale,
                                             const Sizes& z) {
    multiply<BN, 0, 1>(dout, weight, z, [&](Sums<BN>& sums, const Item& item, element* strips) {
        write_tile<BN>(dinp, sums, item, strips, scale, nullptr, z.N);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_backward_inp(const __grid_constant__ TensorMap dinp, const __grid_constant__ TensorMap dout,
                    const __grid_constant__ TensorMap weight, float scale, int M, int N, int K, int band) {
    backward_inp<192>(dinp, dout, weight, scale, {M, N, K, band, 1});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_backward_inp_narrow(const __grid_constant__ TensorMap dinp, const __grid_constant__ TensorMap dout,
                           const __grid_constant__ TensorMap weight, float scale, int M, int N, int K, int band) {
    backward_inp<160>(dinp, dout, weight, scale, {M, N, K, band, 1});
}

// v: a thread's sums over its rows of columns 2 * t, 2 * t + 1, 2 * t + 8 and 2 * t + 9. column[0 .. 15] = those over the warp's rows.
__device__ inline void sum_columns(float* column, float (&v)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    halve<2, 1>(v);
    halve<1, 2>(v);
    v[0] += __shfl_xor_sync(0xffffffff, v[0], 16);
    if (g < 4) column[g % 2 * 8 + 2 * t + g / 2] = v[0];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_backward_inp_gelu(const __grid_constant__ TensorMap dinp, float* partials, const __grid_constant__ TensorMap dout,
                         const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap inp, int M, int N, int K, int band) {
    constexpr int BN = 192, ACROSS = BN / 64, PLACES = 4;  // strips of a tile; places for the block's strips, inp's, then dinp's
    extern __shared__ __align__(1024) element stages[];
    __shared__ Barrier here[PLACES], filled[PLACES];  // a strip of inp; of dinp
    __shared__ float columns[2][4][64];               // for a strip, sums of each warp's rows
    __shared__ Barrier read[2];                       // they are
    element* const places = stages + STAGES_ROOM;
    if (threadIdx.x == 0) {
        for (int k = 0; k < PLACES; k++) barrier_make(&here[k], 1), barrier_make(&filled[k], GROUP);
        for (int k = 0; k < 2; k++) barrier_make(&read[k], 32);
    }
    const Sizes z = {M, N, K, band, 1};
    int q = (warpgroup() - 1) * ACROSS;  // of the block's strips, the one at hand
    multiply<BN, 0, 1>(
        dout, weight, z,
        [&](Sums<BN>& sums, const Item& item, element*) {
#pragma unroll
            for (int s = 0; s < ACROSS; s++, q++) {
                const Squares strip(places + q % PLACES * STRIP);
                float* const of_warp = columns[q % 2][threadIdx.x % GROUP / 32];
                barrier_wait(&here[q % PLACES], q / PLACES & 1);
                if (q >= 2) barrier_wait(&read[q % 2], (q / 2 & 1) ^ 1);
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
                    for (int k = 0; k < 8; k++) x[k] = sums[n % 2][4 * (8 * s + n / 2 * 2) + k] * gelu_slope(x[k], g[k]);
                    strip.store({as_pair(x[0], x[1]), as_pair(x[2], x[3]), as_pair(x[4], x[5]), as_pair(x[6], x[7])}, n);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int first = k / 2 * 4 + k % 2;  // row g, then row g + 8
                        total[k] = (n % 2 ? total[k] + x[first] : x[first]) + x[first + 2];
                    }
                    if (n % 2) sum_columns(of_warp + n / 2 * 16, total);
                }
                fence_for_async();
                barrier_arrive(&filled[q % PLACES]);
            }
            q += (GROUPS - 1) * ACROSS;
        },
        [&] {  // a warp brings inp's strips, and writes what the groups make of them
            const int lane = threadIdx.x % 32;
            if (threadIdx.x / 32 != 1) return;
            const auto where = [&](Item& item, int q) {  // false: there is no such strip
                const bool found = pick<BM, BN, BK>(item, blockIdx.x + q / ACROSS * gridDim.x, z);
                item.column += q % ACROSS * 64;
                return found;
            };
            const auto bring = [&](int q) {
                Item item;
                if (lane > 0 || !where(item, q)) return;
                barrier_expect(&here[q % PLACES], STRIP * sizeof(element));
                load_box(places + q % PLACES * STRIP, &inp, &here[q % PLACES], item.column, item.row, 0);
            };
            for (q = 0; q < PLACES; q++) {
                bring(q);
                barrier_wait(&here[0], 0);  // so that who has seen a later one may wait for the next one in this place
            }
            Item item;
            for (q = 0; where(item, q); q++) {
                const float(&of_warps)[4][64] = columns[q % 2];
                barrier_wait(&filled[q % PLACES], q / PLACES & 1);
                if (lane == 0) {
                    store_box(&dinp, places + q % PLACES * STRIP, item.column, item.row, 0);
                    stores_commit();
                }
                for (int c = lane; c < 64 && item.column + c < N; c += 32) {
                    partials[int64(item.row / BM) * N + item.column + c] =
                        of_warps[0][c] + of_warps[1][c] + of_warps[2][c] + of_warps[3][c];
                }
                barrier_arrive(&read[q % 2]);
                __syncwarp();  // what lane 0 brings tells the groups that all lanes have read
                if (lane == 0) stores_wait<1>();  // all strips but this one are read
                if (q > 0) bring(q - 1 + PLACES);
            }
            if (lane == 0) stores_wait<0>();
        });
}

// parts: BM * BN float32 for each tile; done: for each tile, how many parts are in there, 0 before and after. Neither is used when splits
// is 1. Boxes of dweight: 128 x 32.
// A block that waits for another one's part waits for an item before its own, so there is always one that goes on.
template <int BN>
__device__ __forceinline__ void backward_weight(const TensorMap& dweight, float4* parts, int* done, const TensorMap& dout,
                                                const TensorMap& inp, float scale, int accumulate, const Sizes& z) {
    constexpr int WIDE = 32, BYTES = BM * WIDE * sizeof(gradient);  // of a strip
    constexpr int QUADS = BN / 4, UNDERWAY = 8;                     // a thread's sums, 4 at a time; so many loads beside them
    __shared__ Barrier here[GROUPS];                                // what stood in a strip of dweight is
    const int group = warpgroup() - 1;
    int loads = 0;  // of this group, so far
    if (threadIdx.x == 0) {
        for (int k = 0; k < GROUPS; k++) barrier_make(&here[k], 1);
    }
    multiply<BN, 1, 1>(dout, inp, z, [&](Sums<BN>& sums, const Item& item, element* strips) {
        const auto quad = [&](int j) { return &sums[j / (QUADS / 2)][j % (QUADS / 2) * 4]; };
        float4* const before = parts + int64(item.tile) * (BM * BN / 4) + threadIdx.x % GROUP;
        if (item.split > 0) {
            if (first_of_group()) wait_for(done + item.tile, item.split);
            group_wait();
#pragma unroll
            for (int first = 0; first < QUADS; first += UNDERWAY) {
                float4 y[UNDERWAY];
#pragma unroll
                for (int j = 0; j < UNDERWAY; j++) y[j] = __ldcg(before + (first + j) * GROUP);
#pragma unroll
                for (int j = 0; j < UNDERWAY; j++) {
                    float* x = quad(first + j);
                    x[0] += y[j].x, x[1] += y[j].y, x[2] += y[j].z, x[3] += y[j].w;
                }
            }
        }
        if (item.split < z.splits - 1) {
#pragma unroll
            for (int j = 0; j < QUADS; j++) __stcg(before + j * GROUP, float4{quad(j)[0], quad(j)[1], quad(j)[2], quad(j)[3]});
            group_wait();  // what all have written, the first one announces
            if (first_of_group()) announce(done + item.tile, item.split + 1);
            return;
        }
        if (z.splits > 1 && first_of_group()) done[item.tile] = 0;
        const Place at;
#pragma unroll
        for (int s = 0; s < BN / WIDE; s++) {
            element* const strip = strips + s % 2 * STRIP;
            s == 0 ? claim<0>() : claim<1>();
            if (accumulate) {
                if (first_of_group()) {
                    barrier_expect(&here[group], BYTES);
                    load_box(strip, &dweight, &here[group], item.column + WIDE * s, item.row, 0);
                }
                barrier_wait(&here[group], loads++ & 1);
            }
#pragma unroll
            for (int unit = 0; unit < WIDE / 8; unit++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float* x = &sums[k / 2][4 * (WIDE / 8 * s + unit) + k % 2 * 2];
                    put_pair(at.pair_of_32<gradient>(strip, unit, k), x[0] * scale, x[1] * scale, accumulate);
                }
            }
            write_strip(dweight, strip, item, WIDE * s);
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_backward_weight(const __grid_constant__ TensorMap dweight, float4* parts, int* done, const __grid_constant__ TensorMap dout,
                       const __grid_constant__ TensorMap inp, float scale, int accumulate, int M, int N, int K, int band, int splits) {
    backward_weight<192>(dweight, parts, done, dout, inp, scale, accumulate, {M, N, K, band, splits});
}

// 768 columns are 5 narrow tiles, and 3072 x 768 numbers are 120, which gives nearly all multiprocessors of an H200 one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_backward_weight_narrow(const __grid_constant__ TensorMap dweight, float4* parts, int* done, const __grid_constant__ TensorMap dout,
                              const __grid_constant__ TensorMap inp, float scale, int accumulate, int M, int N, int K, int band,
                              int splits) {
    backward_weight<160>(dweight, parts, done, dout, inp, scale, accumulate, {M, N, K, band, splits});
}
