// Matmuls, from one thread per element to the tensor cores of every GPU; matmul_hopper.cu continues with Hopper's.
// RESULTS.md has what each rung measured.
//
//     matmul_forward           out = inp @ weight^T + bias        out =
//     matmul_backward_inp      dinp = dout @ weight               dinp =
//     matmul_backward_weight   dweight = dout^T @ inp             dweight =
//
// inp (rows,C), weight (OC,C), out, dout (rows,OC), bias (OC). As in kernels/matmul.cuh, each is out (M,N) = A (M,K) @
// B (K,N), and an operand whose contiguous dimension is not K, the inner dimension, is "across": none in the forward
// pass, B in dinp, both in dweight. A line of an operand is its part for one row of out (A) or one column (B). M is any
// number; N is a multiple of PACK, and so is K or, for an operand that is across, the number of its lines.
//
// Bound by operations: each of the M * N * K multiply-adds needs two numbers, so everything depends on how far away
// these are, and on how many multiply-adds each of them serves once it is close.

#include "matmul.cuh"

template <int IS_ACROSS>
struct Operand {
    const element* at;
    int lines, K;
    __device__ const element* place(int line, int k) const {
        return at + (IS_ACROSS ? int64(k) * lines + line : int64(line) * K + k);
    }
    __device__ bool has(int line, int k) const { return line < lines && k < K; }
};

// out, of elements or gradients; bias may be null.
template <class E>
struct Result {
    E* at;
    const element* bias;
    int M, N;
    __device__ float bias_of(int column) const { return bias ? to_float(bias[column]) : 0.0f; }
    __device__ void put(int row, int column, float x) const {
        if (row < M && column < N) from_float(at[int64(row) * N + column], x + bias_of(column));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// thread_an_element. The formula. Neighbouring threads take neighbouring rows, the obvious choice. So in the
// forward pass, the 32 numbers of A that a warp reads at once are in 32 rows, each fetched for one number, and the
// warp's results are written to 32 rows, too. Each multiply-add reads both its numbers from the cache.
// Block (tile, tile), grid (M / tile, N / tile).

template <class E, int A_ACROSS, int B_ACROSS>
__device__ inline void thread_an_element(Result<E> out, Operand<A_ACROSS> a, Operand<B_ACROSS> b) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= out.M || column >= out.N) return;
    float sum = 0.0f;
    for (int k = 0; k < a.K; k++) sum += to_float(*a.place(row, k)) * to_float(*b.place(column, k));
    out.put(row, column, sum);
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_thread_an_element(element* out, const element* inp, const element* weight, const element* bias, int M,
                                 int N, int K) {
    thread_an_element(Result<element>{out, bias, M, N}, Operand<0>{inp, M, K}, Operand<0>{weight, N, K});
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_backward_inp_thread_an_element(element* dinp, const element* dout, const element* weight, int M, int N, int K) {
    thread_an_element(Result<element>{dinp, nullptr, M, N}, Operand<0>{dout, M, K}, Operand<1>{weight, N, K});
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_backward_weight_thread_an_element(gradient* dweight, const element* dout, const element* inp, int M, int N,
                                         int K) {
    thread_an_element(Result<gradient>{dweight, nullptr, M, N}, Operand<1>{dout, M, K}, Operand<1>{inp, N, K});
}

// ---------------------------------------------------------------------------------------------------------------------
// coalesced. In the forward pass both operands are contiguous along the inner dimension, so a warp computes one
// element: its lanes read neighbouring numbers, 16 bytes each, and reduce at the end. Whole cache lines are fetched,
// and used at once. But each number still serves only one multiply-add.
// Block (any size), grid (M * N / warps of a block).

extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_coalesced(element* out, const element* inp, const element* weight, const element* bias, int M, int N,
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
    if (threadIdx.x % 32 == 0) Result<element>{out, bias, M, N}.put(row, column, sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// shared_tiles. A block computes a tile of out, one element per thread, from tiles of A and B that all its threads
// share: a number that is read from memory serves `tile` multiply-adds. Whichever way an operand lies, reads are
// coalesced, and the tile is transposed while it is written to shared memory. The new limit: both numbers of each
// multiply-add come from shared memory, which delivers one of them to one warp per cycle, so that a multiprocessor does
// 16 multiply-adds per cycle instead of 128. So it is no faster than coalesced in bfloat16; in float32, where coalesced
// has twice as many bytes to read, it is faster by a third.
// Block (tile, tile), grid (N / tile, M / tile). Shared memory: 2 * tile * (tile + 1) floats.

// Load lines first .. and k0 .. of an operand, one number per thread; zeros beyond its end. Rows are padded to tile + 1
// floats against bank conflicts.
template <int IS_ACROSS>
__device__ inline void load_tile(float* tile, Operand<IS_ACROSS> from, int first, int k0) {
    const int line = IS_ACROSS ? threadIdx.x : threadIdx.y, k = IS_ACROSS ? threadIdx.y : threadIdx.x;
    tile[line * (blockDim.x + 1) + k] =
        from.has(first + line, k0 + k) ? to_float(*from.place(first + line, k0 + k)) : 0.0f;
}

template <class E, int A_ACROSS, int B_ACROSS>
__device__ inline void shared_tiles(Result<E> out, Operand<A_ACROSS> a, Operand<B_ACROSS> b) {
    extern __shared__ float4 shared[];
    const int tile = blockDim.x, row = blockIdx.y * tile, column = blockIdx.x * tile;
    float* const a_tile = reinterpret_cast<float*>(shared);
    float* const b_tile = a_tile + tile * (tile + 1);
    float sum = 0.0f;
    for (int k0 = 0; k0 < a.K; k0 += tile) {
        load_tile(a_tile, a, row, k0);
        load_tile(b_tile, b, column, k0);
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < tile; k++) {
            sum += a_tile[threadIdx.y * (tile + 1) + k] * b_tile[threadIdx.x * (tile + 1) + k];
        }
        __syncthreads();
    }
    out.put(row + threadIdx.y, column + threadIdx.x, sum);
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_shared_tiles(element* out, const element* inp, const element* weight, const element* bias, int M, int N,
                            int K) {
    shared_tiles(Result<element>{out, bias, M, N}, Operand<0>{inp, M, K}, Operand<0>{weight, N, K});
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_backward_inp_shared_tiles(element* dinp, const element* dout, const element* weight, int M, int N, int K) {
    shared_tiles(Result<element>{dinp, nullptr, M, N}, Operand<0>{dout, M, K}, Operand<1>{weight, N, K});
}

extern "C" __global__ void __launch_bounds__(1024)
matmul_backward_weight_shared_tiles(gradient* dweight, const element* dout, const element* inp, int M, int N, int K) {
    shared_tiles(Result<gradient>{dweight, nullptr, M, N}, Operand<1>{dout, M, K}, Operand<1>{inp, N, K});
}

// ---------------------------------------------------------------------------------------------------------------------
// register_tiles. A thread computes 8 x 8 elements: for 64 multiply-adds it reads 16 numbers from shared memory, in
// four 16-byte accesses, and the sums stay in registers. A block computes 128 x 128, so that a number from memory, read
// 16 bytes at a time, serves 128 multiply-adds. The limit is now the CUDA cores: 128 multiply-adds per cycle and
// multiprocessor.
// Block (256), grid (N / 128, M / 128).

constexpr int SIDE = 128, DEPTH = 16;  // of a tile: lines, and of the inner dimension
typedef float Lines[DEPTH][SIDE + 4];  // in shared memory: all lines of one k are adjacent

// Load one step of an operand; zeros beyond its end.
template <int IS_ACROSS>
__device__ inline void load_lines(Lines& tile, Operand<IS_ACROSS> from, int first, int k0) {
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * DEPTH / PACK; i += 256) {
        const int line = IS_ACROSS ? i % (SIDE / PACK) * PACK : i % SIDE;
        const int k = IS_ACROSS ? i / (SIDE / PACK) : i / SIDE * PACK;
        const Floats values = from.has(first + line, k0 + k) ? load(from.place(first + line, k0 + k)) : Floats{};
        if (IS_ACROSS) {
            store(&tile[k][line], values);
        } else {
#pragma unroll
            for (int j = 0; j < PACK; j++) tile[k + j][line] = values.x[j];
        }
    }
}

// Lines 4 * thread .. + 3, and the lines 64 further on: neighbouring threads read neighbouring addresses.
__device__ inline void read_lines(float (&x)[8], const float (&lines)[SIDE + 4], int thread) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        *reinterpret_cast<float4*>(x + 4 * half) = *reinterpret_cast<const float4*>(lines + 64 * half + 4 * thread);
    }
}

template <class E, int A_ACROSS, int B_ACROSS>
__device__ inline void register_tiles(Result<E> out, Operand<A_ACROSS> a, Operand<B_ACROSS> b) {
    __shared__ __align__(16) Lines a_tile, b_tile;
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE, right = threadIdx.x % 16, down = threadIdx.x / 16;
    float sums[8][8] = {};
    for (int k0 = 0; k0 < a.K; k0 += DEPTH) {
        load_lines(a_tile, a, row, k0);
        load_lines(b_tile, b, column, k0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float x[8], y[8];
            read_lines(x, a_tile[k], down);
            read_lines(y, b_tile[k], right);
#pragma unroll
            for (int i = 0; i < 64; i++) sums[i / 8][i % 8] += x[i / 8] * y[i % 8];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const int r = row + i / 32 * 64 + 4 * down + i / 8 % 4, c = column + i % 8 / 4 * 64 + 4 * right + i % 4;
        if (r < out.M && c < out.N) {
            put_pair(out.at + int64(r) * out.N + c, sums[i / 8][i % 8] + out.bias_of(c),
                     sums[i / 8][i % 8 + 1] + out.bias_of(c + 1));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
matmul_forward_register_tiles(element* out, const element* inp, const element* weight, const element* bias, int M,
                              int N, int K) {
    register_tiles(Result<element>{out, bias, M, N}, Operand<0>{inp, M, K}, Operand<0>{weight, N, K});
}

extern "C" __global__ void __launch_bounds__(256, 2)
matmul_backward_inp_register_tiles(element* dinp, const element* dout, const element* weight, int M, int N, int K) {
    register_tiles(Result<element>{dinp, nullptr, M, N}, Operand<0>{dout, M, K}, Operand<1>{weight, N, K});
}

extern "C" __global__ void __launch_bounds__(256, 2)
matmul_backward_weight_register_tiles(gradient* dweight, const element* dout, const element* inp, int M, int N, int K) {
    register_tiles(Result<gradient>{dweight, nullptr, M, N}, Operand<1>{dout, M, K}, Operand<1>{inp, N, K});
}

// ---------------------------------------------------------------------------------------------------------------------
// mma_sync: kernels/matmul.cu, the live kernels of all GPUs except Hopper in bfloat16, under other names, because
// Hopper's are loaded beside them. One tensor core instruction does 2048 multiply-adds in bfloat16, or 1024 in TF32,
// and the next steps are being copied to shared memory (cp.async) while this one is multiplied.

#define matmul_forward matmul_forward_mma
#define matmul_forward_gelu matmul_forward_gelu_mma
#define matmul_backward_inp matmul_backward_inp_mma
#define matmul_backward_inp_gelu matmul_backward_inp_gelu_mma
#define matmul_backward_weight matmul_backward_weight_mma

namespace live {
#include "../../kernels/matmul.cu"
}

extern "C" __global__ void matmul_forward_mma(element* out, const element* inp, const element* weight,
                                              const element* bias, int M, int N, int K, int band);
extern "C" __global__ void matmul_forward_gelu_mma(element* out, element* gelu_out, const element* inp,
                                                   const element* weight, const element* bias, int M, int N, int K,
                                                   int band);
extern "C" __global__ void matmul_backward_inp_mma(element* dinp, const element* dout, const element* weight,
                                                   float scale, int M, int N, int K, int band);
extern "C" __global__ void matmul_backward_inp_gelu_mma(element* dinp, float* partials, const element* dout,
                                                        const element* weight, const element* inp, int M, int N, int K,
                                                        int band);
extern "C" __global__ void matmul_backward_weight_mma(gradient* dweight, float4* parts, int* done, const element* dout,
                                                      const element* inp, float scale, int M, int N, int K,
                                                      int band, int splits);
