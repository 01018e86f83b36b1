// The gradient of a row of logits, which replaces them: what a row on chip holds between its sum
// and its gradient, and how the gradient is rounded and stored.

#pragma once

#include "common.cuh"
#if CLASSIFIER_FP8
#include "fp8.cuh"
#endif

// Whether the target is in the pack at v.
__device__ inline bool has_target(int v, int target) { return uint32(target - v) < PACK; }

// Between a row's sum and its gradient, a pack of it in half precision, in bfloat16 runs.
#if BFLOAT16
__device__ inline uint4 kept(const Floats& x) {
    return {as_halves(x.x[0], x.x[1]), as_halves(x.x[2], x.x[3]), as_halves(x.x[4], x.x[5]),
            as_halves(x.x[6], x.x[7])};
}
__device__ inline Floats unpack_kept(const uint4& bits) {
    return load(reinterpret_cast<const __half*>(&bits));
}
#else
__device__ inline uint4 kept(const Floats& x) { return {}; }
__device__ inline Floats unpack_kept(const uint4& bits) { return Floats(); }
#endif

#if CLASSIFIER_FP8
typedef unsigned char dlogit;
// Rounds x, as a half, to one of its two neighbours in E5M2, with that half as the expected value:
// the nearest one would be on the same side for all tokens that are equally probable, and so shift
// their probabilities. E5M2 is a half's first byte; a random byte is added to the second one, which
// is dropped. `random` follows from the row.
struct Rounding {
    uint32 random;
    const uint32 mask;  // 0 for a row of NaN: a carry would turn it into -0

    __device__ Rounding(int thread, float scale, int target)
        : random(random_bits(thread, __float_as_uint(scale), target)),
            mask(isfinite(scale) ? 0x00ff00ff : 0) {}

    __device__ uint32 four_bytes(float a, float b, float c, float d) {
        random = random * 1664525u + 1013904223u;
        const uint32 ab = as_halves(a, b) + (random & mask),
            cd = as_halves(c, d) + (random >> 8 & mask);
        return __byte_perm(ab, cd, 0x7531);
    }
};
__device__ inline void store_dlogits(dlogit* to, const Floats& x, uint32 lanes,
                                     Rounding& rounding) {
    const uint32 first = rounding.four_bytes(x.x[0], x.x[1], x.x[2], x.x[3]);
    *reinterpret_cast<uint2*>(to) =
        in_order({first, rounding.four_bytes(x.x[4], x.x[5], x.x[6], x.x[7])}, lanes);
}
#else
typedef element dlogit;
struct Rounding {
    __device__ Rounding(int, float, int) {}
};
__device__ inline void store_dlogits(dlogit* to, const Floats& x, uint32, Rounding&) {
    store(to, x);
}
#endif
