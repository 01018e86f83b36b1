// The matmuls of text generation (see decode.cu): out (N,OC) = x @ weight^T on the tensor cores, 16 rows of x by 8 of
// the weight at a time. A block has 16 rows of x, and ROWS rows of the weight at a time; its warps share the inner
// dimension, C of it. TMA brings the weights, or each lane requests those that it will multiply. The order of each sum
// is the same whatever N is, here and in the kernels for many rows: warps' sums are added up two by two.

#pragma once

#include "decode.cuh"
#include "hopper/mbarrier.cuh"
#include "mma.cuh"

constexpr int CHUNK = 4 * PACK;  // of the inner dimension, for a warp at a time: 64 bytes
constexpr int STEPS = (C + WARPS * CHUNK - 1) / (WARPS * CHUNK);
constexpr int X_ROWS = DECODE_X_ROWS;               // of x, in a block
constexpr bool KEEP = STEPS <= (BFLOAT16 ? 8 : 4);  // x in registers, while this block has tiles

// Block (THREADS); grid (N / X_ROWS rounded up, up to OC / ROWS, inner dimension / C). OC is a multiple of ROWS. Shared
// memory, as decode_shared has it: `stages` tiles of weights; the warps' sums for up to N rows of x, twice if there are
// several stages; rows of x, if the block normalizes them. Rows of x and of the weight are STRIDE elements apart.
#define MATMUL extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS)

extern __shared__ uint4 shared[];

constexpr int STRIDE = DECODE_ROW_BYTES / sizeof(element);
constexpr int TILE = ROWS * STRIDE;  // elements
constexpr int MAX_STAGES = DECODE_STAGES;

static_assert(X_ROWS == 16 && (ROWS == 16 || ROWS == 8), "a fragment has 16 rows of x, or 8 of the weight");
static_assert(STRIDE >= C, "the launch makes room for whole rows");
static_assert(DECODE_ROW_BYTES % 128 == 64, "the 8 lanes of a quarter-warp, 4 of each of two rows, meet in no bank");

__device__ inline element* shared_weights(int stage) { return reinterpret_cast<element*>(shared) + stage * TILE; }
__device__ inline float* shared_sums(int stages, int N, int tile) {
    return reinterpret_cast<float*>(shared_weights(stages)) + (stages > 1 ? tile % 2 : 0) * WARPS * N * ROWS;
}
__device__ inline element* shared_x(int stages, int N) {
    return reinterpret_cast<element*>(shared_sums(stages, N, 0) + min(stages, 2) * WARPS * N * ROWS);
}

// The rows of x that a block has.
struct Group {
    int begin, N;
    __device__ explicit Group(int all)
        : begin(blockIdx.x * X_ROWS), N(min(X_ROWS, all - int(blockIdx.x) * X_ROWS)) {}
};

// A lane's 16 bytes of a chunk of its warp begin here, those of rows g and g + 8 of x and of a weight's tile. Within a
// chunk, the order of the inner dimension is the one in which they are neighbours, in both operands.
__device__ inline int begin_of(int step, int warp) {
    return (step * WARPS + warp) * CHUNK + threadIdx.x % 4 * PACK;
}
// Whether they are there: known when it is compiled, but for the last step.
__device__ inline bool exists(int step, int warp) {
    return (step + 1) * WARPS * CHUNK <= C || begin_of(step, warp) < C;
}

// This block's tiles of a weight, in shared memory: a ring of `stages` tiles, tile i = 0, 1, 2 ... in stage i % stages.
// All threads make one, begin it, and for each tile wait for it, read it, say so, and go on to the next one.
struct WeightTiles {
    const element* rows;  // of the next tile to request
    int stride;           // elements from one row to the next
    int64 tile_stride;    // and from one tile to the next
    int left;             // tiles to request
    int stages, stage = 0;
#if DECODE_TMA
    // TMA copies whole rows; the eight of a fragment have an mbarrier.
    static constexpr int EIGHTS = ROWS / 8, EIGHT_BYTES = 8 * C * sizeof(element);
    static constexpr int AHEAD = EIGHT_BYTES <= 32768 ? 32768 / EIGHT_BYTES : 1;
    Mbarrier* const full;
    int parity = 0;

    __device__ WeightTiles(const element* rows, int stride, int64 tile_stride, int tiles, int stages)
        : rows(rows), stride(stride), tile_stride(tile_stride), left(tiles), stages(stages), full(barriers()) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages * EIGHTS; i++) mbarrier_init(full + i, 1);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    __device__ static Mbarrier* barriers() {
        __shared__ Mbarrier all[MAX_STAGES * EIGHTS];
        return all;
    }
    // Request `count` of a tile's rows, by a warp: from row `first` of the ring on. Bytes may come before another warp
    // has announced them: the phase does not end before that.
    __device__ void request(const element* tile, int first, int count) {
        const int lane = threadIdx.x % 32, row = first + lane;
        if (lane >= count) return;
        if (row % 8 == 0) mbarrier_arrive_expect_tx(full + row / 8, EIGHT_BYTES);
        load_bytes(shared_weights(0) + row * STRIDE, tile + int64(row % ROWS) * stride, full + row / 8,
                   C * sizeof(element));
    }
    // Request the first tiles, by the last warp: at most 32 KB at a time, or eight rows if these are more. That keeps
    // memory busy; with more underway, what the kernel before this one still reads would wait.
    __device__ void begin() {
        const int first = min(stages, left), eights = threadIdx.x / 32 == WARPS - 1 ? first * EIGHTS : 0;
#pragma unroll 1
        for (int i = 0; i < eights; i++) {
            if (i >= AHEAD) mbarrier_wait(full + i - AHEAD, 0);
            request(rows + i / EIGHTS * tile_stride, 8 * i, 8);
        }
        rows += first * tile_stride, left -= first;
    }
    __device__ void wait() {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) mbarrier_wait(full + stage * EIGHTS + i, parity);
    }
    __device__ void release() {
        if (left > 0) fence_for_async();
    }
    // All threads have released the tile. Half of the warps request another one, because a warp takes long to do it;
    // the other half begins to add up the sums.
    __device__ void next() {
        constexpr int ROWS_EACH = ROWS / (WARPS / 2);
        const int warp = int(threadIdx.x) / 32 - WARPS / 2;
        if (left > 0) {
            if (warp >= 0) request(rows, stage * ROWS + warp * ROWS_EACH, ROWS_EACH);
            rows += tile_stride, left--;
        }
        if (++stage == stages) stage = 0, parity ^= 1;
    }
#else
    // Each lane requests what it will read itself, and waits for that.
    __device__ WeightTiles(const element* rows, int stride, int64 tile_stride, int tiles, int stages)
        : rows(rows), stride(stride), tile_stride(tile_stride), left(tiles), stages(stages) {}
    __device__ void request(int to) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
        if (left > 0) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int row = g; row < ROWS; row += 8) {
                    const int at = begin_of(step, warp);
                    if (!exists(step, warp)) continue;
                    copy_async(reinterpret_cast<uint4*>(shared_weights(to) + row * STRIDE + at),
                               reinterpret_cast<const uint4*>(rows + int64(row) * stride + at), true);
                }
            }
        }
        copies_commit();
        rows += tile_stride, left--;
    }
    __device__ void begin() {
        for (int s = 0; s < stages; s++) request(s);
    }
    __device__ void wait() {
        static_assert(MAX_STAGES == 4, "as many as there are here");
        if (stages == 1) copies_wait<0>();
        else if (stages == 2) copies_wait<1>();
        else if (stages == 3) copies_wait<2>();
        else copies_wait<3>();
    }
    __device__ void release() {}
    __device__ void next() {
        request(stage);
        if (++stage == stages) stage = 0;
    }
#endif
};

struct Inputs {  // of rows g and g + 8
    uint4 upper, lower;
};

__device__ inline Inputs load_inputs(const element* x, int stride, int step, int N) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const auto row = [&](int n) {
        return n < N && exists(step, warp) ? load_bits(x + int64(n) * stride + begin_of(step, warp)) : uint4{};
    };
    return {row(g), row(g + 8)};
}

// Two sums, because an instruction that adds to the result of the one before it waits for that.
typedef FragmentD Sums[2];

__device__ inline void multiply(Sums& d, const Inputs& x, uint4 w) {
    const auto &[upper, lower] = x;
#if BFLOAT16
    mma(d[0], {upper.x, lower.x, upper.y, lower.y}, {w.x, w.y});
    mma(d[1], {upper.z, lower.z, upper.w, lower.w}, {w.z, w.w});
#else
    const auto f = [](uint32 bits) { return __uint_as_float(bits); };
    mma(d[0], {f(upper.x), f(lower.x), f(upper.y), f(lower.y)}, {f(w.x), f(w.y)});
    mma(d[1], {f(upper.z), f(lower.z), f(upper.w), f(lower.w)}, {f(w.z), f(w.w)});
#endif
}

// Where a warp's sum for row n of x and row r of the weight is, so that neither writers nor readers meet in a bank.
__device__ inline int sum_at(int n, int r) { return n * ROWS + (ROWS == 16 ? r ^ (n & 2) * 4 : r); }

// Where QKV's result goes.
struct QkvResult {
    element *query, *keys, *values;
    int position, maxT, T;

    __device__ element* at(int row, int n) const {  // row: of the weight
        const int b = T == 1 ? n : n / T, c = row % C;  // a division by T takes long
        const int64 cached = (int64(b * NH + c / HS) * maxT + position + n - b * T) * HS + c % HS;
        return row < C ? query + int64(n) * C + c : row < 2 * C ? keys + cached : values + cached;
    }
};

// For each of this block's rows of a weight, `stride` elements apart, and each of its N rows of x: finish(row, n, the
// dot product). All lanes of a warp call it together; those with n >= N have nothing to write. bias: added, if not
// null. begin(): waits for x, and says where its rows are, x_stride elements apart.
template <class Begin, class Finish>
__device__ inline void matmul_rows(const element* weight, int stride, const element* bias, int OC, int N, int stages,
                                   int x_stride, const Begin& begin, const Finish& finish) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int count = (OC / ROWS - int(blockIdx.y) + int(gridDim.y) - 1) / int(gridDim.y);  // of this block's tiles
    const auto row_of = [&](int tile) { return int(blockIdx.y + tile * gridDim.y) * ROWS; };
    const auto bias_of = [&](int tile) {
        return bias && tile < count ? bias[row_of(tile) + threadIdx.x % ROWS] : element{};
    };
    let_next_begin();
    element tile_bias = bias_of(0);
    WeightTiles tiles(weight + int64(row_of(0)) * stride, stride, int64(gridDim.y) * ROWS * stride, count, stages);
    tiles.begin();
    const element* const x = begin();
    Inputs kept[KEEP ? STEPS : 1];
#pragma unroll
    for (int i = 0; KEEP && i < STEPS; i++) kept[KEEP ? i : 0] = load_inputs(x, x_stride, i, N);
#pragma unroll 1
    for (int tile = 0; tile < count; tile++) {
        const element* const weights = shared_weights(tiles.stage);
        float* const sums = shared_sums(stages, N, tile);
        const element next_bias = bias_of(tile + 1);  // requested before it is needed
        Sums d[ROWS / 8] = {};
        tiles.wait();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const Inputs inputs = KEEP ? kept[KEEP ? i : 0] : load_inputs(x, x_stride, i, N);
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const element* const row = weights + (8 * half + g) * STRIDE;
                multiply(d[half], inputs, exists(i, warp) ? load_bits(row + begin_of(i, warp)) : uint4{});
            }
        }
#pragma unroll
        for (int i = 0; i < X_ROWS / 8; i++) {
            const int n = 8 * i + g;
            if (n >= N) continue;
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const Sums& both = d[half];
                *reinterpret_cast<float2*>(sums + warp * N * ROWS + sum_at(n, 8 * half + 2 * t)) = {
                    both[0][2 * i] + both[1][2 * i], both[0][2 * i + 1] + both[1][2 * i + 1]};
            }
        }
        tiles.release();
        __syncthreads();  // all have read the weights, and written their sums
        tiles.next();
        for (int first = warp * 32; first < N * ROWS; first += THREADS) {
            const int i = first + lane, at = sum_at(min(i / ROWS, N - 1), i % ROWS);
            float sum = to_float(tile_bias);
#pragma unroll
            for (int w = 0; w < WARPS; w += 2) sum += sums[w * N * ROWS + at] + sums[(w + 1) * N * ROWS + at];
            finish(row_of(tile) + i % ROWS, i / ROWS, sum);
        }
        tile_bias = next_bias;
        if (stages == 1) __syncthreads();  // all have read the sums; otherwise the next tile has others
    }
}

// The same where x is a layernorm: normed (N,C) or, if that is null, computed here, after a sum of COUNT parts.
template <int COUNT, class Finish>
__device__ inline void normalized_matmul(const Residual& residual, const element* branch_bias, const element* normed,
                                         const element* ln_weight, const element* ln_bias, const element* weight,
                                         const element* bias, int OC, Group rows, int all, int stages,
                                         const Finish& finish) {
    if (normed) {
        return matmul_rows(weight, C, bias, OC, rows.N, stages, C, [&] {
            wait_for_inputs();
            return normed + int64(rows.begin) * C;
        }, finish);
    }
    const Vectors vectors(branch_bias, ln_weight, ln_bias);
    matmul_rows(weight, C, bias, OC, rows.N, stages, STRIDE, [&] {
        element* const x = shared_x(stages, rows.N);
        wait_for_inputs();
        for (int n = 0; n < rows.N; n++) {
            normalize<COUNT>(x + n * STRIDE, residual, vectors, n, all, blockIdx.y == 0);
        }
        __syncthreads();
        return x;
    }, finish);
}
