// FP8: the forward pass of layernorm.cu or rmsnorm.cu with its result, the input of a matmul,
// rounded to E4M3 as by quantize (fp8.cu), but from float32: plain (N,C) and transposed (C,pitch) =
// E4M3(out * scale), largest and counts are noted. pitch: N rounded up to 16; what is beyond N
// becomes 0.
//
// A block makes the rows of a tile, a row in the registers of its warps, and collects their bytes
// in shared memory: the transposed copy is written 16 rows of a column at a time, side by side for
// whole sectors of 32 bytes. Tiles are processed last to first, as rows in layernorm.cu. Bound by
// bytes: 4 read and 4 written for each number.

#include "fp8.cuh"
#include "norm.cuh"

constexpr int TILE_ROWS = NORM_TILE_ROWS, UNITS = TILE_ROWS / 16;
// From one unit, 16 rows of the tile, to the next. Lanes read the same row of all units, and of
// each 32 / UNITS words: the padding leads them to different banks.
constexpr int UNIT_STRIDE = 16 * C + 128 / UNITS;
static_assert(NORM_SHARED == UNITS * UNIT_STRIDE && TILE_ROWS % ROWS == 0 && C % 16 == 0,
              "as launched");

// A block's tile of plain and transposed, each if not null.
struct Tile {
    unsigned char *const plain, *const transposed;
    const float scale;
    const int N, first = (gridDim.x - 1 - blockIdx.x) * TILE_ROWS;  // its first row
    AmaxStats noted{scale};

    __device__ static unsigned char* shared_at(int own, int c) {  // of the tile's row `own`
        extern __shared__ uint4 shared[];
        return reinterpret_cast<unsigned char*>(shared) + own / 16 * UNIT_STRIDE + own % 16 * C + c;
    }

    // Columns c .. c + 7 of the tile's row `own`. The next or previous thread has the others of 16.
    __device__ void put(int own, int c, const Floats& y) {
        uint32 words[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float* const x = y.x + 4 * k;
            words[k] = four_bytes(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
        }
        noted.add(y.x, words);
        const int lanes = (C - c) / PACK + threadIdx.x % 32;  // of this warp, with columns
        const uint2 bytes = in_order({words[0], words[1]}, 0xffffffff >> max(32 - lanes, 0));
        if (plain) *reinterpret_cast<uint2*>(plain + int64(first + own) * C + c) = bytes;
        if (transposed) *reinterpret_cast<uint2*>(shared_at(own, c)) = bytes;
    }

    // After the last put, by all threads.
    __device__ void transpose() {
        if (!transposed) return;
        __syncthreads();
        const int64 pitch = (N + 15) / 16 * 16;
#pragma unroll 1
        // 4 columns of a unit: 2t, 2t + 1, 2t + 8, 2t + 9
        for (int i = threadIdx.x; i < C / 4 * UNITS; i += THREADS) {
            const int unit = i % UNITS, c = i / UNITS * 4, row = first + 16 * unit;
            if (row >= N) continue;
            const unsigned char* const from = shared_at(16 * unit, c);
            uint32 columns[4][4];  // 4 rows in each word
#pragma unroll
            for (int quad = 0; quad < 4; quad++) {
                uint32 w[4];  // a row's 4 columns
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int r = 2 * quad + k / 2 + k % 2 * 8;
                    const uint32 word = *reinterpret_cast<const uint32*>(from + r * C);
                    w[k] = row + r < N ? word : 0;
                }
                const uint32 left[2] =
                    {__byte_perm(w[0], w[1], 0x5140), __byte_perm(w[2], w[3], 0x5140)};
                const uint32 right[2] =
                    {__byte_perm(w[0], w[1], 0x7362), __byte_perm(w[2], w[3], 0x7362)};
                columns[0][quad] = __byte_perm(left[0], left[1], 0x5410);
                columns[1][quad] = __byte_perm(left[0], left[1], 0x7632);
                columns[2][quad] = __byte_perm(right[0], right[1], 0x5410);
                columns[3][quad] = __byte_perm(right[0], right[1], 0x7632);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint32* const y = columns[k];
                const int to = c / 16 * 16 + c % 16 / 2 + k % 2 + k / 2 * 8;
                *reinterpret_cast<uint4*>(transposed + to * pitch + row) = {y[0], y[1], y[2], y[3]};
            }
        }
    }
};

// Block (THREADS); grid (N / TILE_ROWS, rounded up). Shared memory: NORM_SHARED. inp2 and residual
// may be null, both or neither; plain, transposed and largest may be null. Up to C=6144, registers
// are left for four blocks.
extern "C" __global__ void __launch_bounds__(THREADS, PACKS * PACK <= 24 ? 4 : 1)
residual_layernorm_forward_fp8(residual_element* residual, unsigned char* plain,
                               unsigned char* transposed,
                               const float* scale, int* largest, int64* counts, float* mean,
                                   float* rstd,
                               const residual_element* inp1, const element* inp2,
                                   const element* weight,
                               const element* bias, int N) {
    Tile tile = {plain, transposed, *scale, N};
#pragma unroll 1
    for (int i = 0; i < TILE_ROWS; i += ROWS) {
        const int own = i + threadIdx.x / ROW_THREADS, row = tile.first + own;
        norm_row<false>(residual, mean, rstd, inp1, inp2, weight, bias, 1e-5f, row, row < N, 1,
                        [&](int c, Floats& y) { tile.put(own, c, y); });
    }
    tile.noted.publish(largest, counts);
    tile.transpose();
}

// The same.
extern "C" __global__ void __launch_bounds__(THREADS, PACKS * PACK <= 24 ? 4 : 1)
residual_rmsnorm_forward_fp8(residual_element* residual, unsigned char* plain,
                             unsigned char* transposed,
                             const float* scale, int* largest, int64* counts, float* rstd,
                             const residual_element* inp1, const element* inp2,
                                 const element* weight, float eps,
                             int N) {
    Tile tile = {plain, transposed, *scale, N};
#pragma unroll 1
    for (int i = 0; i < TILE_ROWS; i += ROWS) {
        const int own = i + threadIdx.x / ROW_THREADS, row = tile.first + own;
        norm_row<true>(residual, nullptr, rstd, inp1, inp2, weight, nullptr, eps, row, row < N,
                       i / ROWS % 2,
                       [&](int c, Floats& y) { tile.put(own, c, y); });
    }
    tile.noted.publish(largest, counts);
    tile.transpose();
}
