// The matmuls of matmul.cuh for every GPU: float32, TF32 and, from sm_80 on, bfloat16. (Hopper in bfloat16 has
// hopper/matmul.cu.)
//
// A block computes a tile of 128 x 128 of `out`, each of its 8 warps 64 x 32 of it on the tensor cores. Operands are
// copied to shared memory in steps of 64 bytes of the inner dimension, while earlier steps are multiplied. Rows in
// shared memory are padded, so that warps read fragments without bank conflicts.
//
// If dweight's inner dimension is split (split-K), each block waits for the sums of the previous split, from a block
// with a lower number, and adds them to its own. matmul.cuh says what that requires of the order in which blocks start.
//
// Bound by the tensor cores and by shared memory: each warp reads 96 rows of operands for 64 x 32 of out. With TF32
// off, and before sm_80, the same threads compute the same sums by ordinary multiply-adds, 64 for every 16 numbers
// read. Three TF32 products for one, as in attention (mma.cuh), would be faster, but tensor cores truncate: the error
// would be 1.5 times that of PyTorch's float32.

#include "matmul.cuh"
#include "mma.cuh"

constexpr int BM = MATMUL_BM, BN = MATMUL_BN, BK = MATMUL_BK, STAGES = MATMUL_STAGES, THREADS = MATMUL_THREADS;
// per warp: elements, and mma tiles
constexpr int WARP_M = 64, WARP_N = 32, ROWS = WARP_M / 16, COLUMNS = WARP_N / 8;
constexpr int LINES = 128;  // of an operand: rows of out for A, columns for B
// row stride in shared memory, in elements
constexpr int ALONG_ROW = BK + PACK, ACROSS_ROW = LINES + 8;
constexpr int OPERAND = LINES * ALONG_ROW;

static_assert(BM == LINES && BN == LINES && OPERAND >= BK * ACROSS_ROW,
              "both operands take the same room, whichever way they lie");
static_assert(BM / WARP_M * (BN / WARP_N) * 32 == THREADS && MATMUL_GELU_THREADS == THREADS,
              "each warp has its part of a tile");
static_assert(MATMUL_SHARED == STAGES * 2 * OPERAND * sizeof(element), "shared memory: STAGES steps of both operands");

typedef FragmentD Sums[ROWS][COLUMNS];

__device__ inline float& at(Sums& sums, int i) { return sums[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4]; }
__device__ inline void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS * 4; i++) at(sums, i) = 0.0f;
}

// Start copying step `step` of an operand, lines first .. first + 127; zeros beyond its `lines` and beyond K.
template <int IS_ACROSS>
__device__ inline void copy_operand(element* to, const element* from, int first, int lines, int step, int K) {
#pragma unroll
    for (int i = threadIdx.x; i < LINES * BK / PACK; i += THREADS) {
        constexpr int packs = (IS_ACROSS ? LINES : BK) / PACK;  // of a row
        const int row = i / packs, column = i % packs * PACK;
        const int line = first + (IS_ACROSS ? column : row), k = step * BK + (IS_ACROSS ? row : column);
        const int64 offset = IS_ACROSS ? int64(k) * lines + line : int64(line) * K + k;
        const bool exists = line < lines && k < K;
        copy_async(to + row * (IS_ACROSS ? ACROSS_ROW : ALONG_ROW) + column, from + (exists ? offset : 0), exists);
    }
}

#define ON_TENSOR_CORES (BFLOAT16 || TF32 && __CUDA_ARCH__ >= 800)

// The most steps that matmul_backward_inp accumulates in one chain on the tensor cores; the chains are added up in
// dinp. llmc/gpu/matmul.py says why (LONGEST_CHAIN). 0: no limit.
constexpr int CHAIN = MATMUL_CHAIN;

template <int IS_ACROSS>
__device__ inline element read(const element* tile, int line, int k) {
    return tile[IS_ACROSS ? k * ACROSS_ROW + line : line * ALONG_ROW + k];
}

#if BFLOAT16

// Lines line .. line + 15 and k .. k + 15 of A.
template <int IS_ACROSS>
__device__ inline void read_a(FragmentA& a, const element* tile, int line, int k) {
    const int lane = threadIdx.x % 32;
    load_tiles<IS_ACROSS>(a, IS_ACROSS ? tile + (k + lane / 16 * 8 + lane % 8) * ACROSS_ROW + line + lane / 8 % 2 * 8
                                       : tile + (line + lane % 16) * ALONG_ROW + k + lane / 16 * 8);
}
// The same for B, as two fragments of 8 lines.
template <int IS_ACROSS>
__device__ inline void read_b(FragmentB& left, FragmentB& right, const element* tile, int line, int k) {
    const int lane = threadIdx.x % 32;
    uint32 x[4];
    load_tiles<IS_ACROSS>(x, IS_ACROSS ? tile + (k + lane % 16) * ACROSS_ROW + line + lane / 16 * 8
                                       : tile + (line + lane / 16 * 8 + lane % 8) * ALONG_ROW + k + lane / 8 % 2 * 8);
    left[0] = x[0], left[1] = x[1], right[0] = x[2], right[1] = x[3];
}

#elif ON_TENSOR_CORES

template <int IS_ACROSS>
__device__ inline void read_a(FragmentA& a, const element* tile, int line, int k) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = read<IS_ACROSS>(tile, line + g + i % 2 * 8, k + t + i / 2 * 4);
}
template <int IS_ACROSS>
__device__ inline void read_b(FragmentB& left, FragmentB& right, const element* tile, int line, int k) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        left[i] = read<IS_ACROSS>(tile, line + g, k + t + i * 4);
        right[i] = read<IS_ACROSS>(tile, line + 8 + g, k + t + i * 4);
    }
}

#endif

// sums += one step's products, for this warp's rows from `row` on and columns from `column` on.
template <int A_ACROSS, int B_ACROSS>
__device__ __forceinline__ void multiply_step(Sums& sums, const element* a, const element* b, int row, int column) {
#if ON_TENSOR_CORES
#pragma unroll
    for (int k = 0; k < BK; k += DEPTH) {
        FragmentA x[ROWS];
        FragmentB y[COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) read_a<A_ACROSS>(x[i], a, row + 16 * i, k);
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 2) read_b<B_ACROSS>(y[j], y[j + 1], b, column + 8 * j, k);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) mma(sums[i][j], x[i], y[j]);
        }
    }
#else
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 4
    for (int k = 0; k < BK; k++) {
        float x[2 * ROWS], y[2 * COLUMNS];
#pragma unroll
        for (int i = 0; i < 2 * ROWS; i++) x[i] = read<A_ACROSS>(a, row + 8 * i + g, k);
#pragma unroll
        for (int j = 0; j < 2 * COLUMNS; j++) y[j] = read<B_ACROSS>(b, column + j / 2 * 8 + 2 * t + j % 2, k);
#pragma unroll
        for (int i = 0; i < 2 * ROWS; i++) {
#pragma unroll
            for (int j = 0; j < 2 * COLUMNS; j++) sums[i / 2][j / 2][i % 2 * 2 + j % 2] += x[i] * y[j];
        }
    }
#endif
}

// sums = the item's matmul.
template <int A_ACROSS, int B_ACROSS>
__device__ __forceinline__ void multiply(Sums& sums, const Item& item, const element* a, const element* b,
                                         const Sizes& z) {
    extern __shared__ float4 shared[];
    element* const stages = reinterpret_cast<element*>(shared);
    const auto begin_copy = [&](int step) {
        element* stage = stages + step % STAGES * 2 * OPERAND;
        if (step < item.end) {
            copy_operand<A_ACROSS>(stage, a, item.row, z.M, step, z.K);
            copy_operand<B_ACROSS>(stage + OPERAND, b, item.column, z.N, step, z.K);
        }
        copies_commit();
    };
    const int warp = threadIdx.x / 32, row = warp / 4 * WARP_M, column = warp % 4 * WARP_N;
    Sums short_sums;
    clear(sums);
    clear(short_sums);
    for (int step = item.begin; step < item.begin + STAGES - 1; step++) begin_copy(step);
    for (int step = item.begin; step < item.end; step++) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // the step has arrived, and all are done with the previous one, which begin_copy overwrites
        begin_copy(step + STAGES - 1);
        const element* stage = stages + step % STAGES * 2 * OPERAND;
        multiply_step<A_ACROSS, B_ACROSS>(ON_TENSOR_CORES ? sums : short_sums, stage, stage + OPERAND, row, column);
        // One long float32 sum would have several times cuBLASLt's error, so sums of 64 products are added up.
        if (!ON_TENSOR_CORES && (step % 4 == 3 || step == item.end - 1)) {
#pragma unroll
            for (int i = 0; i < ROWS * COLUMNS * 4; i++) at(sums, i) += at(short_sums, i);
            clear(short_sums);
        }
    }
    __syncthreads();
}

// Call f(row, column, x), x pointing at the thread's sums for that row, for that column and the next one.
template <class F>
__device__ __forceinline__ void for_each_pair(Sums& sums, const Item& item, const Sizes& z, F f) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
#pragma unroll
        for (int i = 0; i < ROWS * 2; i++) {
            const int row = item.row + warp / 4 * WARP_M + 8 * i + g;
            const int column = item.column + warp % 4 * WARP_N + 8 * j + 2 * t;
            if (row < z.M && column < z.N) f(row, column, sums[i / 2][j] + i % 2 * 2);
        }
    }
}

__device__ inline float2 get_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
#if BFLOAT16
__device__ inline float2 get_pair(const __nv_bfloat16* from) {
    return as_floats(*reinterpret_cast<const uint32*>(from));
}
#endif

// For all kernels below: block (THREADS); grid (tiles); shared memory: STAGES * 2 * OPERAND elements.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_forward(element* out, const element* inp, const element* weight, const element* bias, int M, int N, int K,
               int band) {
    const Sizes z = {M, N, K, band, 1};
    Sums sums;
    Item item;
    pick<BM, BN, BK>(item, blockIdx.x, z);
    multiply<0, 0>(sums, item, inp, weight, z);
    for_each_pair(sums, item, z, [&](int row, int column, const float* x) {
        const float2 b = bias ? get_pair(bias + column) : float2{0.0f, 0.0f};
        put_pair(out + int64(row) * N + column, x[0] + b.x, x[1] + b.y);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul_forward_gelu(element* out, element* gelu_out, const element* inp, const element* weight, const element* bias,
                    int M, int N, int K, int band) {
    const Sizes z = {M, N, K, band, 1};
    Sums sums;
    Item item;
    pick<BM, BN, BK>(item, blockIdx.x, z);
    multiply<0, 0>(sums, item, inp, weight, z);
    for_each_pair(sums, item, z, [&](int row, int column, const float* x) {
        const float2 b = bias ? get_pair(bias + column) : float2{0.0f, 0.0f};
        const int64 offset = int64(row) * N + column;
        element rounded[2];  // as the backward pass will read them
        from_float(rounded[0], x[0] + b.x);
        from_float(rounded[1], x[1] + b.y);
        const float2 y = {to_float(rounded[0]), to_float(rounded[1])};
        put_pair(out + offset, y.x, y.y);
        put_pair(gelu_out + offset, gelu(y.x), gelu(y.y));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul_backward_inp(element* dinp, const element* dout, const element* weight, float scale, int M, int N, int K,
                    int band) {
    const Sizes z = {M, N, K, band, 1};
    Sums sums;
    Item item;
    pick<BM, BN, BK>(item, blockIdx.x, z);
    const int steps = item.end;
    do {
        if (CHAIN) item.end = min(item.begin + CHAIN, steps);
        multiply<0, 1>(sums, item, dout, weight, z);
        for_each_pair(sums, item, z, [&](int row, int column, const float* x) {
            put_pair(dinp + int64(row) * N + column, x[0] * scale, x[1] * scale, item.begin > 0);
        });
        item.begin = item.end;
    } while (CHAIN && item.begin < steps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul_backward_inp_gelu(element* dinp, float* partials, const element* dout, const element* weight, const element* inp,
                         int M, int N, int K, int band) {
    __shared__ float columns[BM / WARP_M][BN];
    const Sizes z = {M, N, K, band, 1};
    Sums sums;
    Item item;
    pick<BM, BN, BK>(item, blockIdx.x, z);
    multiply<0, 1>(sums, item, dout, weight, z);
    float total[COLUMNS * 2] = {};
    for_each_pair(sums, item, z, [&](int row, int column, float* x) {
        const int64 offset = int64(row) * N + column;
        const float2 y = get_pair(inp + offset);
        x[0] *= gelu_derivative(y.x, gate(y.x));
        x[1] *= gelu_derivative(y.y, gate(y.y));
        put_pair(dinp + offset, x[0], x[1]);
    });
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < COLUMNS * 2; j++) {
#pragma unroll
        // rows >= M are 0
        for (int i = 0; i < ROWS * 2; i++) total[j] += sums[i / 2][j / 2][i % 2 * 2 + j % 2];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            total[j] += __shfl_xor_sync(0xffffffff, total[j], distance);
        }
        if (threadIdx.x % 32 < 4) columns[warp / 4][warp % 4 * WARP_N + j / 2 * 8 + 2 * t + j % 2] = total[j];
    }
    __syncthreads();
    const int column = item.column + threadIdx.x;
    if (threadIdx.x < BN && column < N) {
        partials[int64(item.row / BM) * N + column] = columns[0][threadIdx.x] + columns[1][threadIdx.x];
    }
}

// partials, done: see matmul.cuh. Grid (tiles * splits).
extern "C" __global__ void __launch_bounds__(THREADS)
matmul_backward_weight(gradient* dweight, float4* partials, int* done, const element* dout, const element* inp,
                       float scale, int M, int N, int K, int band, int splits) {
    const Sizes z = {M, N, K, band, splits};
    Sums sums;
    Item item;
    pick<BM, BN, BK>(item, blockIdx.x, z);
    multiply<1, 1>(sums, item, dout, inp, z);
    const auto quad = [&](int j) -> float* { return sums[j / COLUMNS][j % COLUMNS]; };
    float4* const of_tile = partials + int64(item.tile) * (BM * BN / 4);
    const auto sync = [] { __syncthreads(); };
    if (!add_splits<THREADS, ROWS * COLUMNS>(of_tile, done + item.tile, item, splits, quad, sync)) return;
    for_each_pair(sums, item, z, [&](int row, int column, const float* x) {
        put_pair(dweight + int64(row) * N + column, x[0] * scale, x[1] * scale);
    });
}
