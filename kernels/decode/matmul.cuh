// out (N,OC) = x (N,C) @ weight (OC,C)^T on the tensor cores, 16 rows of x by 8 of the weight at a
// time. A block has 16 rows of x, and ROWS rows of the weight at a time; its warps share the inner
// dimension. For few rows of x, reading the weight from memory bounds it; for many, reading it from
// the L2 cache once for each 16 rows. The order of each sum is the same whatever N is: warps' sums
// are added up two by two.

#pragma once

#include "decode/layernorm.cuh"
#include "decode/tile.cuh"
#include "mma.cuh"

constexpr int X_ROWS = DECODE_X_ROWS;  // of x, in a block
constexpr int CHUNK = 4 * PACK;        // of the inner dimension, for a warp at a time: 64 bytes

// Block (THREADS); grid (N / X_ROWS rounded up, up to OC / ROWS, parts of the inner dimension). OC
// is a multiple of ROWS. Dynamic shared memory: `stages` tiles of the weight; the warps' sums for
// up to N rows of x, twice if stages is not 1; rows of x, if the block normalizes them. Rows of x
// and of the weight are STRIDE elements apart.
#define MATMUL extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS)

extern __shared__ uint4 shared[];

constexpr int STRIDE = DECODE_ROW_BYTES / sizeof(element);

static_assert(X_ROWS == 16 && (ROWS == 16 || ROWS == 8),
              "a fragment has 16 rows of x, or 8 of the weight");
static_assert(X_ROWS * ROWS <= THREADS, "a thread for each sum of a tile");
static_assert(STRIDE >= C, "there is room for whole rows");
static_assert(C % ROWS == 0 && QKV % ROWS == 0 && Vp % ROWS == 0 && 2 * F % ROWS == 0,
              "weights have whole tiles");
static_assert(DECODE_ROW_BYTES % 128 == 64,
              "the 8 lanes of a quarter-warp, 4 of each of two rows, meet in no bank");

__device__ inline element* shared_weights(int stage) {
    return reinterpret_cast<element*>(shared) + stage * ROWS * STRIDE;
}
__device__ inline float* shared_sums(int stages, int N, int tile) {
    return reinterpret_cast<float*>(shared_weights(stages))
        + (stages > 1 ? tile % 2 : 0) * WARPS * N * ROWS;
}
__device__ inline element* shared_x(int stages, int N) {
    return reinterpret_cast<element*>(shared_sums(stages, N, 0)
                                      + min(stages, 2) * WARPS * N * ROWS);
}

// The rows of x that a block has.
struct Group {
    int begin, N;
    __device__ explicit Group(int all) : begin(blockIdx.x * X_ROWS), N(min(X_ROWS, all - begin)) {}
};

// A lane's 16 bytes of a chunk of its warp begin here, those of rows g and g + 8 of x and of a
// weight's tile. Within a chunk, the order of the inner dimension is the one in which they are
// neighbours, in both operands.
__device__ inline int begin_of(int step, int warp) {
    return (step * WARPS + warp) * CHUNK + threadIdx.x % 4 * PACK;
}
// The inner dimension, or a part of it: `length` elements, at least LEAST and at most MOST.
template <int MOST, int LEAST = MOST>
struct Inner {
    static constexpr int STEPS = (MOST + WARPS * CHUNK - 1) / (WARPS * CHUNK);
    // x in registers, while this block has tiles
    static constexpr bool KEEP = STEPS <= (BFLOAT16 ? 8 : 4);
    int length = MOST;
    // Whether a lane's 16 bytes are there: known when it is compiled, but for the last steps.
    __device__ bool exists(int step, int warp) const {
        return (step + 1) * WARPS * CHUNK <= LEAST
            || begin_of(step, warp) < (LEAST == MOST ? MOST : length);
    }
};

// What belongs to a dot product, requested before it is needed: a bias, which the sum begins with;
// an angle.
struct Ahead {
    element bias;
    float2 angle;
};

// This block's tiles of a weight, in shared memory: a ring of `stages` tiles, tile i = 0, 1, 2 ...
// in stage i % stages. Each lane requests what it will read itself, and waits for that alone. A
// tile of a GATED weight (2F,.) has ROWS / 2 rows of its upper half, and those F rows further down.
template <class Inner, bool GATED>
struct WeightTiles {
    Inner inner;
    const element* rows;  // of the next tile to request
    int stride;           // elements from one row to the next
    int64 tile_stride;    // and from one tile to the next
    int left;             // tiles to request
    int stages, stage = 0;

    __device__ WeightTiles(Inner inner, const element* rows, int stride, int64 tile_stride,
                           int tiles, int stages)
        : inner(inner), rows(rows), stride(stride), tile_stride(tile_stride), left(tiles),
          stages(stages) {
        for (int s = 0; s < stages; s++) request(s);
    }
    __device__ void request(int to) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < Inner::STEPS * ROWS / 8; i++) {
            const int step = i / (ROWS / 8), row = i % (ROWS / 8) * 8 + g,
                at = begin_of(step, warp);
            const int from = GATED ? row % (ROWS / 2) + row / (ROWS / 2) * F : row;
            if (left <= 0 || !inner.exists(step, warp)) continue;
            copy_async(reinterpret_cast<uint4*>(shared_weights(to) + row * STRIDE + at),
                       reinterpret_cast<const uint4*>(rows + int64(from) * stride + at), true);
        }
        copies_commit();
        rows += tile_stride, left--;
    }
    __device__ void wait() {
        static_assert(DECODE_STAGES == 4, "as many as there are here");
        if (stages == 1) copies_wait<0>();
        else if (stages == 2) copies_wait<1>();
        else if (stages == 3) copies_wait<2>();
        else copies_wait<3>();
    }
    // This lane has read the tile: its stage is for another one.
    __device__ void next() {
        request(stage);
        if (++stage == stages) stage = 0;
    }
};

struct Inputs {  // of rows g and g + 8
    uint4 upper, lower;
};

template <class Inner>
__device__ inline Inputs load_inputs(Inner inner, const element* x, int stride, int step, int N) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const auto row = [&](int n) {
        return n < N && inner.exists(step, warp)
            ? load_bits(x + int64(n) * stride + begin_of(step, warp)) : uint4{};
    };
    return {row(g), row(g + 8)};
}

// Two sums, because an instruction that adds to the result of the one before it waits for that.
typedef FragmentD Sums[2];

__device__ inline void multiply(Sums& d, const Inputs& x, uint4 w) {
    const auto& [upper, lower] = x;
#if BFLOAT16
    mma(d[0], {upper.x, lower.x, upper.y, lower.y}, {w.x, w.y});
    mma(d[1], {upper.z, lower.z, upper.w, lower.w}, {w.z, w.w});
#else
    const auto f = [](uint32 bits) { return __uint_as_float(bits); };
    mma(d[0], {f(upper.x), f(lower.x), f(upper.y), f(lower.y)}, {f(w.x), f(w.y)});
    mma(d[1], {f(upper.z), f(lower.z), f(upper.w), f(lower.w)}, {f(w.z), f(w.w)});
#endif
}

// Where a warp's sum for row n of x and row r of the weight is, so that neither writers nor readers
// meet in a bank.
__device__ inline int sum_at(int n, int r) { return n * ROWS + (ROWS == 16 ? r ^ (n & 2) * 4 : r); }

// For each of this block's rows of a weight, `stride` elements apart, and each of its rows of x:
// finish(row, n, the dot product, angle), with what ahead(row) has requested. begin(): waits for x,
// and says where the block's rows are.
template <bool GATED, class Inner, class AheadOf, class Begin, class Finish>
__device__ inline void matmul_rows(Inner inner, const element* weight, int stride, int OC,
                                   Group rows, int stages, int x_stride, const AheadOf& ahead,
                                   const Begin& begin, const Finish& finish) {
    constexpr bool KEEP = Inner::KEEP;
    // rows from one tile to the next
    constexpr int STEPS = Inner::STEPS, TILE = GATED ? ROWS / 2 : ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4,
        N = rows.N;
    // of this block's tiles
    const int count = (OC / ROWS - int(blockIdx.y) + int(gridDim.y) - 1) / int(gridDim.y);
    const auto row_of = [&](int tile) {
        return int(blockIdx.y + tile * gridDim.y) * ROWS + int(threadIdx.x) % ROWS;
    };
    const auto ahead_of = [&](int tile) { return tile < count ? ahead(row_of(tile)) : Ahead{}; };
    let_next_begin();
    Ahead tile_ahead = ROPE ? Ahead{} : ahead_of(0);
    WeightTiles<Inner, GATED> tiles(inner, weight + int64(blockIdx.y) * TILE * stride, stride,
                                    int64(gridDim.y) * TILE * stride, count, stages);
    // an angle's place waits for the position, the weights shall not
    if (ROPE) tile_ahead = ahead_of(0);
    const element* const x = begin();
    Inputs kept[KEEP ? STEPS : 1];
#pragma unroll
    for (int i = 0; KEEP && i < STEPS; i++)
        kept[KEEP ? i : 0] = load_inputs(inner, x, x_stride, i, N);
#pragma unroll 1
    for (int tile = 0; tile < count; tile++) {
        const element* const weights = shared_weights(tiles.stage);
        float* const sums = shared_sums(stages, N, tile);
        const Ahead next_ahead = ahead_of(tile + 1);
        Sums d[ROWS / 8] = {};
        tiles.wait();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const Inputs inputs = KEEP ? kept[KEEP ? i : 0] : load_inputs(inner, x, x_stride, i, N);
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const element* const row = weights + (8 * half + g) * STRIDE;
                multiply(d[half], inputs,
                         inner.exists(i, warp) ? load_bits(row + begin_of(i, warp)) : uint4{});
            }
        }
#pragma unroll
        for (int i = 0; i < X_ROWS / 8; i++) {
            const int n = 8 * i + g;
            if (n >= N) continue;
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const Sums& both = d[half];
                put_pair(sums + warp * N * ROWS + sum_at(n, 8 * half + 2 * t),
                         both[0][2 * i] + both[1][2 * i],
                         both[0][2 * i + 1] + both[1][2 * i + 1]);
            }
        }
        __syncthreads();  // all have written their sums
        tiles.next();
        if (threadIdx.x < N * ROWS) {
            const int n = threadIdx.x / ROWS, at = sum_at(n, threadIdx.x % ROWS);
            float sum = to_float(tile_ahead.bias);
#pragma unroll
            for (int w = 0; w < WARPS; w += 2)
                sum += sums[w * N * ROWS + at] + sums[(w + 1) * N * ROWS + at];
            finish(row_of(tile), rows.begin + n, sum, tile_ahead.angle);
        }
        tile_ahead = next_ahead;
        // all have read the sums; otherwise the next tile has others
        if (stages == 1) __syncthreads();
    }
}

// The same where x is a layernorm: normed (N,C) or, if that is null, computed here, after a sum of
// COUNT parts.
template <int COUNT, bool GATED = false, class AheadOf, class Finish>
__device__ inline void normalized_matmul(const Residual& residual, const element* branch_bias,
                                         const element* normed, const element* ln_weight,
                                         const element* ln_bias, const element* weight, int OC,
                                         int N, int stages, const AheadOf& ahead,
                                         const Finish& finish) {
    const Group rows(N);
    if (normed) {
        return matmul_rows<GATED>(Inner<C>{}, weight, C, OC, rows, stages, C, ahead, [&] {
            wait_for_inputs();
            return normed + int64(rows.begin) * C;
        }, finish);
    }
    const Vectors vectors(branch_bias, ln_weight, ln_bias);
    matmul_rows<GATED>(Inner<C>{}, weight, C, OC, rows, stages, STRIDE, ahead, [&] {
        element* const x = shared_x(stages, rows.N);
        wait_for_inputs();
        for (int n = 0; n < rows.N; n++) {
            normalize<COUNT>(x + n * STRIDE, residual, vectors, n, N, blockIdx.y == 0);
        }
        __syncthreads();
        return x;
    }, finish);
}
