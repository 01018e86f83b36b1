// out (columns, rows) = inp (rows, columns)^T.
//
// Hopper's tensor cores take a float32 operand from shared memory only with its inner dimension contiguous; a weight
// gradient, dout^T @ inp, has the rows of both on the outside. With one of the two transposed, cuBLASLt's kernels run half as
// fast again (H200, (4096,768)^T @ (4096,3072) with TF32: 119 us as they are, 81 us, and 7 us to transpose the smaller).
//
// Bound by bytes: one element in, one out. A tile of 32 x 32 goes through shared memory, so that both are whole lines.

#include "common.cuh"

// Block (32, 8); grid (columns / 32, rows / 32), rounded up.
extern "C" __global__ void __launch_bounds__(256) transpose(element* out, const element* inp, int rows, int columns) {
    __shared__ element tile[32][33];
    const int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.x;
#pragma unroll
    for (int i = threadIdx.y; i < 32; i += 8) {
        const int row = blockIdx.y * 32 + i;
        if (row < rows && c < columns) tile[i][threadIdx.x] = inp[int64(row) * columns + c];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.y; i < 32; i += 8) {
        const int column = blockIdx.x * 32 + i;
        if (column < columns && r < rows) out[int64(column) * rows + r] = tile[threadIdx.x][i];
    }
}
