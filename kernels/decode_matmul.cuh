// The matmuls of text generation (see decode.cu): out (N,OC) = x @ weight^T on the tensor cores, 16 rows of x by 8 of
// the weight at a time. A block has 16 rows of x, and ROWS rows of the weight at a time; its warps share the inner
// dimension, C of it. Each lane requests the weights that it will multiply, and keeps its part of x in registers. The
// order of each sum is the same whatever N is, here and in the kernels for many rows: warps' sums are added up two by
// two.

#pragma once

#include "decode.cuh"
#include "mma.cuh"

constexpr int CHUNK = 4 * PACK;  // of the inner dimension, for a warp at a time: 64 bytes
constexpr int CHUNKS = (C + CHUNK - 1) / CHUNK, STEPS = (CHUNKS + WARPS - 1) / WARPS;  // of a tile; of a warp
constexpr int X_ROWS = DECODE_X_ROWS;               // of x, in a block
constexpr bool KEEP = STEPS <= (BFLOAT16 ? 8 : 4);  // x in registers, while this block has tiles

// Block (THREADS); grid (N / X_ROWS rounded up, up to OC / ROWS, inner dimension / C). OC is a multiple of ROWS. Shared
// memory, as decode_shared has it: `stages` tiles of weights; the warps' sums, twice if there are several stages; rows
// of x, STRIDE elements apart, if the block normalizes them.
#define MATMUL extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS)

extern __shared__ uint4 shared[];

constexpr int TILE = CHUNKS * 4 * ROWS;      // 16 bytes each
constexpr int SUMS = WARPS * X_ROWS * ROWS;  // floats
constexpr int STRIDE = DECODE_ROW_BYTES / sizeof(element);

static_assert(X_ROWS == 16 && (ROWS == 16 || ROWS == 8), "a fragment has 16 rows of x, or 8 of the weight");
static_assert(STRIDE >= C, "the launch makes room for whole rows");

__device__ inline uint4* shared_weights(int stage) { return shared + stage * TILE; }
__device__ inline float* shared_sums(int stages, int tile) {
    return reinterpret_cast<float*>(shared_weights(stages)) + (stages > 1 ? tile % 2 : 0) * SUMS;
}
__device__ inline element* shared_x(int stages) {
    return reinterpret_cast<element*>(shared_sums(stages, 0) + min(stages, 2) * SUMS);
}

// The rows of x that a block has.
struct Group {
    int begin, N;
    __device__ explicit Group(int all)
        : begin(blockIdx.x * X_ROWS), N(min(X_ROWS, all - int(blockIdx.x) * X_ROWS)) {}
};

// A lane's 16 bytes of a chunk of its warp begin here, those of rows g and g + 8 of x and of a weight's tile. Within a
// chunk, the order of the inner dimension is the one in which they are neighbours, in both operands.
__device__ inline int chunk_of(int step, int warp) { return step * WARPS + warp; }
__device__ inline int begin_of(int step, int warp) { return chunk_of(step, warp) * CHUNK + threadIdx.x % 4 * PACK; }
// Whether they are there: known when it is compiled, but for the last step.
__device__ inline bool exists(int step, int warp) {
    return (step + 1) * WARPS * CHUNK <= C || begin_of(step, warp) < C;
}

__device__ inline void request_weights(uint4* to, const element* rows, int stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (!exists(i, warp)) continue;
        const element* const from = rows + int64(g) * stride + begin_of(i, warp);
        uint4* const chunk = to + chunk_of(i, warp) * 4 * ROWS + lane;
        copy_async(chunk, reinterpret_cast<const uint4*>(from), true);
        if (ROWS == 16) copy_async(chunk + 32, reinterpret_cast<const uint4*>(from + int64(8) * stride), true);
    }
}

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
    const int tiles = (OC / ROWS - int(blockIdx.y) + int(gridDim.y) - 1) / int(gridDim.y);
    const auto row_of = [&](int tile) { return int(blockIdx.y + tile * gridDim.y) * ROWS; };
    const auto request = [&](int tile) {
        if (tile < tiles) {
            request_weights(shared_weights(tile % stages), weight + int64(row_of(tile)) * stride, stride);
        }
        copies_commit();
    };
    let_next_begin();
    for (int tile = 0; tile < stages; tile++) request(tile);
    const auto bias_of = [&](int tile) {
        return bias && tile < tiles ? to_float(bias[row_of(tile) + threadIdx.x % ROWS]) : 0.0f;
    };
    float tile_bias = bias_of(0);
    const element* const x = begin();
    Inputs kept[KEEP ? STEPS : 1];
#pragma unroll
    for (int i = 0; KEEP && i < STEPS; i++) kept[KEEP ? i : 0] = load_inputs(x, x_stride, i, N);
    for (int tile = 0; tile < tiles; tile++) {
        const uint4* const weights = shared_weights(tile % stages);
        float* const sums = shared_sums(stages, tile);
        const float next_bias = bias_of(tile + 1);  // requested before it is needed
        Sums d[ROWS / 8] = {};
        // Each lane waits for what it requested itself.
        if (stages == 1) copies_wait<0>();
        else if (stages == 2) copies_wait<1>();
        else if (stages == 3) copies_wait<2>();
        else copies_wait<3>();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const Inputs inputs = KEEP ? kept[KEEP ? i : 0] : load_inputs(x, x_stride, i, N);
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                multiply(d[half], inputs,
                         exists(i, warp) ? weights[chunk_of(i, warp) * 4 * ROWS + 32 * half + lane] : uint4{});
            }
        }
        request(tile + stages);
#pragma unroll
        for (int i = 0; i < X_ROWS / 8; i++) {
            const int n = 8 * i + g;
            if (n >= N) continue;
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const Sums& both = d[half];
                *reinterpret_cast<float2*>(sums + warp * X_ROWS * ROWS + sum_at(n, 8 * half + 2 * t)) = {
                    both[0][2 * i] + both[1][2 * i], both[0][2 * i + 1] + both[1][2 * i + 1]};
            }
        }
        __syncthreads();
        for (int first = warp * 32; first < N * ROWS; first += THREADS) {
            const int i = first + lane, at = sum_at(min(i / ROWS, N - 1), i % ROWS);
            float sum = tile_bias;
#pragma unroll
            for (int w = 0; w < WARPS; w += 2) {
                sum += sums[w * X_ROWS * ROWS + at] + sums[(w + 1) * X_ROWS * ROWS + at];
            }
            finish(row_of(tile) + i % ROWS, i / ROWS, sum);
        }
        tile_bias = next_bias;
        if (stages == 1) __syncthreads();  // all have read the sums; otherwise the next tile has others
    }
}

// The same where x is a layernorm: normed (N,C) or, if that is null, computed here, after a sum of COUNT parts.
template <int COUNT, class Finish>
__device__ inline void normalized_matmul(const Residual& residual, const element* normed, const element* ln_weight,
                                         const element* ln_bias, const element* weight, const element* bias, int OC,
                                         Group rows, int all, int stages, const Finish& finish) {
    const auto begin = [&]() -> const element* {
        if (!normed) {
            for (int n = 0; n < rows.N; n++) {
                normalize<COUNT>(shared_x(stages) + n * STRIDE, residual, ln_weight, ln_bias, n, all, blockIdx.y == 0);
            }
            __syncthreads();
            return shared_x(stages);
        }
        wait_for_inputs();
        return normed + int64(rows.begin) * C;
    };
    matmul_rows(weight, C, bias, OC, rows.N, stages, normed ? C : STRIDE, begin, finish);
}
