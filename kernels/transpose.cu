// out (columns, rows) = inp (rows, columns)^T.
//
// Hopper's tensor cores take a float32 operand from shared memory only with its inner dimension contiguous; a weight
// gradient, dout^T @ inp, has the rows of both on the outside. With one of the two transposed, cuBLASLt's kernels run half as
// fast again (H200, (4096,768)^T @ (4096,3072) with TF32: 119 us as they are, 81 us, and 7 us to transpose the smaller).
//
// Bound by bytes: one element in, one out. A tile of 64 x 64 goes through shared memory, so that both are whole lines, 16 bytes a
// thread. A row of the tile in shared memory is one element longer than it is wide: its columns lie in different banks. H200 (a
// copy: 4250 GB/s), (4096,768) / (16384,768): 2320 / 3360 GB/s.

#include "common.cuh"

constexpr int SIDE = 64;
constexpr int ACROSS = SIDE / PACK;       // threads for one row of the tile
constexpr int DOWN = 256 / ACROSS;        // rows at a time

// Block (256); grid (columns / 64, rows / 64), rounded up. columns is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(256) transpose(element* out, const element* inp, int rows, int columns) {
    __shared__ float tile[SIDE][SIDE + 1];
    const int x = threadIdx.x % ACROSS * PACK, y = threadIdx.x / ACROSS;
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE;
#pragma unroll
    for (int i = y; i < SIDE; i += DOWN) {
        if (row + i >= rows || column + x >= columns) continue;
        const Floats values = load(inp + int64(row + i) * columns + column + x);
#pragma unroll
        for (int k = 0; k < PACK; k++) tile[i][x + k] = values.x[k];
    }
    __syncthreads();
    const bool packs = rows % PACK == 0;  // else rows of out do not start at multiples of 16 bytes
#pragma unroll
    for (int i = y; i < SIDE; i += DOWN) {
        if (column + i >= columns) continue;
        element* at = out + int64(column + i) * rows + row + x;
        Floats values;
#pragma unroll
        for (int k = 0; k < PACK; k++) values.x[k] = tile[x + k][i];
        if (packs && row + x < rows) store(at, values);
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            if (!packs && row + x + k < rows) from_float(at[k], values.x[k]);
        }
    }
}
