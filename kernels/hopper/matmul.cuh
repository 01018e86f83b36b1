// The pipeline of our matmuls for Hopper (sm_90a), bfloat16 or FP8: matmul.cu, matmul_swiglu.cu and
// matmul_fp8.cu have its epilogues. The design is CUTLASS's "persistent, warp-specialized,
// ping-pong" kernel: one block per multiprocessor takes one work item after the other, tiles of out
// of 128 x 192 or, "narrow", 128 x 160. Data flow:
//
//     A, B           --TMA--> shared memory, a ring buffer of steps --wgmma--> accumulators in registers
//     accumulators   --epilogue--> strips of 32 or 64 columns in shared memory --TMA--> out
//
// A step is 64 of the inner dimension, or 128 in FP8. In the producer warpgroup, one thread issues
// TMA loads, a few steps ahead, across tile boundaries, too. The two consumer warpgroups have a
// tile each, and take turns:
//
//     consumer 0   mainloop, tile 0 | epilogue, tile 0 | mainloop, tile 2 | epilogue, tile 2 | ...
//     consumer 1                    | mainloop, tile 1 | epilogue, tile 1 | mainloop, tile 3 | ...
//
// So the tensor cores never wait for an epilogue that is shorter than a mainloop. Some kernels have
// longer epilogues and hand part of them to other warps as a "side job".
//
// Bound by the tensor cores, 2048 multiply-adds per cycle and multiprocessor, and equally by shared
// memory: a step takes the tensor cores 768 cycles, and moves 40 KB into shared memory and 64 KB
// out of it, 832 cycles at 128 bytes per cycle. Large matmuls are bound by power. The steps from a
// simple kernel to this one are in dev/kernels/matmul_hopper.cu, what was tried in dev/matmul.md.

#pragma once

#include "hopper/hopper.cuh"
#include "hopper/items.cuh"
#include "mma.cuh"

static_assert(sizeof(element) == 2, "TF32 and float32 are cuBLASLt's");

#ifndef MATMUL_FP8
#define MATMUL_FP8 0
#endif
#define MATMUL extern "C" __global__ void __launch_bounds__(THREADS, 1)  // how a kernel begins

// of the inner dimension: 128 bytes of operands
constexpr int STEP = (MATMUL_FP8 ? 2 : 1) * MATMUL_BK;
constexpr int BM = MATMUL_BM, BK = MATMUL_BK;  // BN, the columns of a tile, is WIDE_BN or NARROW_BN
constexpr int WIDE_BN = MATMUL_BN, NARROW_BN = MATMUL_NARROW_BN;
// warpgroups that compute; 3 where an epilogue takes longer than a mainloop
constexpr int CONSUMERS = 2;
constexpr int THREADS = MATMUL_THREADS;
constexpr int GELU_WARPGROUP = 1 + CONSUMERS;  // the fourth warpgroup, only in matmul_forward_gelu
// Registers per thread. Over the warpgroups, they sum to 3 * 168 or, with a GELU warpgroup or a
// third consumer, 4 * 128. With fewer, the consumers' wgmmas would be serialized.
template <bool HAS_FOUR_WARPGROUPS>
constexpr int LOADER_REGISTERS = HAS_FOUR_WARPGROUPS ? 24 : 40;
template <bool HAS_GELU_WARPGROUP, int GROUPS = CONSUMERS>
constexpr int COMPUTE_REGISTERS = GROUPS == 3 ? 160 : HAS_GELU_WARPGROUP ? 224 : 232;
constexpr int GELU_REGISTERS = 40;
// elements of all stages, both operands
constexpr int STAGES_ROOM = MATMUL_STAGES * (BM + WIDE_BN) * BK;
// elements of a strip of 64 columns
constexpr int STRIP = BM * MATMUL_STRIP;

static_assert(THREADS == (1 + CONSUMERS) * WARPGROUP, "beside the consumer warpgroups, one loads");
static_assert(MATMUL_GELU_THREADS == THREADS + WARPGROUP, "and one does GELU");
static_assert(MATMUL_SHARED == (STAGES_ROOM + 2 * CONSUMERS * STRIP) * sizeof(element),
              "shared memory: the steps, and two strips for each consumer");

template <int BN>
// a thread's part of a tile: rows 0 .. 63 and rows 64 .. 127
using Accumulators = float[2][BN / 2];

// The layout of a thread's accumulators: acc[k / 2][4 * j + k % 2 * 2] and the next one are in
// row(k), k = 0 .. 3, in the two columns from 8 * j + 2 * t on.
struct Layout {
    int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4,
        first = threadIdx.x % WARPGROUP / 32 * 16 + g;
    __device__ int row(int k) const { return first + k % 2 * 8 + k / 2 * 64; }

    // The two columns from 8 * unit + 2 * t on of row(k) in a strip of 64 columns, swizzled as TMA
    // expects it.
    __device__ uint32* pair(element* strip, int unit, int k) const {
        return reinterpret_cast<uint32*>(strip) + first * 32 + (unit ^ g) * 4 + t
            + (k % 2 * 8 + k / 2 * 64) * 32;
    }

    // The same in a strip of 32 columns of bfloat16 or float32: 64 or 128 bytes a row, swizzled
    // accordingly.
    template <class Number>
    __device__ Number* pair_of_32(void* strip, int unit, int k) const {
        constexpr int ROW = 32 * sizeof(Number);
        const int byte = (8 * unit + 2 * t) * int(sizeof(Number)), swizzle = ROW == 128 ? g : g / 2;
        char* const at = static_cast<char*>(strip) + row(k) * ROW + ((byte / 16) ^ swizzle) * 16
            + byte % 16;
        return reinterpret_cast<Number*>(at);
    }
};

__device__ inline bool leads_warpgroup() { return threadIdx.x % WARPGROUP == 0; }
// The threads of a warpgroup wait for each other, around the strips that they write.
__device__ inline void warpgroup_sync() { named_barrier_sync(1 + warpgroup(), WARPGROUP); }

struct Nothing {
    template <class... Arguments>
    __device__ void operator()(const Arguments&...) const {}
};
struct Identity {
    __device__ float operator()(float x) const { return x; }
};

// What thread 0 of the producer warpgroup does: load the steps of all of the block's items, one
// after the other.
template <int BN, int A_ACROSS, int B_ACROSS, int HALVES, int STAGES>
__device__ __forceinline__ void load_steps(const TensorMap& a_map, const TensorMap& b_map,
                                           const Sizes& z,
                                           Ring<STAGES>& step_ring, element* stages) {
    constexpr int COLUMNS = BN / HALVES, BOXES = (BN + 63) / 64, STAGE = (BM + BOXES * 64) * BK;
    constexpr int LOADED = (BM + (B_ACROSS ? BOXES * 64 : BN)) * BK;  // elements per step
    Item item;
    for (int w = blockIdx.x, n = 0; pick<BM, COLUMNS, STEP>(item, w, z); w += gridDim.x) {
        for (int step = item.begin; step < item.end; step++, n++) {
            element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
            Mbarrier* full = &step_ring.full[n % STAGES];
            step_ring.wait_empty(n);
            mbarrier_arrive_expect_tx(full, LOADED * sizeof(element));
            if (A_ACROSS) {
                for (int j = 0; j < BM / STEP; j++) {  // boxes of 128 bytes a row
                    load_box(a + j * STEP * BK, &a_map, full, item.row + STEP * j, step * STEP, 0);
                }
            } else {
                load_box(a, &a_map, full, step * STEP, item.row, 0);
            }
            if (B_ACROSS) {
                for (int j = 0; j < BOXES; j++) {
                    load_box(b + j * 64 * BK, &b_map, full, item.column + 64 * j, step * STEP, 0);
                }
            } else {
                for (int half = 0; half < HALVES; half++) {
                    load_box(b + half * COLUMNS * BK, &b_map, full, step * STEP, item.column, half);
                }
            }
        }
    }
}

// The pipeline. For each of the block's tiles, the consumer warpgroup whose turn it is calls
// begin(item, strips), runs the mainloop, then calls epilogue(acc, item, strips). `strips` is its
// shared memory for two strips. epilogue() must synchronize the consumer's warps: see `phase`.
// side_job() is called once, by each warp of the GELU warpgroup if there is one, else by the three
// warps of the producer warpgroup that load nothing.
//
// HALVES 2: out has two halves, and so has b_map, as its batch. A tile is the same BN / 2 columns
// of each half, one after the other in the accumulators; z.N and item.column are columns of a half.
// GROUPS: consumers; with 3, a tile has 128 columns. A_E5M2: in 8 bits, a is a gradient.
template <int BN, int A_ACROSS, int B_ACROSS, bool HAS_GELU_WARPGROUP = false, int HALVES = 1,
    int GROUPS = CONSUMERS, bool A_E5M2 = false,
          class Epilogue, class SideJob = Nothing, class Begin = Nothing>
__device__ __forceinline__ void matmul(const TensorMap& a_map, const TensorMap& b_map,
                                       const Sizes& z,
                                       Epilogue epilogue, SideJob side_job = {}, Begin begin = {}) {
    constexpr int COLUMNS = BN / HALVES;
    constexpr int BOXES = (BN + 63) / 64, STAGE = (BM + BOXES * 64) * BK;
    constexpr int ROOM = GROUPS == 3 ? MATMUL_STAGES * STAGE : STAGES_ROOM, STAGES = ROOM / STAGE;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> step_ring;  // guards `stages`
    // Guards the tensor cores: a phase ends when an item's last wgmma is issued. Of three
    // consumers, each waits for one of its own, because parity could not tell the phase before the
    // last one from it.
    constexpr int TURNS = GROUPS == 2 ? 1 : GROUPS;
    __shared__ Mbarrier mainloop_turn[TURNS];
    if (threadIdx.x == 0) {
        step_ring.init(1, 4);
        for (int k = 0; k < TURNS; k++) mbarrier_init(&mainloop_turn[k], 4);
        fence_mbarrier_init();
    }
    __syncthreads();

    // ---- producer warpgroup: thread 0 loads; the other warps may have a side job
    // -----------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS<HAS_GELU_WARPGROUP || GROUPS == 3>>();
        if (!HAS_GELU_WARPGROUP && threadIdx.x >= 32) side_job();
        if (threadIdx.x == 0)
            load_steps<BN, A_ACROSS, B_ACROSS, HALVES>(a_map, b_map, z, step_ring, stages);
    // ---- GELU warpgroup
    // --------------------------------------------------------------------------------------------
    } else if (HAS_GELU_WARPGROUP && warpgroup() == GELU_WARPGROUP) {
        give_registers<GELU_REGISTERS>();
        side_job();
    // ---- consumer warpgroups, each its own tiles
    // -------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS<HAS_GELU_WARPGROUP, GROUPS>>();
        const int consumer = warpgroup() - 1;
        element* const strips = stages + ROOM + consumer * 2 * STRIP;
        Item item;
        // of the block's i-th item; n: the steps of all items before it, as counted by the ring
        int steps;
        for (int w = blockIdx.x, i = 0, n = 0;; w += gridDim.x, i++, n += steps) {
            steps = steps_of<BM, COLUMNS, STEP>(w, z);
            if (i % GROUPS == consumer) {
                if (!pick<BM, COLUMNS, STEP>(item, w, z)) break;
                begin(item, strips);
                Accumulators<BN> acc;  // the first wgmma overwrites them
#if MATMUL_FP8
                // To the compiler, what is not initialized would live on from the previous tile's
                // through its epilogue, where FP8's needs the registers.
#pragma unroll
                for (int j = 0; j < BN; j++) acc[j / (BN / 2)][j % (BN / 2)] = 0.0f;
#endif

                // Wait for the turn: the consumer before has issued its last wgmma. Parity only
                // tells two phases apart, so no warp may run ahead of its warpgroup: the epilogue
                // synchronizes its warps.
                // has the parity to wait for
                const int phase = TURNS == 1 ? i + 1 : i / TURNS + (consumer == 0);
                if (i > 0) mbarrier_wait(&mainloop_turn[TURNS == 1 ? 0 : consumer], phase & 1);

                // Mainloop: issue the wgmmas of step k, wait for those of step k - 1, and release
                // its stage.
                for (int k = 0; k < steps; k++) {
                    const element *a = stages + (n + k) % STAGES * STAGE, *b = a + BM * BK;
                    const unsigned long long a_at = A_ACROSS ? descriptor_across(a) : descriptor(a);
                    const unsigned long long b_at = B_ACROSS ? descriptor_across(b) : descriptor(b);
                    step_ring.wait_full(n + k);
                    wgmma_fence();
#pragma unroll
                    // 32 bytes of a row, or 16 rows
                    for (int slice = 0; slice < BK / 16; slice++) {
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            wgmma<A_ACROSS, B_ACROSS, A_E5M2>(
                                acc[half], a_at + half * 512 + slice * (A_ACROSS ? 128 : 2),
                                b_at + slice * (B_ACROSS ? 128 : 2), k > 0 || slice > 0);
                        }
                    }
                    wgmma_commit();
                    if (k > 0) {
                        wgmma_wait<1>();
                        step_ring.release(n + k - 1);
                    }
                }

                // Pass the turn to the next consumer, then drain.
                if (threadIdx.x % 32 == 0) mbarrier_arrive(&mainloop_turn[(consumer + 1) % TURNS]);
                wgmma_wait<0>(acc[0], acc[1]);
                step_ring.release(n + steps - 1);

                epilogue(acc, item, strips);
            }
        }
        // the block must not exit before TMA has read its shared memory
        if (leads_warpgroup()) stores_wait<0>();
    }
}

// Called before a strip is filled: wait until TMA has read all strips but the newest PENDING.
template <int PENDING>
__device__ inline void wait_strip_empty() {
    if (leads_warpgroup()) stores_wait<PENDING>();
    warpgroup_sync();
}

// Called when the warpgroup has filled a strip, of the tile's columns from `column` on: its first
// thread stores it.
__device__ inline void store_strip(const TensorMap& map, const element* strip, const Item& item,
                                   int column) {
    fence_for_async();
    warpgroup_sync();
    if (leads_warpgroup()) {
        store_box(&map, strip, item.column + column, item.row, 0);
        stores_commit();
    }
}

// strip = f(the accumulators of strip s of a tile * scale + bias), rounded.
template <int BN, int STRIP_COLUMNS, class F = Identity>
__device__ __forceinline__ void fill_strip(element* strip, const Accumulators<BN>& acc, int s,
                                           float scale,
                                           const element* bias, int column, int N, F f = {}) {
    const Layout at;
#pragma unroll
    for (int unit = 0; unit < STRIP_COLUMNS / 8; unit++) {
        const int c = column + STRIP_COLUMNS * s + 8 * unit + 2 * at.t;
        const float2 b = bias && c < N ? as_floats(*reinterpret_cast<const uint32*>(bias + c))
            : float2{0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float* x = &acc[k / 2][4 * (STRIP_COLUMNS / 8 * s + unit) + k % 2 * 2];
            uint32* pair = STRIP_COLUMNS == 64 ? at.pair(strip, unit, k)
                                      : reinterpret_cast<uint32*>(at.pair_of_32<element>(strip, unit, k));
            *pair = as_pair(f(x[0] * scale + b.x), f(x[1] * scale + b.y));
        }
    }
}

// A warp's rows of a strip of 64 (or 32) columns, as 8 (4) squares of 16 x 16. Square n has columns
// n / 2 * 16 .. + 15 of the warp's 16 rows in half n % 2 of the strip. Of a square, a thread holds
// four pairs, as in wgmma's A operand: at (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
template <int COLUMNS = 64>
struct Squares {
    element* row;  // of this lane in a square's four 8 x 8 matrices
    int swizzle;
    __device__ Squares(element* strip) {
        const int lane = threadIdx.x % 32, r = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
        row = strip + r * COLUMNS;
        swizzle = lane / 16 ^ (COLUMNS == 64 ? r % 8 : r % 8 / 2);
    }
    __device__ element* at(int n) const {
        return row + n % 2 * (64 * COLUMNS) + (n / 2 * 2 ^ swizzle) * 8;
    }
    __device__ void load(uint32 (&pairs)[4], int n) const { load_tiles<0>(pairs, at(n)); }
    __device__ void store(const uint32 (&pairs)[4], int n) const { store_tiles(pairs, at(n)); }
    __device__ void store(const float (&x)[8], int n) const {  // rounded
        store({as_pair(x[0], x[1]), as_pair(x[2], x[3]), as_pair(x[4], x[5]), as_pair(x[6], x[7])},
              n);
    }
};

__device__ inline float number(const uint32 (&pairs)[4], int k) {
    const float2 both = as_floats(pairs[k / 2]);
    return k % 2 ? both.y : both.x;
}

// column[0 .. 15] = the column sums over all rows of the warp. v: the thread's sums over its own
// rows, of columns 2t, 2t + 1, 2t + 8 and 2t + 9.
__device__ inline void sum_columns(float* column, float (&v)[4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    halve<2, 1>(v);
    halve<1, 2>(v);
    v[0] += __shfl_xor_sync(0xffffffff, v[0], 16);
    if (g < 4) column[g % 2 * 8 + 2 * t + g / 2] = v[0];
}

// The plain epilogue: store f(a tile * scale + bias) to the tensor, strip by strip through shared
// memory.
template <int BN, class F = Identity>
__device__ __forceinline__ void store_tile(const TensorMap& map, const Accumulators<BN>& acc,
                                           const Item& item,
                                           element* strips, float scale, const element* bias, int N,
                                               F f = {}) {
    // columns of a strip
    constexpr int STRIP_COLUMNS = BN == WIDE_BN ? MATMUL_STRIP : MATMUL_NARROW_STRIP;
#pragma unroll
    for (int s = 0; s < BN / STRIP_COLUMNS; s++) {
        element* strip = strips + s % 2 * STRIP;
        s == 0 ? wait_strip_empty<0>() : wait_strip_empty<1>();
        fill_strip<BN, STRIP_COLUMNS>(strip, acc, s, scale, bias, item.column, N, f);
        store_strip(map, strip, item, STRIP_COLUMNS * s);
    }
}

// A side job beside an epilogue that turns the strips of inp, of COLUMNS columns, into those of
// dinp, in `slots`: load and store them. Called by a warp or its lane 0, which calls load(item,
// slot, full) and store(item, slot); all call use(item, n) when strip n is done.
template <int COLUMNS, int SLOTS, class Load, class Store, class Use = Nothing>
__device__ __forceinline__ void exchange_strips(element* slots, Mbarrier (&inp_full)[SLOTS],
                                                Mbarrier (&dinp_full)[SLOTS], const Sizes& z,
                                                    Load load, Store store,
                                                Use use = {}) {
    constexpr int STRIPS = WIDE_BN / COLUMNS;  // of a tile
    const bool leads = threadIdx.x % 32 == 0;
    const auto find_strip = [&](Item& item, int n) {  // false: there is no such strip
        const bool found = pick<BM, WIDE_BN, BK>(item, blockIdx.x + n / STRIPS * gridDim.x, z);
        item.column += n % STRIPS * COLUMNS;
        return found;
    };
    const auto begin_load = [&](int n) {
        Item item;
        if (!leads || !find_strip(item, n)) return;
        mbarrier_arrive_expect_tx(&inp_full[n % SLOTS], STRIP * sizeof(element));
        load(item, slots + n % SLOTS * STRIP, &inp_full[n % SLOTS]);
    };
    for (int n = 0; n < SLOTS; n++) {
        begin_load(n);
        // A consumer that begins with a later strip next waits for phase 1 of slot 0, which parity
        // can tell only if phase 0 is over by then.
        mbarrier_wait(&inp_full[0], 0);
    }
    Item item;
    for (int n = 0; find_strip(item, n); n++) {
        mbarrier_wait(&dinp_full[n % SLOTS], n / SLOTS & 1);
        if (leads) {
            store(item, slots + n % SLOTS * STRIP);
            stores_commit();
        }
        use(item, n);
        if (leads) stores_wait<1>();  // TMA has read all strips but this one
        if (n > 0) begin_load(n - 1 + SLOTS);
    }
    if (leads) stores_wait<0>();
}
