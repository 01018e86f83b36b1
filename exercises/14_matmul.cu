// A matmul forward. One idea: how many multiply-adds a number serves once it is close. First tiles in shared memory,
// that all threads of a block use; then the tensor cores, which multiply whole tiles.
//
//     out = inp @ weight^T + bias                                                             out =
//
// inp (M,K), weight (N,K), out (M,N), bias (N). M, N, K are no multiples of the tile: it is filled up with zeros. N and
// K are multiples of 8: 16 bytes of a row are whole, and load_bits and put_pair of kernels/common.cuh may be used.

#include "mma.cuh"

// A thread has an element of out. Block (tile, tile), tile 8, 16 or 32; grid (N / tile, M / tile, rounded up); dynamic
// shared memory: 2 * tile * (tile + 1) floats.
extern "C" __global__ void __launch_bounds__(1024)
matmul_forward_shared_tiles(element* out, const element* inp, const element* weight, const element* bias, int M, int N,
                            int K) {
    // not written yet: about 20 lines
}

// A warp has tiles of 16 x 8 elements of out, by mma() of kernels/mma.cuh, whose head says which lane holds what: A
// (row, k), B (k, column), D (row, column). It is enough if it works in bfloat16. Block (128), grid (N / 64, M / 64,
// rounded up).
extern "C" __global__ void __launch_bounds__(128)
matmul_forward_tensor_cores(element* out, const element* inp, const element* weight, const element* bias, int M, int N,
                            int K) {
    // not written yet: about 50 lines
}
