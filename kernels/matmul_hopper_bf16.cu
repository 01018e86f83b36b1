// Matrix products for Hopper (sm_90a), bfloat16, with what stands beside them done in the epilogue.
//
// The kernels, their arguments and formulas are those of matmul.cuh.
//
// A block stays on its multiprocessor and takes items, tiles of 128 x 192 of `out`, or of 128 x 160 ("narrow"), one after the other. It is
// three warpgroups: one thread of the first has TMA bring 128 x 64 of A and 64 x 192 of B at a time, always some steps ahead, over the end
// of a tile too. The other two compute, each a tile of its own, in turns: while the tensor cores work on one group's tile, the other rounds
// its own, applies what the epilogue asks for, and hands it to TMA to write. So the epilogue costs nothing as long as it is shorter than a
// tile's product: 12 steps of 768 cycles when the inner dimension is 768.
//
// dweight has few tiles and a long inner dimension: that is split among blocks where there are too few tiles for the multiprocessors.
// Each part adds its sums to those of the parts before it, in their order, so that the result does not depend on who was first. What is
// there is read with several loads underway; a gradient that is added to is brought by TMA.
//
// Bound by the tensor cores: 2048 multiply-adds a cycle and multiprocessor; on large products by power. H200, GPT-2 124M, all products of a
// step together, beside cuBLASLt with searched algorithms: 0.97 times as fast at B=4, 1.02 at B=32, 1.03 at B=64. fc with GELU at B=64:
// 0.51 ms, 0.65 with cuBLASLt and a kernel for GELU. The ladder is in dev/kernels/matmul_hopper.cu, what was tried in dev/products.md.

#include "hopper.cuh"
#include "matmul.cuh"

static_assert(sizeof(element) == 2, "TF32 and float32 are in matmul.cu");

constexpr int BM = 128, BK = 64;  // BN, the columns of a tile, is 192, 160 or 128
constexpr int GROUPS = 2;         // that compute
constexpr int THREADS = (1 + GROUPS) * GROUP;
// A thread's in the loading group, which spills with fewer, and in a computing one: 504 in three. With tiles of 128 columns, the computing
// threads have registers to spare for overlapping, and can use all that they get.
template <int BN>
constexpr int LOADER_REGISTERS = BN > 128 ? 40 : 24;
template <int BN>
constexpr int COMPUTE_REGISTERS = (504 - LOADER_REGISTERS<BN>) / 2;
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

// For each of the block's tiles, in the group that computes it: prepare(item, strips), the product, finish(sums, item, strips). `strips` is
// room for two strips that belongs to the group. finish() must bring the group's warps together: see `turn`.
template <int BN, int A_ACROSS, int B_ACROSS, class Prepare, class Finish>
__device__ __forceinline__ void multiply(const TensorMap& a_map, const TensorMap& b_map, const Sizes& z, Prepare prepare,
                                         Finish finish) {
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
        give_registers<LOADER_REGISTERS<BN>>();
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
    } else {
        take_registers<COMPUTE_REGISTERS<BN>>();
        const int group = warpgroup() - 1;
        element* const strips = stages + STAGES_ROOM + group * 2 * STRIP;
        for (int w = blockIdx.x, i = 0, n = 0; pick<BM, BN, BK>(item, w, z); w += gridDim.x, i++) {
            const int steps = item.end - item.begin;
            if (i % GROUPS == group) {
                Sums<BN> sums;  // the first product overwrites them
                prepare(item, strips);
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
            n += steps;
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

// A thread's pairs of a strip, one unit after the other. The next ones are loaded before anything is stored, for which they would
// have to wait.
struct Reader {
    uint32 next[4];
    __device__ void begin(element* strip) { load(strip, 0); }
    __device__ void load(element* strip, int unit) {
        const Place at;
#pragma unroll
        for (int k = 0; k < 4; k++) next[k] = *at.pair(strip, unit, k);
    }
    __device__ void read(float (&x)[8], element* strip, int unit) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 both = as_floats(next[k]);
            x[2 * k] = both.x;
            x[2 * k + 1] = both.y;
        }
        if (unit < 7) load(strip, unit + 1);
    }
};

// out = GELU of what the same thread put into a strip. (Of what it still has in registers, the compiler works out one after the other.)
__device__ __forceinline__ void gelu_strip(element* out, element* strip) {
    const Place at;
    Reader reader;
    reader.begin(strip);
#pragma unroll
    for (int unit = 0; unit < 8; unit++) {
        float x[8];
        Gate g[8];
        reader.read(x, strip, unit);
        gates(g, x);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            *at.pair(out, unit, k) = as_pair(__fmul_rn(x[2 * k], g[2 * k].s), __fmul_rn(x[2 * k + 1], g[2 * k + 1].s));
        }
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

struct Nothing {
    __device__ void operator()(const Item&, element*) const {}
};

// Block (384); grid (any number of blocks). Shared memory: STAGES_ROOM + 4 * STRIP elements. Boxes of the maps: A 128 x 64 (rows x
// columns), across 64 x 64; B 192 x 64 (narrow: 160 x 64), across 64 x 64; out, and what is beside it, 128 x 64 (narrow: 128 x 32).
template <int BN>
__device__ __forceinline__ void forward(const TensorMap& out, const TensorMap& inp, const TensorMap& weight, const element* bias,
                                        const Sizes& z) {
    multiply<BN, 0, 0>(inp, weight, z, Nothing(), [&](Sums<BN>& sums, const Item& item, element* strips) {
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_forward_gelu(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap gelu_out,
                    const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight, const element* bias, int M, int N,
                    int K, int band) {
    constexpr int BN = 192;
    multiply<BN, 0, 0>(inp, weight, {M, N, K, band, 1}, Nothing(), [&](Sums<BN>& sums, const Item& item, element* strips) {
#pragma unroll
        for (int s = 0; s < BN / 64; s++) {
            claim<1>();
            fill_strip<BN, 64>(strips, sums, s, 1.0f, bias, item.column, N);
            write_strip(out, strips, item, 64 * s);
            claim<1>();
            gelu_strip(strips + STRIP, strips);
            write_strip(gelu_out, strips + STRIP, item, 64 * s);
        }
    });
}

template <int BN>
__device__ __forceinline__ void backward_inp(const TensorMap& dinp, const TensorMap& dout, const TensorMap& weight, float scale,
                                             const Sizes& z) {
    multiply<BN, 0, 1>(dout, weight, z, Nothing(), [&](Sums<BN>& sums, const Item& item, element* strips) {
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

// One step of sum_columns: a lane hands one half of what it has to the lane 4 * DISTANCE away, and adds up the other half.
template <int HALF, int DISTANCE>
__device__ inline void halve(float (&v)[16], bool upper) {
#pragma unroll
    for (int k = 0; k < HALF; k++) {
        const float handed = __shfl_xor_sync(0xffffffff, upper ? v[k] : v[k + HALF], 4 * DISTANCE);
        v[k] = (upper ? v[k + HALF] : v[k]) + handed;
    }
}

// v[2 * unit], v[2 * unit + 1]: a thread's sums over its rows of columns 8 * unit + 2 * t and the next. column[0 .. 63] = those over the
// warp's rows.
__device__ inline void sum_columns(float* column, float (&v)[16]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    halve<8, 1>(v, g & 1);
    halve<4, 2>(v, g & 2);
    halve<2, 4>(v, g & 4);
    const int unit = (g & 1) * 4 + (g & 2) + (g >> 2);
    column[8 * unit + 2 * t] = v[0];
    column[8 * unit + 2 * t + 1] = v[1];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_backward_inp_gelu(const __grid_constant__ TensorMap dinp, float* partials, const __grid_constant__ TensorMap dout,
                         const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap inp, int M, int N, int K, int band) {
    constexpr int BN = 128;                   // so that the epilogue has registers to work on several numbers at once
    __shared__ float columns[GROUPS][4][64];  // sums of each warp's rows
    __shared__ Barrier here[GROUPS];          // inp's tile is
    const int group = warpgroup() - 1;
    int tiles = 0;  // of this group, so far
    if (threadIdx.x == 0) {
        for (int k = 0; k < GROUPS; k++) barrier_make(&here[k], 1);
    }
    const auto load_inp = [&](const Item& item, element* strips) {
        if (!first_of_group()) return;
        stores_wait<0>();
        barrier_expect(&here[group], 2 * STRIP * sizeof(element));
        for (int s = 0; s < 2; s++) load_box(strips + s * STRIP, &inp, &here[group], item.column + 64 * s, item.row, 0);
    };
    multiply<BN, 0, 1>(dout, weight, {M, N, K, band, 1}, load_inp, [&](Sums<BN>& sums, const Item& item, element* strips) {
        const Place at;
        Reader reader;
        float(&of_warps)[4][64] = columns[group];
        barrier_wait(&here[group], tiles++ & 1);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            element* strip = strips + s * STRIP;
            float total[16] = {};
            reader.begin(strip);
#pragma unroll
            for (int unit = 0; unit < 8; unit++) {
                float x[8];
                Gate g[8];
                reader.read(x, strip, unit);
                gates(g, x);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    x[k] = sums[k / 4][4 * (8 * s + unit) + k % 4] * gelu_slope(x[k], g[k]);
                    total[2 * unit + k % 2] += x[k];
                }
#pragma unroll
                for (int k = 0; k < 4; k++) *at.pair(strip, unit, k) = as_pair(x[2 * k], x[2 * k + 1]);
            }
            group_wait();  // the sums of the strip before are read
            sum_columns(of_warps[threadIdx.x % GROUP / 32], total);
            write_strip(dinp, strip, item, 64 * s);
            const int c = threadIdx.x % GROUP, column = item.column + 64 * s + c;
            if (c < 64 && column < N) {
                partials[int64(item.row / BM) * N + column] = of_warps[0][c] + of_warps[1][c] + of_warps[2][c] + of_warps[3][c];
            }
        }
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
    multiply<BN, 1, 1>(dout, inp, z, Nothing(), [&](Sums<BN>& sums, const Item& item, element* strips) {
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
