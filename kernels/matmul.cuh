// What the files of matrix products share: how a product is cut into items, and how blocks hand a tile's sums on.
//
//     matmul_forward             out = inp @ weight^T + bias                                                 out =
//     matmul_forward_gelu        the same, and gelu = GELU(out), of the rounded out                          out =, gelu =
//     matmul_backward_inp        dinp = scale * dout @ weight                                                dinp =
//     matmul_backward_inp_gelu   dinp = dout @ weight * GELU'(inp), partials[tile] = column sums of dinp     dinp =, partials =
//     matmul_backward_weight     dweight = scale * dout^T @ inp                                              dweight = (+= if accumulate)
//
// inp (rows,C), weight (OC,C), out, dout (rows,OC), bias (OC). In matmul_backward_inp_gelu, inp is what GELU was applied to. In the
// code, the product is out (M,N) = A (M,K) @ B (K,N); either operand is read as it lies: "across" if the inner dimension, K, is not the
// contiguous one.

#pragma once

#include "gelu.cuh"

struct Sizes {
    int M, N, K, band, splits;  // tiles are taken in bands of so many rows of tiles, the rows first; parts of the inner dimension
};

// An item of work: a tile of BM x BN, or the steps begin .. end - 1, of BK each, of its inner dimension.
struct Item {
    int row, column, tile, split, begin, end;
};

// How many steps of the inner dimension item w has.
template <int BM, int BN, int BK>
__device__ inline int steps_of(int w, const Sizes& z) {
    const int tiles = (z.M + BM - 1) / BM * ((z.N + BN - 1) / BN), steps = (z.K + BK - 1) / BK;
    if (z.splits == 1) return steps;
    const int split = w / tiles;
    return steps * (split + 1) / z.splits - steps * split / z.splits;
}

// Item number w; false when there are no more. A division takes hundreds of cycles: no more of them than needed.
template <int BM, int BN, int BK>
__device__ inline bool pick(Item& item, int w, const Sizes& z) {
    const int down = (z.M + BM - 1) / BM, across = (z.N + BN - 1) / BN, steps = (z.K + BK - 1) / BK;
    const bool whole = z.splits == 1;
    item.split = whole ? w >= down * across : w / (down * across);
    item.tile = whole ? w : w % (down * across);
    const int first = item.tile / (z.band * across) * z.band, height = max(1, min(z.band, down - first));
    const int rest = item.tile - first * across;
    item.row = (first + rest % height) * BM;
    item.column = rest / height * BN;
    item.begin = whole ? 0 : steps * item.split / z.splits;
    item.end = whole ? steps : steps * (item.split + 1) / z.splits;
    return item.split < z.splits;
}

// Across blocks: wait until *count is `value`, and see what was written before; the other side of that.
__device__ inline void wait_for(const int* count, int value) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
    } while (found != value);
}
__device__ inline void announce(int* count, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}
