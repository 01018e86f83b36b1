// out (columns, rows) = inp (rows, columns)^T.
//
// Hopper's tensor cores read a float32 operand from shared memory only if its inner dimension is
// contiguous. In a weight gradient, dout^T @ inp, the inner dimension is the rows, contiguous in
// neither operand. If the smaller operand is transposed first, cuBLASLt and this kernel together
// take three quarters of the time.
//
// Bound by bytes: each element is read once and written once. A tile of SIDE x SIDE goes through
// shared memory, so that reads and writes are coalesced; its rows are padded by one element against
// bank conflicts.

#include "common.cuh"

constexpr int SIDE = TRANSPOSE_SIDE, THREADS = TRANSPOSE_THREADS;
constexpr int ROW_THREADS = SIDE / PACK;  // per row of the tile
constexpr int ROWS_AT_ONCE = THREADS / ROW_THREADS;

// Block (THREADS); grid (columns / SIDE, rows / SIDE), rounded up. columns is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(THREADS)
transpose(element* out, const element* inp, int rows, int columns) {
    __shared__ float tile[SIDE][SIDE + 1];
    const int x = threadIdx.x % ROW_THREADS * PACK, y = threadIdx.x / ROW_THREADS;
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE;
#pragma unroll
    for (int i = y; i < SIDE; i += ROWS_AT_ONCE) {
        if (row + i >= rows || column + x >= columns) continue;
        const Floats values = load(inp + int64(row + i) * columns + column + x);
#pragma unroll
        for (int k = 0; k < PACK; k++) tile[i][x + k] = values.x[k];
    }
    __syncthreads();
    const bool aligned = rows % PACK == 0;  // rows of out start at multiples of 16 bytes
#pragma unroll
    for (int i = y; i < SIDE; i += ROWS_AT_ONCE) {
        if (column + i >= columns) continue;
        element* at = out + int64(column + i) * rows + row + x;
        Floats values;
#pragma unroll
        for (int k = 0; k < PACK; k++) values.x[k] = tile[x + k][i];
        if (aligned && row + x < rows) store(at, values);
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            if (!aligned && row + x + k < rows) from_float(at[k], values.x[k]);
        }
    }
}
