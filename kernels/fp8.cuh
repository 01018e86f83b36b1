// E4M3 and, for gradients, E5M2: rounding to 8 bits, the order of stored numbers, what is noted for
// the next update's scale. Terms: see fp8.cu.
//
// The order of numbers along the inner dimension of a matmul is free, as long as both operands have
// the same. Ours is that of tensor cores' results: of 16 x 16, a thread has rows g and g + 8,
// columns 2t, 2t + 1, 2t + 8 and 2t + 9. So an epilogue stores a thread's numbers by stmatrix as
// they are; else, lanes would have to exchange them. Of each 16:
//     columns   0 1 8 9  2 3 10 11  4 5 12 13  6 7 14 15    (N,C), and weights, as they are and transposed
//     rows      0 8 1 9  2 10 3 11  4 12 5 13  6 14 7 15    transposed, but for weights: (C,N)
// Rows of a transposed copy, and of a weight, are not permuted, only the numbers in them.

#pragma once

#include "common.cuh"
#include <cuda_fp8.h>

// For __byte_perm: of four of the first 8 and four of the last 8, the first two and the last two of
// each, in our order.
constexpr uint32 FIRST_COLUMNS = 0x5410, LAST_COLUMNS = 0x7632, FIRST_ROWS = 0x5140,
    LAST_ROWS = 0x7362;

// For __byte_perm: of rows 2t, 2t + 1 and 2t + 8, 2t + 9 of two columns, the four numbers of one
// column, in our order.
constexpr uint32 EVEN_TRANSPOSED = 0x6240, ODD_TRANSPOSED = 0x7351;

// Two numbers, and four, the first one in the lowest byte, in E4M3 or E5M2. Beyond the largest
// number, 448 or 57344, they saturate; NaN stays.
template <bool E5M2 = false>
__device__ inline uint32 two_bytes(float a, float b) {
    return __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, E5M2 ? __NV_E5M2 : __NV_E4M3);
}
template <bool E5M2 = false>
__device__ inline uint32 four_bytes(float a, float b, float c, float d) {
    return two_bytes<E5M2>(a, b) | two_bytes<E5M2>(c, d) << 16;
}

// Threads 2i and 2i + 1 have the first and the last 8 of 16 columns, in natural order -> in ours.
// lanes: those of this warp that take part.
__device__ inline uint2 in_order(uint2 bytes, uint32 lanes = 0xffffffff) {
    const bool last = threadIdx.x % 2;
    const uint32 other = __shfl_xor_sync(lanes, last ? bytes.x : bytes.y, 1);
    const uint32 left = last ? other : bytes.x, right = last ? bytes.y : other;
    return {__byte_perm(left, right, FIRST_COLUMNS), __byte_perm(left, right, LAST_COLUMNS)};
}

// Two squares of 16 x 16, of which a thread has 8 numbers each, rounded: rows g and g + 8 of each,
// for stmatrix.
template <bool E5M2 = false>
__device__ inline void round_squares(uint32 (&rows)[4], const float (&x)[16], float scale = 1.0f) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float* const y = x + k / 2 * 8 + k % 2 * 2;
        rows[k] = four_bytes<E5M2>(y[0] * scale, y[1] * scale, y[4] * scale, y[5] * scale);
    }
}

// The reverse, of E4M3: the numbers that they stand for, times their scale.
__device__ inline void floats_of_squares(float (&x)[16], const uint32 (&rows)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float* const y = x + k / 2 * 8 + k % 2 * 2;
        const __half2 low = __nv_cvt_fp8x2_to_halfraw2(rows[k] & 0xffff, __NV_E4M3);
        const __half2 high = __nv_cvt_fp8x2_to_halfraw2(rows[k] >> 16, __NV_E4M3);
        y[0] = __low2float(low), y[1] = __high2float(low), y[4] = __low2float(high),
            y[5] = __high2float(high);
    }
}

// 1 / scale. A scale is a power of 2.
__device__ inline float inverse_of_scale(float scale) {
    return __int_as_float(0x7f000000 - __float_as_int(scale));
}

// The dequantization factor of a product of operands.
__device__ inline float factor_of(const float* a_scale, const float* b_scale) {
    return inverse_of_scale(*a_scale) * inverse_of_scale(*b_scale);
}

// The largest absolute value. NaN is larger than all others, or not looked at.
template <bool NAN_IS_LARGEST, int N>
__device__ inline float largest_of(const float (&x)[N]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float size = fabsf(x[i]);
        if (NAN_IS_LARGEST) {
            asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(size));
        } else {
            most = fmaxf(most, size);
        }
    }
    return most;
}
template <bool NAN_IS_LARGEST, int N>
__device__ inline float largest_of(const uint32 (&pairs)[N]) {  // of bfloat16
    uint32 most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (NAN_IS_LARGEST) {  // of absolute values, though most may have a sign
            asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(pairs[i]));
        } else {
            asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(pairs[i]));
        }
    }
    const float2 both = as_floats(most);
    return largest_of<NAN_IS_LARGEST>({both.x, both.y});
}

// A thread's part of a tensor: the largest number before it is scaled, NaN apart; how many of its
// numbers in 8 bits are the largest one, +-448 or, of E5M2, +-57344, or NaN, and 128 for each that
// is 0.
struct AmaxStats {
    const float limit;      // larger numbers may become the largest
    const uint32 to_carry;  // what makes the highest bit of the largest one and of NaN 1
    float largest = 0.0f;
    int saturated = 0, underflowed = 0;

    // 416 and 49152: the number before the largest
    __device__ explicit AmaxStats(float scale, bool is_e5m2 = false)
        : limit((is_e5m2 ? 49152.0f : 416.0f) * inverse_of_scale(scale)),
            to_carry(is_e5m2 ? 0x05050505 : 0x02020202) {}

    // x: floats, or pairs of bfloat16; bytes: what they became.
    template <class Numbers, int WORDS>
    __device__ void add(const Numbers& x, const uint32 (&bytes)[WORDS]) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const uint32 zeros = ~((bytes[i] & 0x7f7f7f7f) + 0x7f7f7f7f) & 0x80808080;
            // adds up the bytes, faster than __popc
            underflowed = __dp4a(zeros, 0x01010101u, uint32(underflowed));
        }
        const float most = largest_of<true>(x);
        if (most < limit) {
            largest = fmaxf(largest, most);
        } else {  // seldom
            largest = fmaxf(largest, largest_of<false>(x));
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                saturated += __popc((bytes[i] & 0x7f7f7f7f) + to_carry & 0x80808080);
        }
    }

    // By all threads of a warp. all_largest: as bits, which are in the order of the numbers, or
    // null: nothing is noted; counts: saturated, underflowed.
    __device__ void publish(int* all_largest, int64* counts) {
        if (!all_largest) return;
        const int most = __reduce_max_sync(0xffffffff, __float_as_int(largest));
        saturated = __reduce_add_sync(0xffffffff, saturated);
        underflowed = __reduce_add_sync(0xffffffff, underflowed) / 128;
        if (threadIdx.x % 32 > 0) return;
        if (most > *all_largest) atomicMax(all_largest, most);  // most warps do not raise it
        unsigned long long* const sums = reinterpret_cast<unsigned long long*>(counts);
        if (saturated) atomicAdd(sums, saturated);
        if (underflowed) atomicAdd(sums + 1, underflowed);
    }
};
