// Tile products of one warp on the tensor cores of every GPU from sm_80 on.
//
// In float32, D (16,8) += A (16,8) @ B (8,8).
// Of the tile, lane 4g + t holds (PTX ISA, mma.m16n8k8)
//     A   a[0] (g, t)    a[1] (g + 8, t)     a[2] (g, t + 4)    a[3] (g + 8, t + 4)
//     B   b[0] (t, g)    b[1] (t + 4, g)
//     D   d[0] (g, 2t)   d[1] (g, 2t + 1)    d[2] (g + 8, 2t)   d[3] (g + 8, 2t + 1)
//
// Tensor cores read 10 bits of a float's mantissa (TF32). With TF32 on, operands are rounded to that. With TF32 off, each
// operand is the sum of two TF32 numbers, and three of the four products of the parts are added up, the small ones first:
// what is left out is 2^-22 of the result. A tensor core cuts off what it adds, which in a long sum is a drift; so it
// starts from zero each time, and an ordinary addition, which rounds, takes its result into the sum. Before sm_80 there is no
// TF32: there, the operands go around the warp and the products are plain float32 ones, right but slow.

#pragma once

#include "common.cuh"

typedef float TileA[4];
typedef float TileB[2];
typedef float TileD[4];

#if __CUDA_ARCH__ >= 800

// What rounding to TF32 left of x.
__device__ inline float tf32_rest(float x, uint32 rounded) { return x - __uint_as_float(rounded & 0xffffe000); }

__device__ inline void mma_tf32(TileD& d, const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma(TileD& d, const TileA& a, const TileB& b) {
    const uint32 big_a[4] = {tf32(a[0]), tf32(a[1]), tf32(a[2]), tf32(a[3])};
    const uint32 big_b[2] = {tf32(b[0]), tf32(b[1])};
#if TF32
    mma_tf32(d, big_a, big_b);
#else
    const uint32 small_a[4] = {tf32(tf32_rest(a[0], big_a[0])), tf32(tf32_rest(a[1], big_a[1])), tf32(tf32_rest(a[2], big_a[2])),
                               tf32(tf32_rest(a[3], big_a[3]))};
    const uint32 small_b[2] = {tf32(tf32_rest(b[0], big_b[0])), tf32(tf32_rest(b[1], big_b[1]))};
    TileD sum = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_tf32(sum, small_a, big_b);
    mma_tf32(sum, big_a, small_b);
    mma_tf32(sum, big_a, big_b);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] += sum[i];
#endif
}

#if BFLOAT16

// In bfloat16, D (16,8) += A (16,16) @ B (16,8), D in float32. Of the tile, lane 4g + t holds (PTX ISA, mma.m16n8k16), in pairs along k,
//     A   a[0] (g, 2t)    a[1] (g + 8, 2t)    a[2] (g, 2t + 8)    a[3] (g + 8, 2t + 8)
//     B   b[0] (2t, g)    b[1] (2t + 8, g)
// and D as above.
__device__ inline void mma(TileD& d, const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four tiles of 8 rows of 8 elements: lane 8i + r names row r of tile i; of tile i, lane 4g + t gets elements 2t, 2t + 1 of row g in
// x[i], or, `ACROSS`, rows 2t, 2t + 1 of column g.
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

#endif

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
        d.x += upper * left;
        d.y += upper * right;
        d.z += lower * left;
        d.w += lower * right;
    }
    return d;
}

__device__ inline void mma(TileD& d, const TileA& a, const TileB& b) {
    const float4 sum = mma_float32({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]});
    d[0] = sum.x;
    d[1] = sum.y;
    d[2] = sum.z;
    d[3] = sum.w;
}

#endif
