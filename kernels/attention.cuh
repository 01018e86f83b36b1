// What the forward pass (attention.cu) and the backward passes of attention share: the scale, and
// what becomes of a gradient before it is stored.

#pragma once

#include "mma.cuh"
#include "rope.cuh"
#include "softmax.cuh"

static_assert(HS % 16 == 0, "bfloat16 tensor cores multiply 16 columns of a head at a time");
static_assert(HS <= 128, "rows of a head stay in registers");

constexpr int GROUP = NH / NKV;  // query heads that read the same keys and values
constexpr int ROW_BYTES = TILE_STRIDE * sizeof(element);  // of a tile

// 1 / sqrt(HS), a constant to the compiler.
__device__ inline float scale() { return BFLOAT16 ? rsqrtf(HS) : 1.0f / sqrtf(float(HS)); }

// The gradient of a warp's 16 rows of one head before they were normalized to y's (qknorm.cu).
// rstd: of the head.
__device__ inline void norm_back(Result& d, const element* y, const float* rstd, float scale,
                                 int row, int T) {
    float products[2] = {};  // of rows g and g + 8
    const auto y_at = [&](int n, int i) {
        // rows >= T are 0 in d
        const int r = min(row + int(threadIdx.x) % 32 / 4 + i / 2 * 8, T - 1);
        return to_float(y[int64(r) * QKV + result_column(n, i)]);
    };
#pragma unroll
    for (int j = 0; j < HS / 2; j++) products[j % 4 / 2] += d[j / 4][j % 4] * y_at(j / 4, j % 4);
    float mean[2], r[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        mean[k] = quad_sum(products[k]) / (HS * scale);
        r[k] = rstd[min(row + int(threadIdx.x) % 32 / 4 + k * 8, T - 1) * (NH + NKV)];
    }
#pragma unroll
    for (int j = 0; j < HS / 2; j++) {
        const int k = j % 4 / 2;
        d[j / 4][j % 4] = r[k] * (scale * d[j / 4][j % 4] - y_at(j / 4, j % 4) * mean[k]);
    }
}

// Rotate a warp's 16 rows of one head's gradient back, unless rope is null.
__device__ inline void rotate_back(Result& d, const float2* rope, int row, int T) {
    if (!rope) return;
#pragma unroll
    for (int p = 0; p < HS / 4; p++) {  // the lane's pairs of neighbours: see result_column
        const int n = BFLOAT16 ? p / 2 : p / 4 * 2, i = BFLOAT16 ? p % 2 * 2 : p % 4;
        float &a = d[n][i], &b = BFLOAT16 ? d[n][i + 1] : d[n + 1][i];
        const int r = min(row + int(threadIdx.x) % 32 / 4 + i / 2 * 8, T - 1);  // rows >= T are 0
        rotate_back(a, b, rope[r * (HS / 2) + result_column(n, i) / 2]);
    }
}

// Store a warp's 16 rows of one head's gradient, times `factor`; if `summed`, sums[c] = the sum of
// their column c.
__device__ inline void store_gradient(element* head, float (&sums)[HS], bool summed,
                                      const Result& d, float factor,
                                      int row, int T) {
    store_rows(head, d, row, T, QKV, [&](float x, int) { return x * factor; });
    if (!summed) return;
#pragma unroll
    for (int j = 0; j < HS / 4; j++) {
        const float upper = d[j / 2][j % 2], lower = d[j / 2][j % 2 + 2];  // rows >= T are 0
        float sum = BFLOAT16 ? (upper + lower) * factor : __fadd_rn(upper * factor, lower * factor);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, distance);
        if (threadIdx.x % 32 < 4) sums[result_column(j / 2, j % 2)] = sum;
    }
}

// out[c] = the sum of 4 warps' sums, by `threads` threads of which this is number `thread`.
__device__ inline void add_warps(float* out, const float (*sums)[HS], int thread, int threads) {
    for (int c = thread; c < HS; c += threads)
        out[c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
}
