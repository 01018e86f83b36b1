// The matmuls of a layer for more than X_ROWS rows of x (see decode.cu), with the same bits as those of fewer rows.
// Most of their time goes into reading from the L2 cache, and the larger a block's tile of the result, the fewer blocks
// read the same rows. So a block has up to 64 rows of x and tens of columns (rows of the weight), and both operands
// stream through its shared memory. In the projections, that would leave too few blocks: there, a block has only a
// piece of the inner dimension, what two warps of matmul_rows have. Whoever reads the result adds up the pieces
// (normalize), in the order of matmul_rows.

#include "decode_matmul.cuh"
#include "gelu.cuh"

constexpr int PIECE_WAYS = WARPS / DECODE_PIECES;  // warps of matmul_rows that have a piece

static_assert(PIECE_WAYS == 2, "matmul_rows adds up its warps' sums two by two, and then these pairs");

// Block (THREADS); grid (N / (16 * X_TILES) rounded up, OC / COLUMNS rounded up, all pieces). x (N,PARTS*C), weight
// (OC,PARTS*C); bias: added if a piece is all of C. SHARED: bytes of dynamic shared memory. begin(): called while x is
// on its way; it returns finish(row of the weight, n, the dot products with this row and the next one).
//
// WAYS warps of matmul_rows have this piece. Here, too, WAYS warps have their chunks, one a step; the other warps have
// the same chunks, and other columns. A stage has the operands of a step: for each way, and for eight rows at a time,
// 16 bytes for each lane, both for the copy and for the multiplication.
template <int WAYS, int PARTS, int X_TILES, int COLUMNS, int STAGES, int SHARED, int OC, class Begin>
__device__ inline void matmul_many(const element* x, const element* weight, const element* bias, int N,
                                   const Begin& begin) {
    constexpr int INNER = PARTS * C, PIECES = WARPS / WAYS;  // of each C; as many warps have the same chunks
    constexpr int X_EIGHTS = 2 * X_TILES, EACH = COLUMNS / PIECES / 8;  // eights: of a block's rows, a warp's columns
    constexpr int STAGE = WAYS * (X_EIGHTS + PIECES * EACH) * 32;       // 16 bytes each
    constexpr int X_ROWS_HERE = 8 * X_EIGHTS, PAIRS = X_ROWS_HERE * COLUMNS / 2;  // of sums
    constexpr int SUM_STRIDE = COLUMNS | 8, SUMS = X_ROWS_HERE * SUM_STRIDE;  // floats; writers do not meet in a bank
    constexpr int BIAS = STAGES * STAGE > WAYS * SUMS / 4 ? STAGES * STAGE : WAYS * SUMS / 4;  // behind both
    static_assert(COLUMNS == PIECES * EACH * 8 && OC % 8 == 0, "a warp has whole fragments");
    static_assert(X_EIGHTS % PIECES == 0, "warps with the same chunks request equally many rows of x");
    static_assert(PAIRS % THREADS == 0, "all threads add up equally many sums");
    static_assert(16 * BIAS + COLUMNS * sizeof(element) <= SHARED, "the launch makes room");
    static_assert(STAGES <= STEPS && COLUMNS % PACK == 0, "all stages are used; the bias is copied 16 bytes at a time");

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int way = warp % WAYS, group = PIECES == 1 ? 0 : warp / WAYS, z = PIECES == 1 ? 0 : blockIdx.z;
    const int as_warp = z % PIECES * WAYS + way;  // the warp of matmul_rows whose chunks this one has
    const int first = blockIdx.x * X_ROWS_HERE, column = blockIdx.y * COLUMNS, rows = min(X_ROWS_HERE, N - first);
    const int inner = z / PIECES * C + begin_of(0, as_warp);
    const auto x_at = [&](int step) { return shared + step % STAGES * STAGE + way * X_EIGHTS * 32 + lane; };
    const auto weight_at = [&](int step) {
        return shared + step % STAGES * STAGE + (WAYS * X_EIGHTS + (group * WAYS + way) * EACH) * 32 + lane;
    };
    const auto in_weight = [&](int row) { return OC % COLUMNS == 0 || row < OC; };
    const auto request = [&](uint4* to, const element* from, int step, int row, bool is_there) {
        copy_async(to, reinterpret_cast<const uint4*>(from + int64(row) * INNER + inner + step * WARPS * CHUNK),
                   is_there && exists(step, as_warp));
    };
    const auto request_weights = [&](int step) {  // that this lane will read itself
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int row = column + (group * EACH + k) * 8 + g;
            request(weight_at(step) + k * 32, weight, step, row, in_weight(row));
        }
    };
    const auto request_x = [&](int step) {
#pragma unroll
        for (int i = 0; i < X_EIGHTS / PIECES; i++) {
            const int n = group * (X_EIGHTS / PIECES) + i;
            request(x_at(step) + n * 32, x, step, first + 8 * n + g, 8 * n + g < rows);
        }
    };
    float* const sums = reinterpret_cast<float*>(shared);  // (WAYS,X_ROWS_HERE,SUM_STRIDE), where stages were
    element* const biases = reinterpret_cast<element*>(shared + BIAS);

    let_next_begin();
#pragma unroll
    for (int step = 0; step < STAGES; step++) request_weights(step);
    if (PIECES == 1 && threadIdx.x < COLUMNS / PACK) {
        const int row = threadIdx.x * PACK;
        copy_async(reinterpret_cast<uint4*>(biases + row), reinterpret_cast<const uint4*>(bias + column + row),
                   in_weight(column + row));
    }
    wait_for_inputs();
#pragma unroll 1
    for (int step = 0; step < STAGES; step++) {
        request_x(step);
        copies_commit();
    }
    const auto finish = begin();
    Sums d[X_TILES][EACH] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        copies_wait<STAGES - 1>();
        if (PIECES > 1) __syncthreads();  // otherwise each lane reads only what it has requested itself
        uint4 w[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) w[k] = weight_at(step)[k * 32];
#pragma unroll
        for (int n = 0; n < X_TILES; n++) {
            const Inputs inputs = {x_at(step)[2 * n * 32], x_at(step)[(2 * n + 1) * 32]};
#pragma unroll
            for (int k = 0; k < EACH; k++) multiply(d[n][k], inputs, w[k]);
        }
        if (step + STAGES < STEPS) {
            if (PIECES > 1) __syncthreads();  // all have read this stage
            request_weights(step + STAGES);
            request_x(step + STAGES);
        }
        copies_commit();
    }
    __syncthreads();  // all have read all stages
#pragma unroll
    for (int n = 0; n < X_EIGHTS; n++) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const Sums& both = d[n / 2][k];
            const int h = n % 2 * 2, at = (8 * n + g) * SUM_STRIDE + (group * EACH + k) * 8 + 2 * t;
            *reinterpret_cast<float2*>(sums + way * SUMS + at) = {both[0][h] + both[1][h],
                                                                  both[0][h + 1] + both[1][h + 1]};
        }
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < PAIRS / THREADS; k++) {
        const int i = k * THREADS + threadIdx.x, n = i / (COLUMNS / 2), r = i % (COLUMNS / 2) * 2;
        float2 sum = {0.0f, 0.0f};
        if (PIECES == 1) sum = {to_float(biases[r]), to_float(biases[r + 1])};
#pragma unroll
        for (int w = 0; w < WAYS; w += 2) {
            const float2 a = *reinterpret_cast<const float2*>(sums + w * SUMS + n * SUM_STRIDE + r);
            const float2 b = *reinterpret_cast<const float2*>(sums + (w + 1) * SUMS + n * SUM_STRIDE + r);
            sum = {sum.x + (a.x + b.x), sum.y + (a.y + b.y)};
        }
        if (n < rows && in_weight(column + r)) finish(column + r, first + n, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_qkv_many(element* query, element* keys, element* values, const element* normed, const element* weight,
                const element* bias, const Control* control, int maxT, int T, int N) {
    matmul_many<WARPS, 1, DECODE_QKV_TILES, DECODE_QKV_COLUMNS, DECODE_QKV_STAGES, DECODE_QKV_SHARED, 3 * C>(
        normed, weight, bias, N, [&] {
            const QkvResult result = {query, keys, values, control->position, maxT, T};
            return [=](int row, int n, float2 x) { put_pair(result.at(row, n), x.x, x.y); };
        });
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_fc_many(element* fch_gelu, const element* normed, const element* weight, const element* bias, int N) {
    matmul_many<WARPS, 1, DECODE_FC_TILES, DECODE_FC_COLUMNS, DECODE_FC_STAGES, DECODE_FC_SHARED, 4 * C>(
        normed, weight, bias, N, [&] {
            return [=](int row, int n, float2 x) {
                put_pair(fch_gelu + int64(n) * 4 * C + row, gelu(x.x), gelu(x.y));
            };
        });
}

// branches (PARTS*PIECES,N,C) = the pieces of inp (N,PARTS*C) @ weight^T.
template <int PARTS, int X_TILES, int COLUMNS, int STAGES, int SHARED>
__device__ inline void project_many(float* branches, const element* inp, const element* weight, int N) {
    matmul_many<PIECE_WAYS, PARTS, X_TILES, COLUMNS, STAGES, SHARED, C>(inp, weight, nullptr, N, [&] {
        return [=](int row, int n, float2 x) {
            put_pair(branches + (int64(blockIdx.z) * N + n) * C + row, x.x, x.y);
        };
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_attproj_many(float* branches, const element* inp, const element* weight, int N) {
    project_many<1, DECODE_ATTPROJ_TILES, DECODE_ATTPROJ_COLUMNS, DECODE_ATTPROJ_STAGES, DECODE_ATTPROJ_SHARED>(
        branches, inp, weight, N);
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_fcproj_many(float* branches, const element* inp, const element* weight, int N) {
    project_many<4, DECODE_FCPROJ_TILES, DECODE_FCPROJ_COLUMNS, DECODE_FCPROJ_STAGES, DECODE_FCPROJ_SHARED>(
        branches, inp, weight, N);
}
