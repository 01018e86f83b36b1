// Matmuls, from one thread per element to the tensor cores of every GPU; matmul_hopper.cu continues
// with Hopper's. RESULTS.md has what each rung measured.
//
//     matmul_forward           out = inp @ weight^T + bias        out =
//     matmul_backward_inp      dinp = dout @ weight               dinp =
//     matmul_backward_weight   dweight = dout^T @ inp             dweight =
//
// inp (rows,C), weight (OC,C), out, dout (rows,OC), bias (OC). The result is (M,N), K is the inner
// dimension; N and K are multiples of PACK, but for the K of dweight, the rows. The rungs between
// the first and the tensor cores are for the forward pass: the ideas are the same in all three.
//
// Bound by operations: each of the M * N * K multiply-adds needs two numbers, so everything depends
// on how far away these are, and on how many multiply-adds each of them serves once it is close.

#include "mma.cuh"

// -------------------------------------------------------------------------------------------------
// thread_an_element. The formula. Neighboring threads take neighboring rows, the obvious choice. So
// in the forward pass, the 32 numbers of inp that a warp reads at once are in 32 rows, each fetched
// for one number, and the warp's results are written to 32 rows, too. Each multiply-add reads both
// its numbers from the cache. Block (tile, tile), grid (M / tile, N / tile).

__device__ inline int own_row() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline int own_column() { return blockIdx.y * blockDim.y + threadIdx.y; }

extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_thread_an_element(element* out, const element* inp, const element* weight,
                                 const element* bias, int M,
                                 int N, int K) {
    const int64 row = own_row(), column = own_column();
    if (row >= M || column >= N) return;
    float sum = to_float(bias[column]);
    for (int k = 0; k < K; k++)
        sum += to_float(inp[row * K + k]) * to_float(weight[column * K + k]);
    from_float(out[row * N + column], sum);
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_backward_inp_thread_an_element(element* dinp, const element* dout, const element* weight,
                                      int M, int N, int K) {
    const int64 row = own_row(), column = own_column();
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; k++)
        sum += to_float(dout[row * K + k]) * to_float(weight[int64(k) * N + column]);
    from_float(dinp[row * N + column], sum);
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_backward_weight_thread_an_element(gradient* dweight, const element* dout, const element* inp,
                                         int M, int N,
                                         int K) {
    const int64 row = own_row(), column = own_column();
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; k++)
        sum += to_float(dout[int64(k) * M + row]) * to_float(inp[int64(k) * N + column]);
    from_float(dweight[row * N + column], sum);
}

// -------------------------------------------------------------------------------------------------
// coalesced. In the forward pass both operands are contiguous along the inner dimension, so a warp
// computes one element: its lanes read neighboring numbers, 16 bytes each, and reduce at the end.
// Whole cache lines are fetched, and used at once. But each number still serves only one
// multiply-add. Block (any size), grid (M * N / warps of a block).

extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_coalesced(element* out, const element* inp, const element* weight,
                         const element* bias, int M, int N,
                         int K) {
    const int64 warp = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int row = warp / N, column = warp % N;
    if (row >= M) return;
    float sum = 0.0f;
    for (int k = threadIdx.x % 32 * PACK; k < K; k += 32 * PACK) {
        const Floats x = load(inp + int64(row) * K + k), y = load(weight + int64(column) * K + k);
#pragma unroll
        for (int i = 0; i < PACK; i++) sum += x.x[i] * y.x[i];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) from_float(out[warp], sum + to_float(bias[column]));
}

// -------------------------------------------------------------------------------------------------
// shared_tiles. A block computes a tile of out, one element per thread, from tiles of inp and
// weight that all its threads share: a number that is read from memory serves `tile` multiply-adds.
// The new limit: both numbers of each multiply-add come from shared memory, which delivers one of
// them to one warp per cycle, so that a multiprocessor does 16 multiply-adds per cycle instead of
// 128. So it is no faster than coalesced in bfloat16; in float32, where coalesced has twice as many
// bytes to read, it is faster by a third. Block (tile, tile), grid (N / tile, M / tile). Shared
// memory: 2 * tile * (tile + 1) floats.

// Load rows first .. and columns k0 .. of an operand (rows,K), one number per thread; zeros beyond
// its end. A row of the tile has tile + 1 floats, against bank conflicts.
__device__ inline void load_tile(float* tile, const element* from, int rows, int K, int first,
                                 int k0) {
    const int row = first + threadIdx.y, k = k0 + threadIdx.x;
    float& to = tile[threadIdx.y * (blockDim.x + 1) + threadIdx.x];
    to = row < rows && k < K ? to_float(from[int64(row) * K + k]) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_shared_tiles(element* out, const element* inp, const element* weight,
                            const element* bias, int M, int N,
                            int K) {
    extern __shared__ float4 shared[];
    const int tile = blockDim.x, row = blockIdx.y * tile, column = blockIdx.x * tile;
    float* const a_tile = reinterpret_cast<float*>(shared);
    float* const b_tile = a_tile + tile * (tile + 1);
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += tile) {
        load_tile(a_tile, inp, M, K, row, k0);
        load_tile(b_tile, weight, N, K, column, k0);
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < tile; k++) {
            sum += a_tile[threadIdx.y * (tile + 1) + k] * b_tile[threadIdx.x * (tile + 1) + k];
        }
        __syncthreads();
    }
    const int r = row + threadIdx.y, c = column + threadIdx.x;
    if (r < M && c < N) from_float(out[int64(r) * N + c], sum + to_float(bias[c]));
}

// -------------------------------------------------------------------------------------------------
// register_tiles. A thread computes 8 x 8 elements: for 64 multiply-adds it reads 16 numbers from
// shared memory, in four 16-byte accesses, and the sums stay in registers. A block computes 128 x
// 128, so that a number from memory, read 16 bytes at a time, serves 128 multiply-adds. The limit
// is now the CUDA cores: 128 multiply-adds per cycle and multiprocessor.
// Block (256), grid (N / 128, M / 128).

constexpr int SIDE = 128, STEP = 16;  // of a tile: rows, and columns
typedef float Columns[STEP][SIDE + 4];  // in shared memory: the rows of one column are adjacent

// Load a tile of an operand (rows,K); zeros beyond its end.
__device__ inline void load_columns(Columns& tile, const element* from, int rows, int K, int first,
                                    int k0) {
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * STEP / PACK; i += 256) {
        const int row = i % SIDE, k = i / SIDE * PACK;
        const bool exists = first + row < rows && k0 + k < K;
        const Floats values = exists ? load(from + int64(first + row) * K + k0 + k) : Floats{};
#pragma unroll
        for (int j = 0; j < PACK; j++) tile[k + j][row] = values.x[j];
    }
}

// Rows 4 * thread .. + 3, and the rows 64 further on: neighboring threads read neighboring
// addresses.
__device__ inline void read_rows(float (&x)[8], const float (&column)[SIDE + 4], int thread) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        *reinterpret_cast<float4*>(x + 4 * half) =
            *reinterpret_cast<const float4*>(column + 64 * half + 4 * thread);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
matmul_forward_register_tiles(element* out, const element* inp, const element* weight,
                              const element* bias, int M,
                              int N, int K) {
    __shared__ __align__(16) Columns a_tile, b_tile;
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE, right = threadIdx.x % 16,
        down = threadIdx.x / 16;
    float sums[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += STEP) {
        load_columns(a_tile, inp, M, K, row, k0);
        load_columns(b_tile, weight, N, K, column, k0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            float x[8], y[8];
            read_rows(x, a_tile[k], down);
            read_rows(y, b_tile[k], right);
#pragma unroll
            for (int i = 0; i < 64; i++) sums[i / 8][i % 8] += x[i / 8] * y[i % 8];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const int r = row + i / 32 * 64 + 4 * down + i / 8 % 4,
            c = column + i % 8 / 4 * 64 + 4 * right + i % 4;
        if (r < M && c < N) {
            put_pair(out + int64(r) * N + c, sums[i / 8][i % 8] + to_float(bias[c]),
                     sums[i / 8][i % 8 + 1] + to_float(bias[c + 1]));
        }
    }
}

// -------------------------------------------------------------------------------------------------
// tensor_cores. One mma.sync of a warp does 2048 multiply-adds in bfloat16, or 1024 in TF32:
// kernels/mma.cuh says which lane holds what, and ldmatrix reads four registers of a bfloat16
// fragment at once. A block computes 64 x 64, a warp 32 x 32 of it, in steps of 64 bytes. Rows of a
// tile are padded by 16 bytes: without, the 8 rows that a warp reads at once would be in the same
// banks. Nothing overlaps: copy, barrier, multiply, barrier. Block (128), grid (N / 64, M / 64).

// of a step; of a tile's row in shared memory
constexpr int DEEP = 64 / sizeof(element), PITCH = DEEP + PACK;

// Start copying a step of an operand (rows,K), LINES rows of it; zeros beyond its end.
template <int LINES>
__device__ inline void begin_copy(element* tile, const element* from, int rows, int K, int first,
                                  int k0) {
#pragma unroll
    for (int i = threadIdx.x; i < LINES * DEEP / PACK; i += 2 * LINES) {
        const int row = i / (DEEP / PACK), k = i % (DEEP / PACK) * PACK;
        const bool exists = first + row < rows && k0 + k < K;
        copy_async(tile + row * PITCH + k, from + (exists ? int64(first + row) * K + k0 + k : 0),
                   exists);
    }
}

// 16 rows of an operand, from `tile` on, as a fragment of A, or as two of B, which ldmatrix has in
// the order `as_b`.
__device__ inline void read_16_rows(FragmentA& x, const element* tile, bool as_b) {
    const int lane = threadIdx.x % 32;
#if BFLOAT16
    const int row = as_b ? lane / 16 * 8 + lane % 8 : lane % 16,
        right = as_b ? lane / 8 % 2 : lane / 16;
    load_tiles<0>(x, tile + row * PITCH + right * 8);
#else
    for (int i = 0; i < 4; i++) {
        const int lower = as_b ? i / 2 : i % 2, right = as_b ? i % 2 : i / 2;
        x[i] = tile[(lower * 8 + lane / 4) * PITCH + right * 4 + lane % 4];
    }
#endif
}

// A warp's part of a step: sums += a @ b^T, of 16 * TALL rows of a and 32 rows of b.
template <int TALL>
__device__ inline void multiply_step(FragmentD (&sums)[TALL][4], const element* a,
                                     const element* b) {
#pragma unroll
    for (int k = 0; k < DEEP; k += DEPTH) {
        FragmentA x[TALL], y[2];
        for (int i = 0; i < TALL; i++) read_16_rows(x[i], a + 16 * i * PITCH + k, false);
        for (int i = 0; i < 2; i++) read_16_rows(y[i], b + 16 * i * PITCH + k, true);
        for (int i = 0; i < 4 * TALL; i++) {
            mma(sums[i / 4][i % 4], x[i / 4],
                {y[i % 4 / 2][i % 2 * 2], y[i % 4 / 2][i % 2 * 2 + 1]});
        }
    }
}

// out = sums + bias, of a warp's tiles of 16 x 8 from (row, column) on: a lane has rows g and g + 8
// of each.
template <int TALL>
__device__ inline void store_tiles(element* out, const FragmentD (&sums)[TALL][4],
                                   const element* bias, int row,
                                   int column, int M, int N) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8 * TALL; i++) {
        const float* const d = sums[i / 8][i / 2 % 4] + i % 2 * 2;
        const int r = row + i / 8 * 16 + i % 2 * 8 + g, c = column + i / 2 % 4 * 8 + 2 * t;
        if (r < M && c < N)
            put_pair(out + int64(r) * N + c, d[0] + to_float(bias[c]),
                     d[1] + to_float(bias[c + 1]));
    }
}

extern "C" __global__ void __launch_bounds__(128)
matmul_forward_tensor_cores(element* out, const element* inp, const element* weight,
                            const element* bias, int M, int N,
                            int K) {
    __shared__ __align__(16) element a_tile[64 * PITCH], b_tile[64 * PITCH];
    const int row = blockIdx.y * 64, column = blockIdx.x * 64, warp = threadIdx.x / 32;
    const int down = warp / 2 * 32, right = warp % 2 * 32;  // the warp's part of the block's tile
    FragmentD sums[2][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEEP) {
        begin_copy<64>(a_tile, inp, M, K, row, k0);
        begin_copy<64>(b_tile, weight, N, K, column, k0);
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        multiply_step(sums, a_tile + down * PITCH, b_tile + right * PITCH);
        __syncthreads();
    }
    store_tiles(out, sums, bias, row + down, column + right, M, N);
}

// -------------------------------------------------------------------------------------------------
// mma_sync. A block computes 128 x 128, a warp 64 x 32 of it, and the next two steps are being
// copied to shared memory (cp.async) while this one is multiplied. The instructions are those of
// every GPU from sm_80 on, and the ideas those of its libraries.
// Block (256), grid (N / 128, M / 128). Shared memory: STAGES * 2 * LINES * PITCH elements.

constexpr int LINES = 128, STAGES = 3;

extern "C" __global__ void __launch_bounds__(256)
matmul_forward_mma_sync(element* out, const element* inp, const element* weight,
                        const element* bias, int M, int N,
                        int K) {
    extern __shared__ float4 shared[];
    element* const stages = reinterpret_cast<element*>(shared);
    const int row = blockIdx.y * LINES, column = blockIdx.x * LINES, warp = threadIdx.x / 32;
    const int down = warp / 4 * 64, right = warp % 4 * 32, steps = (K + DEEP - 1) / DEEP;
    const auto tile_of = [&](int step) { return stages + step % STAGES * 2 * LINES * PITCH; };
    const auto begin_step = [&](int step) {
        if (step < steps) {
            begin_copy<LINES>(tile_of(step), inp, M, K, row, step * DEEP);
            begin_copy<LINES>(tile_of(step) + LINES * PITCH, weight, N, K, column, step * DEEP);
        }
        copies_commit();
    };
    FragmentD sums[4][4] = {};
    for (int step = 0; step < STAGES - 1; step++) begin_step(step);
    for (int step = 0; step < steps; step++) {
        copies_wait<STAGES - 2>();
        // the step has arrived, and all are done with the previous one, which begin_step overwrites
        __syncthreads();
        begin_step(step + STAGES - 1);
        multiply_step(sums, tile_of(step) + down * PITCH, tile_of(step) + (LINES + right) * PITCH);
    }
    store_tiles(out, sums, bias, row + down, column + right, M, N);
}
