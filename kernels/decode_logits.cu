// The classifier of text generation (see decode.cu): logits (N,Vp) = x @ wte^T, and what decode_sample needs of each
// tile of ROWS of them. decode_logits is as the matmuls of decode_matmul.cu; of more than X_ROWS rows of x, where
// shared memory has room for them, decode_logits_many reads each weight once for up to 64.

#include "decode_matmul.cuh"

// exp((x - largest) / temperature); x is -INFINITE for what is no token.
__device__ inline float exponential(float x, float largest, float temperature) {
    const float difference = x - (largest == -INFINITE ? 0.0f : largest);
    return expf(temperature == 1.0f ? difference : difference / temperature);
}

MATMUL decode_logits(float* logits, Tile* tiles, float* residual, const float* inp, const float* branches,
                     const element* branch_bias, const element* normed, const element* ln_weight,
                     const element* ln_bias, const element* wte, const Control* control, int N, int stages) {
    const Group rows(N);
    const float temperature = control->temperature;
    normalized_matmul<4>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias, wte, nullptr, Vp, rows, N,
                         stages, [&](int row, int i, float x) {
        const float counted = row < V ? x : -INFINITE;
        float largest = counted;
#pragma unroll
        for (int distance = 1; distance < ROWS; distance *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        }
        const auto sum_over_tile = [&](float temperature) {
            float y = exponential(counted, largest, temperature);
#pragma unroll
            for (int distance = 1; distance < ROWS; distance *= 2) y += __shfl_xor_sync(0xffffffff, y, distance);
            return y;
        };
        const float plain_sum = sum_over_tile(1.0f);
        float sum = plain_sum;  // for a temperature of 0, nobody reads it
        if (temperature != 1.0f && temperature != 0.0f) sum = sum_over_tile(temperature);
        if (i >= rows.N) return;
        const int64 n = rows.begin + i;
        logits[n * Vp + row] = x;
        if (row % ROWS == 0) tiles[(n * Vp + row) / ROWS] = {largest, sum, plain_sum};
    });
}

#if DECODE_LOGITS_STAGES

constexpr int COLUMNS = DECODE_LOGITS_COLUMNS;  // rows of wte, at a time
constexpr int STAGES = DECODE_LOGITS_STAGES;    // of a ring: each has what a warp of matmul_rows has of COLUMNS rows
constexpr int STAGE = STEPS * COLUMNS * 4;      // 16 bytes each
constexpr int X_TILES = DECODE_LOGITS_TILES;    // of 16 rows of x, in a block
constexpr int X_EACH = X_TILES / 2;             // in a warp
constexpr int W_EACH = COLUMNS / 32;            // of 8 rows of wte, in a warp

static_assert(WARPS == 8 && COLUMNS % 64 == 0, "two warps along x, four along wte; each requests 8 rows at a time");
static_assert(ROWS == 16 && Vp % COLUMNS == 0, "a warp has the logits of whole tiles");
static_assert(16 * (STAGES * STAGE + X_TILES * DECODE_ROW_BYTES) <= DECODE_LOGITS_SHARED, "the launch makes room");

// Tiles of 16 rows of x by 8 of wte.
typedef FragmentD ManySums[X_EACH][W_EACH];

template <class F>
__device__ inline void for_all_sums(const F& f) {
#pragma unroll
    for (int n = 0; n < X_EACH; n++) {
#pragma unroll
        for (int k = 0; k < W_EACH; k++) {
#pragma unroll
            for (int e = 0; e < 4; e++) f(n, k, e);
        }
    }
}

// w: the warp of matmul_rows whose chunks these are.
__device__ inline void request_stage(uint4* to, const element* rows, int w) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const element* const from = rows + (8 * warp + lane / 4) * C;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if (!exists(step, w)) continue;
#pragma unroll
        for (int group = 0; group < COLUMNS / 8; group += WARPS) {
            copy_async(to + (step * COLUMNS / 8 + group + warp) * 32 + lane,
                       reinterpret_cast<const uint4*>(from + group * 8 * C + begin_of(step, w)), true);
        }
    }
}

// sums = that warp's.
__device__ inline void multiply_stage(ManySums& sums, const element* x, const uint4* weights, int w) {
    const int lane = threadIdx.x % 32;
    Sums d[X_EACH][W_EACH] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const bool there = exists(step, w);
        uint4 weight[W_EACH];
#pragma unroll
        for (int k = 0; k < W_EACH; k++) {
            weight[k] = there ? weights[(step * COLUMNS / 8 + k) * 32 + lane] : uint4{};
        }
#pragma unroll
        for (int n = 0; n < X_EACH; n++) {
            const element* const row = x + (16 * n + lane / 4) * STRIDE + begin_of(step, w);
            Inputs inputs = {};
            if (there) inputs = {load_bits(row), load_bits(row + 8 * STRIDE)};
#pragma unroll
            for (int k = 0; k < W_EACH; k++) multiply(d[n][k], inputs, weight[k]);
        }
    }
    for_all_sums([&](int n, int k, int e) { sums[n][k][e] = d[n][k][0][e] + d[n][k][1][e]; });
}

// What decode_logits does with its sums, of a tile, for four lanes with a row of x: n. row: of wte, a lane's first one.
__device__ inline void finish_tile(float* logits, Tile* tiles, const float (&x)[2][2], int64 n, int row, bool write,
                                   float temperature) {
    float counted[2][2], largest = -INFINITE;
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            counted[k][e] = row + 8 * k + e < V ? x[k][e] : -INFINITE;
            largest = fmaxf(largest, counted[k][e]);
        }
    }
    largest = quad_max(largest);
    const auto sum_over_tile = [&](float temperature) {  // in decode_logits's order
        float sums[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            sums[k] = quad_sum(exponential(counted[k][0], largest, temperature) +
                               exponential(counted[k][1], largest, temperature));
        }
        return sums[0] + sums[1];
    };
    const float plain_sum = sum_over_tile(1.0f);
    float sum = plain_sum;
    if (temperature != 1.0f && temperature != 0.0f) sum = sum_over_tile(temperature);
    if (write && threadIdx.x % 4 == 0) tiles[(n * Vp + row) / ROWS] = {largest, sum, plain_sum};
#pragma unroll
    for (int k = 0; write && k < 2; k++) {
        *reinterpret_cast<float2*>(logits + n * Vp + row + 8 * k) = {x[k][0], x[k][1]};
    }
}

// Block (THREADS); grid (up to Vp / COLUMNS, N / (16 * X_TILES) rounded up). Shared memory: the ring, rows of x.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
decode_logits_many(float* logits, Tile* tiles, const element* normed, const element* wte, const Control* control,
                   int N) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = blockIdx.y * 16 * X_TILES, rows = min(16 * X_TILES, N - begin);
    const int count = (Vp / COLUMNS - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);  // times COLUMNS
    const auto row_of = [&](int i) { return int(blockIdx.x + i * gridDim.x) * COLUMNS; };
    const auto weights = [](int stage) { return shared + stage % STAGES * STAGE; };
    const auto request = [&](int stage) {
        if (stage < count * WARPS) {
            request_stage(weights(stage), wte + int64(row_of(stage / WARPS)) * C, stage % WARPS);
        }
        copies_commit();
    };
    let_next_begin();
    for (int stage = 0; stage < STAGES - 1; stage++) request(stage);
    const float temperature = control->temperature;
    element* const x = reinterpret_cast<element*>(shared + STAGES * STAGE);
    wait_for_inputs();
#pragma unroll 8
    for (int i = threadIdx.x; i < 16 * X_TILES * C / PACK; i += THREADS) {
        const int n = i / (C / PACK), c = i % (C / PACK) * PACK;
        *reinterpret_cast<uint4*>(x + n * STRIDE + c) =
            n < rows ? load_bits(normed + int64(begin + n) * C + c) : uint4{};
    }
    const int first = warp / 4 * 16 * X_EACH, column = warp % 4 * 8 * W_EACH;  // this warp's, of x and of wte
    for (int i = 0, stage = 0; i < count; i++) {
        ManySums sums = {};
#pragma unroll 1
        for (int w = 0; w < WARPS; w += 2) {  // in the order of matmul_rows
            ManySums pair[2];
#pragma unroll
            for (int half = 0; half < 2; half++, stage++) {
                copies_wait<STAGES - 2>();
                __syncthreads();  // this stage is there, and all have read the one before it
                request(stage + STAGES - 1);
                multiply_stage(pair[half], x + first * STRIDE, weights(stage) + column * 4, w + half);
            }
            for_all_sums([&](int n, int k, int e) { sums[n][k][e] += pair[0][n][k][e] + pair[1][n][k][e]; });
        }
#pragma unroll
        for (int n = 0; n < 2 * X_EACH; n++) {
            const int h = n % 2 * 2, at = first + 8 * n + lane / 4;
#pragma unroll
            for (int k = 0; k < W_EACH; k += 2) {
                const FragmentD &left = sums[n / 2][k], &right = sums[n / 2][k + 1];
                finish_tile(logits, tiles, {{left[h], left[h + 1]}, {right[h], right[h + 1]}}, begin + at,
                            row_of(i) + column + 8 * k + lane % 4 * 2, at < rows, temperature);
            }
        }
    }
}

#endif
