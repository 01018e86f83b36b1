// The matmuls of text generation (see decode.cu): out (N,OC) = x @ weight^T on the tensor cores, 16 rows of x by 8 of
// the weight at a time. A block has ROWS rows of the weight at a time, and a group of rows of x; its warps share the
// inner dimension, C of it. Each lane requests the weights that it will multiply, and keeps its part of x in registers.
// The order of each sum is the same whatever N is.
//
// Compiled twice: for few rows, up to 16, whose kernels have _few after their names, and for more.

#include "decode.cuh"
#include "gelu.cuh"
#include "mma.cuh"

#if DECODE_FEW_ROWS
#define NAMED(name) name##_few
#else
#define NAMED(name) name
#endif
#define MATMUL extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS)

constexpr int TILES = DECODE_TILES;  // of 16 rows of x, a group
constexpr int CHUNK = 4 * PACK;      // of the inner dimension, for a warp at a time
constexpr int CHUNKS = (C + CHUNK - 1) / CHUNK, STEPS = (CHUNKS + WARPS - 1) / WARPS;  // of a tile; of a warp
constexpr bool KEEP = STEPS * TILES <= 8;  // x in registers, while this block has tiles

static_assert(CHUNKS * ROWS * 64 == DECODE_TILE_BYTES && (ROWS == 16 || ROWS == 8), "as the launch has it");

// Block (THREADS); grid (OC / ROWS or fewer, N / (16 * TILES), inner dimension / C). Shared memory: rows of x where the
// block normalizes them, its warps' sums, `stages` tiles of weights, 1 or 2. OC is a multiple of ROWS.

extern __shared__ uint4 shared[];

constexpr int STRIDE = DECODE_ROW_BYTES / sizeof(element);  // from one row of x to the next, in shared memory
static_assert(STRIDE >= C, "the launch makes room for whole rows");

__device__ inline element* shared_x() { return reinterpret_cast<element*>(shared); }
__device__ inline float* shared_sums() {  // (WARPS, 16 * TILES, ROWS + 1)
    return reinterpret_cast<float*>(shared + DECODE_FEW_ROWS * DECODE_FEW * DECODE_ROW_BYTES / 16);
}
__device__ inline uint4* shared_weights(int stage) {
    return reinterpret_cast<uint4*>(shared_sums() + WARPS * 16 * TILES * (ROWS + 1)) + stage * (DECODE_TILE_BYTES / 16);
}

// The rows of x that a block has.
struct Group {
    int begin, N;
    __device__ explicit Group(int all)
        : begin(blockIdx.y * 16 * TILES), N(min(16 * TILES, all - int(blockIdx.y) * 16 * TILES)) {}
};

// A lane's 16 bytes of a chunk of its warp begin here, those of rows g and g + 8 of x and of a weight's tile. Within a
// chunk, the order of the inner dimension is the one in which they are neighbours, in both operands.
__device__ inline int chunk_of(int step) { return step * WARPS + threadIdx.x / 32; }
__device__ inline int begin_of(int step) { return chunk_of(step) * CHUNK + threadIdx.x % 4 * PACK; }
// Whether they are there: known when it is compiled, but for the last step.
__device__ inline bool exists(int step) { return (step + 1) * WARPS * CHUNK <= C || begin_of(step) < C; }

__device__ inline void request_weights(uint4* to, const element* rows, int stride) {
    const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (!exists(i)) continue;
        const element* const from = rows + int64(g) * stride + begin_of(i);
        uint4* const chunk = to + chunk_of(i) * 4 * ROWS + lane;
        copy_async(chunk, reinterpret_cast<const uint4*>(from), true);
        if (ROWS == 16) copy_async(chunk + 32, reinterpret_cast<const uint4*>(from + int64(8) * stride), true);
    }
}

typedef uint4 Inputs[TILES][2];

__device__ inline void load_inputs(Inputs& inputs, const element* x, int stride, int step, int N) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const int row = 8 * i + threadIdx.x % 32 / 4;
        inputs[i / 2][i % 2] = uint4{};
        if (row < N && exists(step)) inputs[i / 2][i % 2] = load_bits(x + int64(row) * stride + begin_of(step));
    }
}

// Two sums, because an instruction that adds to the result of the one before it waits for that.
typedef FragmentD Sums[2];

__device__ inline void multiply(Sums& d, uint4 upper, uint4 lower, uint4 w) {
#if BFLOAT16
    mma(d[0], {upper.x, lower.x, upper.y, lower.y}, {w.x, w.y});
    mma(d[1], {upper.z, lower.z, upper.w, lower.w}, {w.z, w.w});
#else
    const auto f = [](uint32 bits) { return __uint_as_float(bits); };
    mma(d[0], {f(upper.x), f(lower.x), f(upper.y), f(lower.y)}, {f(w.x), f(w.y)});
    mma(d[1], {f(upper.z), f(lower.z), f(upper.w), f(lower.w)}, {f(w.z), f(w.w)});
#endif
}

// For each of this block's rows of a weight, `stride` elements apart, and each of its N rows of x: finish(row, n, the
// dot product). All lanes of a warp call it together; those with n >= N have nothing to write. bias: added, if not
// null. begin(): waits for x, and says where its rows are, x_stride elements apart.
template <class Begin, class Finish>
__device__ inline void matmul_rows(const element* weight, int stride, const element* bias, int OC, int N, int stages,
                                   int x_stride, const Begin& begin, const Finish& finish) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (OC / ROWS - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    const auto row_of = [&](int tile) { return int(blockIdx.x + tile * gridDim.x) * ROWS; };
    const auto request = [&](int tile) {
        if (tile < tiles) {
            request_weights(shared_weights(tile % stages), weight + int64(row_of(tile)) * stride, stride);
        }
        copies_commit();
    };
    let_next_begin();
    for (int tile = 0; tile < stages; tile++) request(tile);
    float* const sums = shared_sums();
    float tile_bias = bias ? to_float(bias[row_of(0) + threadIdx.x % ROWS]) : 0.0f;
    const element* const x = begin();
    Inputs kept[KEEP ? STEPS : 1];
    if (KEEP) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) load_inputs(kept[KEEP ? i : 0], x, x_stride, i, N);
    }
    for (int tile = 0; tile < tiles; tile++) {
        const uint4* const weights = shared_weights(tile % stages);
        Sums d[TILES][ROWS / 8] = {};
        stages == 1 ? copies_wait<0>() : copies_wait<1>();  // each lane for its own
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (!KEEP) load_inputs(kept[0], x, x_stride, i, N);
            const Inputs& inputs = kept[KEEP ? i : 0];
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++) {
                const uint4 w = exists(i) ? weights[chunk_of(i) * 4 * ROWS + 32 * half + lane] : uint4{};
#pragma unroll
                for (int n = 0; n < TILES; n++) multiply(d[n][half], inputs[n][0], inputs[n][1], w);
            }
        }
        request(tile + stages);
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const int n = 8 * i + g;
            if (n >= N) continue;
            float* const to = sums + (warp * 16 * TILES + n) * (ROWS + 1) + 2 * t;
#pragma unroll
            for (int k = 0; k < ROWS / 4; k++) {
                const Sums& both = d[i / 2][k / 2];
                to[k / 2 * 8 + k % 2] = both[0][i % 2 * 2 + k % 2] + both[1][i % 2 * 2 + k % 2];
            }
        }
        __syncthreads();
        if (tile > 0 && bias) tile_bias = to_float(bias[row_of(tile) + threadIdx.x % ROWS]);
        for (int first = warp * 32; first < N * ROWS; first += THREADS) {
            const int i = first + lane, n = min(i / ROWS, N - 1);
            float sum = tile_bias;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[(w * 16 * TILES + n) * (ROWS + 1) + i % ROWS];
            finish(row_of(tile) + i % ROWS, i / ROWS, sum);
        }
        __syncthreads();  // all have read the sums
    }
}

// The same where x is a layernorm: normed (N,C) or, if that is null, computed here, after a sum of COUNT parts.
template <int COUNT, class Finish>
__device__ inline void normalized_matmul(const Residual& residual, const element* normed, const element* ln_weight,
                                         const element* ln_bias, const element* weight, const element* bias, int OC,
                                         Group rows, int all, int stages, const Finish& finish) {
    const auto begin = [&]() -> const element* {
#if DECODE_FEW_ROWS
        if (!normed) {
            for (int n = 0; n < rows.N; n++) {
                normalize<COUNT>(shared_x() + n * STRIDE, residual, ln_weight, ln_bias, n, all, blockIdx.x == 0);
            }
            __syncthreads();
            return shared_x();
        }
#endif
        wait_for_inputs();
        return normed + int64(rows.begin) * C;
    };
    matmul_rows(weight, C, bias, OC, rows.N, stages, normed ? C : STRIDE, begin, finish);
}

MATMUL NAMED(decode_qkv)(element* query, element* keys, element* values, float* residual, const float* inp,
                         const float* branches, const element* branch_bias, const element* normed,
                         const element* ln_weight, const element* ln_bias, const element* weight, const element* bias,
                         const Control* control, int maxT, int T, int N, int stages) {
    const Group rows(N);
    const int position = control->position;
    normalized_matmul<4>({residual, inp, branches, branch_bias}, normed, ln_weight, ln_bias, weight, bias, 3 * C, rows,
                         N, stages, [&](int row, int i, float x) {
        if (i >= rows.N) return;
        const int n = rows.begin + i, b = T == 1 ? n : n / T, c = row % C;  // a division by T takes long
        const int64 cached = (int64(b * NH + c / HS) * maxT + position + n - b * T) * HS + c % HS;
        from_float(row < C ? query[int64(n) * C + c] : row < 2 * C ? keys[cached] : values[cached], x);
    });
}

MATMUL NAMED(decode_fc)(element* fch_gelu, float* residual, const float* inp, const float* branches,
                        const element* branch_bias, const element* normed, const element* ln_weight,
                        const element* ln_bias, const element* weight, const element* bias, int N, int stages) {
    const Group rows(N);
    normalized_matmul<1>({residual, inp, branches, branch_bias}, normed, ln_weight, ln_bias, weight, bias, 4 * C, rows,
                         N, stages, [&](int row, int i, float x) {
        if (i < rows.N) from_float(fch_gelu[int64(rows.begin + i) * 4 * C + row], gelu(x));
    });
}

// branches (gridDim.z,N,C) = inp (N,gridDim.z*C) @ weight^T, the sum over each C of the inner dimension apart.
MATMUL NAMED(decode_project)(float* branches, const element* inp, const element* weight, int N, int stages) {
    const Group rows(N);
    const int inner = gridDim.z * C, part = blockIdx.z;
    const auto begin = [&] {
        wait_for_inputs();
        return inp + int64(rows.begin) * inner + part * C;
    };
    matmul_rows(weight + part * C, inner, nullptr, C, rows.N, stages, inner, begin, [&](int row, int i, float x) {
        if (i < rows.N) branches[(int64(part) * N + rows.begin + i) * C + row] = x;
    });
}

MATMUL NAMED(decode_logits)(float* logits, Tile* tiles, float* residual, const float* inp, const float* branches,
                            const element* branch_bias, const element* normed, const element* ln_weight,
                            const element* ln_bias, const element* wte, const Control* control, int N, int stages) {
    const Group rows(N);
    const float temperature = control->temperature;
    normalized_matmul<4>({residual, inp, branches, branch_bias}, normed, ln_weight, ln_bias, wte, nullptr, Vp, rows, N,
                         stages, [&](int row, int i, float x) {
        const bool exists = row < V;
        float largest = exists ? x : -INFINITE;
#pragma unroll
        for (int distance = ROWS / 2; distance > 0; distance /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        }
        const auto sum_over_tile = [](float y) {
#pragma unroll
            for (int distance = ROWS / 2; distance > 0; distance /= 2) y += __shfl_xor_sync(0xffffffff, y, distance);
            return y;
        };
        const float plain_sum = sum_over_tile(exists ? expf(x - largest) : 0.0f);
        float sum = plain_sum;
        if (temperature != 1.0f) {
            sum = sum_over_tile(exists && temperature > 0.0f ? expf((x - largest) / temperature) : 0.0f);
        }
        if (i >= rows.N) return;
        const int64 n = rows.begin + i;
        logits[n * Vp + row] = x;
        if (row % ROWS == 0) tiles[(n * Vp + row) / ROWS] = {largest, sum, plain_sum};
    });
}
