// E4M3: numbers rounded to 8 bits, and what is noted of them for the next update's scale. fp8.cu has the words.

#pragma once

#include "common.cuh"
#include <cuda_fp8.h>

// Two numbers, and four, the first one in the lowest byte. Beyond 448 they saturate; NaN stays.
__device__ inline uint32 two_bytes(float a, float b) {
    return __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
}
__device__ inline uint32 four_bytes(float a, float b, float c, float d) {
    return two_bytes(a, b) | two_bytes(c, d) << 16;
}

// Of 16 rows of bytes, lane 4g + t has columns 2t and 2t + 1 of row g, then of row g + 8 -> column 2t + g % 2 of four
// rows, from (g & 4) + (g & 2) * 4 on. Lanes of rows g and g ^ 1 exchange, so that each has one column of both rows;
// then, with g ^ 2, of four rows.
__device__ inline uint32 four_rows(uint32 bytes) {
    const int g = threadIdx.x % 32 / 4;
    bytes = __byte_perm(bytes, __shfl_xor_sync(0xffffffff, bytes, 4), g % 2 ? 0x3715 : 0x6240);
    return __byte_perm(bytes, __shfl_xor_sync(0xffffffff, bytes, 8), g & 2 ? 0x3276 : 0x5410);
}

// A thread's part of a tensor: the largest number before it is scaled, NaN apart; how many of its E4M3 numbers are
// +-448 or NaN, and how many are 0.
struct Noted {
    float largest = 0.0f;
    int saturated = 0, vanished = 0;

    __device__ void number(float x) { largest = fmaxf(largest, fabsf(x)); }
    __device__ void bytes(uint32 four) {
        const uint32 sizes = four & 0x7f7f7f7f;
        saturated += __popc(sizes + 0x02020202 & 0x80808080);   // from 0x7e on
        vanished += __popc(~(sizes + 0x7f7f7f7f) & 0x80808080);
    }

    // By all threads of a warp. all_largest: as bits, which are in the order of the numbers, or null: nothing is noted;
    // counts: saturated, vanished.
    __device__ void publish(int* all_largest, int* counts) {
        if (!all_largest) return;
        const int most = __reduce_max_sync(0xffffffff, __float_as_int(largest));
        saturated = __reduce_add_sync(0xffffffff, saturated), vanished = __reduce_add_sync(0xffffffff, vanished);
        if (threadIdx.x % 32 > 0) return;
        if (most > *all_largest) atomicMax(all_largest, most);  // most warps do not raise it
        if (saturated) atomicAdd(counts, saturated);
        if (vanished) atomicAdd(counts + 1, vanished);
    }
};

struct TensorMap;  // of hopper/hopper.cuh

// A tensor that results in 8 bits.
struct Quantised {
    const TensorMap &plain, &transposed;
    const float* scale;
    int *largest, *counts;  // or null: this pass is not part of an update, and nothing reads `transposed`
};
