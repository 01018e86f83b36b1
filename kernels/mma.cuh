// Matmuls by one warp (mma.sync), on the tensor cores of every GPU from sm_80 on; before that, in
// plain float32. First the instructions, then the matmuls that attention.cu builds from them.
//
// D (16,8) += A (16,DEPTH) @ B (DEPTH,8), D in float32. A fragment is one lane's part of such a
// tile. In float32, DEPTH is 8, and lane 4g + t holds (PTX ISA, mma.m16n8k8)
//     A   a[0] (g, t)    a[1] (g + 8, t)     a[2] (g, t + 4)    a[3] (g + 8, t + 4)
//     B   b[0] (t, g)    b[1] (t + 4, g)
//     D   d[0] (g, 2t)   d[1] (g, 2t + 1)    d[2] (g + 8, 2t)   d[3] (g + 8, 2t + 1)
// In bfloat16, DEPTH is 16, and the lane holds pairs along k (mma.m16n8k16) that start at
//     A   a[0] (g, 2t)   a[1] (g + 8, 2t)    a[2] (g, 2t + 8)   a[3] (g + 8, 2t + 8)
//     B   b[0] (2t, g)   b[1] (2t + 8, g)
// and D as above.
//
// Tensor cores read only 10 bits of a float's mantissa (TF32). With TF32 on, operands are rounded
// to that. With TF32 off, each operand is split into two TF32 numbers, a big and a small one, and
// three of their four products are added, the smaller ones first; the fourth is 2^-22 of the
// result. Tensor cores truncate when they accumulate, so the error of a long sum grows in one
// direction: the three start from zero, and an ordinary addition, which rounds, accumulates them.
// Before sm_80 there is no TF32: lanes exchange operands by shuffles and multiply in plain float32,
// slowly.

#pragma once

#include "common.cuh"

typedef float FragmentD[4];

#if BFLOAT16

constexpr int DEPTH = 16;
typedef uint32 FragmentA[4];
typedef uint32 FragmentB[2];

__device__ inline void mma(FragmentD& d, const FragmentA& a, const FragmentB& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ldmatrix: load four 8 x 8 matrices. Lane 8i + r passes the address of row r of matrix i. Lane 4g
// + t gets in x[i] elements 2t and 2t + 1 of row g of matrix i or, with ACROSS, of column g.
template <int ACROSS>
__device__ inline void load_tiles(uint32 (&x)[4], const element* row) {
    const uint32 from = __cvta_generic_to_shared(row);
    if (ACROSS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
    }
}

#else

constexpr int DEPTH = 8;
typedef float FragmentA[4];
typedef float FragmentB[2];

#if __CUDA_ARCH__ >= 800

// The rounding error of x as TF32.
__device__ inline float tf32_error(float x, uint32 rounded) {
    return x - __uint_as_float(rounded & 0xffffe000);
}

__device__ inline void mma_tf32(FragmentD& d, const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma(FragmentD& d, const FragmentA& a, const FragmentB& b) {
    const uint32 big_a[4] = {tf32(a[0]), tf32(a[1]), tf32(a[2]), tf32(a[3])};
    const uint32 big_b[2] = {tf32(b[0]), tf32(b[1])};
#if TF32
    mma_tf32(d, big_a, big_b);
#else
    const uint32 small_a[4] = {tf32(tf32_error(a[0], big_a[0])), tf32(tf32_error(a[1], big_a[1])),
                               tf32(tf32_error(a[2], big_a[2])), tf32(tf32_error(a[3], big_a[3]))};
    const uint32 small_b[2] = {tf32(tf32_error(b[0], big_b[0])), tf32(tf32_error(b[1], big_b[1]))};
    FragmentD sum = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_tf32(sum, small_a, big_b);
    mma_tf32(sum, big_a, small_b);
    mma_tf32(sum, big_a, big_b);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] += sum[i];
#endif
}

#else

// Not inlined: hundreds of copies in one kernel would keep the compiler busy for minutes.
__device__ __noinline__ float4 mma_float32(float4 d, float4 a, float2 b) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float upper = __shfl_sync(0xffffffff, k < 4 ? a.x : a.z, 4 * g + k % 4);
        const float lower = __shfl_sync(0xffffffff, k < 4 ? a.y : a.w, 4 * g + k % 4);
        const float left = __shfl_sync(0xffffffff, k < 4 ? b.x : b.y, 8 * t + k % 4);
        const float right = __shfl_sync(0xffffffff, k < 4 ? b.x : b.y, 8 * t + 4 + k % 4);
        d.x += upper * left, d.y += upper * right;
        d.z += lower * left, d.w += lower * right;
    }
    return d;
}

__device__ inline void mma(FragmentD& d, const FragmentA& a, const FragmentB& b) {
    const float4 sum =
        mma_float32({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]});
    d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
}

#endif
#endif

// -------------------------------------------------------------------------------------------------
// For attention.cu: a warp keeps M times 16 rows of one head in registers and multiplies them by
// tiles of another tensor, in shared memory, in the two ways that attention needs:
//
//     matmul_transposed   scores (16,8N) = rows (16,HS) @ tile (8N,HS)^T     query @ key^T
//     matmul              result (16,HS) += scores (16,8N) @ tile (8N,HS)    P @ value, with P still in registers
//
// Each B fragment that is loaded serves all M times 16 rows. bfloat16 and float32 differ in where a
// tile's elements are (tile_at), how they become B fragments, which columns of a result a lane
// holds.

typedef FragmentA Rows[HS / DEPTH];  // 16 rows of one head, as A
// 16 rows of a result: [n][i] is row g + i / 2 * 8, column result_column(n, i)
typedef FragmentD Result[HS / 8];

#if BFLOAT16

// row stride in elements: padded, so that the 16-byte units of 8 rows lie in different banks
constexpr int TILE_STRIDE = HS + 8;

template <class E>
__device__ inline E* tile_at(E* tile, int r, int c) { return tile + r * TILE_STRIDE + c; }
__device__ inline int result_column(int n, int i) { return 8 * n + threadIdx.x % 4 * 2 + i % 2; }

// Load 16 rows from global memory; rows >= T are 0.
__device__ inline void load_rows(Rows& a, const element* head, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + g + i % 2 * 8;
            const element* pair = head + int64(r) * row_stride + 16 * k + 2 * t + i / 2 * 8;
            a[k][i] = r < T ? *reinterpret_cast<const uint32*>(pair) : 0;
        }
    }
}

// sums += this lane's part of the dot products of rows g (sums[0]) and g + 8 (sums[1]) of a and b.
__device__ inline void add_dot_products(float (&sums)[2], const Rows& a, const Rows& b) {
#pragma unroll
    for (int j = 0; j < HS / 4; j++) {
        const float2 x = as_floats(a[j / 4][j % 4]), y = as_floats(b[j / 4][j % 4]);
        sums[j % 2] += x.x * y.x + x.y * y.y;
    }
}

template <int M, int N>
__device__ inline void matmul_transposed(FragmentD (&scores)[M][N], const Rows (&rows)[M],
                                         const element* tile) {
    const int lane = threadIdx.x % 32;
    const element* from = tile_at(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
#pragma unroll
        for (int j = 0; j < 8 * M; j++) scores[j / 8][n + j % 8 / 4][j % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < HS / 16; k++) {
            uint32 b[4];
            load_tiles<0>(b, tile_at(from, 8 * n, 16 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(scores[m][n], rows[m][k], {b[0], b[1]});
                mma(scores[m][n + 1], rows[m][k], {b[2], b[3]});
            }
        }
    }
}

// D has the layout of A: the scores only have to be rounded, in pairs.
template <int M, int N>
__device__ inline void matmul(Result (&result)[M], const FragmentD (&scores)[M][N],
                              const element* tile) {
    const int lane = threadIdx.x % 32;
    const element* from = tile_at(tile, lane / 8 % 2 * 8 + lane % 8, lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        FragmentA a[M];
#pragma unroll
        for (int j = 0; j < 4 * M; j++) {
            const float* pair = scores[j / 4][2 * k + j % 4 / 2] + j % 2 * 2;
            a[j / 4][j % 4] = as_pair(pair[0], pair[1]);
        }
#pragma unroll
        for (int n = 0; n < HS / 8; n += 2) {
            uint32 b[4];
            load_tiles<1>(b, tile_at(from, 16 * k, 8 * n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(result[m][n], a[m], {b[0], b[1]});
                mma(result[m][n + 1], a[m], {b[2], b[3]});
            }
        }
    }
}

// Store f(x, i) for each element x of a result, i = 0 in row g, 1 in row g + 8; rows >= T are
// skipped.
template <class F>
__device__ inline void store_rows(element* head, const Result& d, int row, int T, int row_stride,
                                  const F& f) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        element* to = head + int64(row + g) * row_stride + result_column(n, 0);
        if (row + g < T) *reinterpret_cast<uint32*>(to) = as_pair(f(d[n][0], 0), f(d[n][1], 0));
        if (row + g + 8 < T)
            *reinterpret_cast<uint32*>(to + 8 * row_stride) = as_pair(f(d[n][2], 1), f(d[n][3], 1));
    }
}

#else

// The same functions in float32. The inner dimension of a matmul may be in any order that both
// operands share, and the columns of a result in any order at all. Here they are ordered so that a
// lane's floats are adjacent, for 16- and 8-byte accesses: of every 16 columns of its rows, a lane
// holds 4t .. 4t + 3, the first two as columns t and t + 4 of one instruction's A, the other two as
// those of the next one's. The 16-byte units of a tile's row are swizzled, so that neither access
// pattern has bank conflicts: row g at column 4t with 16 bytes per lane, row 2t at column 2g with 8
// bytes per lane.
constexpr int TILE_STRIDE = (HS + 31) / 32 * 32;

template <class E>
__device__ inline E* tile_at(E* tile, int r, int c) {
    const int flip = (r >> 1 & 1) << 1 | ((r >> 2 ^ r) & 1) << 2;
    return tile + (r * TILE_STRIDE + ((c / 4 ^ flip) * 4 | c % 4));
}
__device__ inline int result_column(int n, int i) {
    return n / 2 * 16 + threadIdx.x % 4 * 4 + i % 2 * 2 + n % 2;
}

__device__ inline void load_rows(Rows& a, const float* head, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < HS / 8; k += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + g + 8 * i;
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (r < T)
                x = *reinterpret_cast<const float4*>(head + int64(r) * row_stride + 8 * k + 4 * t);
            a[k][i] = x.x, a[k][i + 2] = x.y;
            a[k + 1][i] = x.z, a[k + 1][i + 2] = x.w;
        }
    }
}

__device__ inline void add_dot_products(float (&sums)[2], const Rows& a, const Rows& b) {
#pragma unroll
    for (int j = 0; j < HS / 2; j++) sums[j % 2] += a[j / 4][j % 4] * b[j / 4][j % 4];
}

template <int M, int N>
__device__ inline void matmul_transposed(FragmentD (&scores)[M][N], const Rows (&rows)[M],
                                         const float* tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4 * M * N; j++) scores[j / 4 / N][j / 4 % N][j % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < HS / 8; k += 2) {
#pragma unroll
        // consecutive instructions add to different sums
        for (int first = 0; first < N; first += 4) {
            float4 b[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float* rows_of_8 = tile + 8 * (first + n) * TILE_STRIDE;
                b[n] = *reinterpret_cast<const float4*>(tile_at(rows_of_8, g, 8 * k + 4 * t));
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < 4; n++) mma(scores[m][first + n], rows[m][k], {b[n].x, b[n].y});
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < 4; n++)
                    mma(scores[m][first + n], rows[m][k + 1], {b[n].z, b[n].w});
            }
        }
    }
}

// D holds columns 2t and 2t + 1 where A holds t and t + 4, so the tile's rows are read in that
// order, too. Of every 16 columns of the result, one instruction computes the even ones and the
// next one the odd ones.
template <int M, int N>
__device__ inline void matmul(Result (&result)[M], const FragmentD (&scores)[M][N],
                              const float* tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int n = 0; n < HS / 8; n += 2) {
            const float* from = tile + 8 * k * TILE_STRIDE;
            const float2 first =
                *reinterpret_cast<const float2*>(tile_at(from, 2 * t, 8 * n + 2 * g));
            const float2 second =
                *reinterpret_cast<const float2*>(tile_at(from, 2 * t + 1, 8 * n + 2 * g));
#pragma unroll
            for (int m = 0; m < M; m++) {
                const FragmentA a =
                    {scores[m][k][0], scores[m][k][2], scores[m][k][1], scores[m][k][3]};
                mma(result[m][n], a, {first.x, second.x});
                mma(result[m][n + 1], a, {first.y, second.y});
            }
        }
    }
}

template <class F>
__device__ inline void store_rows(float* head, const Result& d, int row, int T, int row_stride,
                                  const F& f) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = row + g + 8 * i;
        if (r >= T) continue;
#pragma unroll
        for (int n = 0; n < HS / 8; n += 2) {
            *reinterpret_cast<float4*>(head + int64(r) * row_stride + result_column(n, 0)) = {
                f(d[n][2 * i], i), f(d[n + 1][2 * i], i), f(d[n][2 * i + 1], i),
                    f(d[n + 1][2 * i + 1], i)};
        }
    }
}

#endif
