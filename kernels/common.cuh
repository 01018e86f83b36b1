// Shared by all kernels: the model's sizes, element types, 16-byte loads and stores, asynchronous
// copies, reductions.
//
// Each .cu file is compiled at run time (llmc/gpu/compiler.py) for one GPU and one model, with -D
// constants from llmc/gpu/geometry.py: its layer's launch geometry, and
//     MODEL_C, MODEL_NH, MODEL_NKV, MODEL_HS, MODEL_F, MODEL_V, MODEL_VP
//                                            the model's sizes
//     MODEL_BIASES, MODEL_RELU2              1: RMSNorms are beside linear layers with biases; squared ReLU is in
//                                            GELU's place, see gelu.cuh
//     BFLOAT16                               1: activations, parameters and gradients are bfloat16, the residual stream
//                                            half precision
//     FLOAT32_GRADS                          1: gradients of parameters are float32 whatever BFLOAT16 says
//     TF32                                   1: tensor cores may round float32 operands to TF32
// B and T are run-time values. Indices that can exceed 2^31 are int64; row numbers cannot.
//
// Kernel arguments: outputs first, then inputs, then flags and sizes, as in the NumPy function, if
// there is one.

#pragma once

#ifdef MODEL_QK_SCALE  // whether queries and keys are normalized: see qknorm.cu
#define QK_NORM 1
#else
#define QK_NORM 0
#define MODEL_QK_SCALE 1.0f
#endif

#if BFLOAT16
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

typedef long long int64;
typedef unsigned int uint32;

constexpr int C = MODEL_C;
constexpr int NH = MODEL_NH, NKV = MODEL_NKV;  // heads: of queries, of keys and values
constexpr int HS = MODEL_HS;                   // channels of a head
constexpr int Q = NH * HS, KV = NKV * HS;      // channels of all queries, of all keys
constexpr int QKV = Q + 2 * KV;                // of a row of queries, keys and values: 3 C in GPT-2
constexpr int F = MODEL_F;                     // of the feed-forward layer: 4 C in GPT-2
constexpr int V = MODEL_V, Vp = MODEL_VP;

#if BFLOAT16
typedef __nv_bfloat16 element;
// rounded 2L + 1 times; has 3 more bits than bfloat16 in the same 2 bytes
typedef __half residual_element;
#else
typedef float element;
typedef float residual_element;
#endif

#if FLOAT32_GRADS
typedef float gradient;  // of a parameter
#else
typedef element gradient;
#endif

constexpr int PACK = 16 / sizeof(element);  // elements in one 16-byte access

static_assert(NH % NKV == 0, "a key and value head serves NH / NKV query heads");
static_assert(C % PACK == 0 && F % PACK == 0 && Vp % PACK == 0,
              "rows must start at multiples of 16 bytes");

#define INFINITE __int_as_float(0x7f800000)  // NVRTC's headers have no constant for it
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// -------------------------------------------------------------------------------------------------
// 16-byte loads and stores

struct Floats {
    float x[PACK];
};

__device__ inline Floats operator+(const Floats& a, const Floats& b) {
    Floats sum;
#pragma unroll
    for (int k = 0; k < PACK; k++) sum.x[k] = a.x[k] + b.x[k];
    return sum;
}

// Load PACK elements from a 16-byte boundary without converting them: bfloat16 takes half as many
// registers as float.
template <class T>
__device__ inline uint4 load_bits(const T* at) { return *reinterpret_cast<const uint4*>(at); }

// PACK floats at a 16-byte boundary.
__device__ inline Floats load(const float* at) {
    Floats values;
#pragma unroll
    for (int k = 0; k < PACK; k += 4) {
        *reinterpret_cast<float4*>(values.x + k) = *reinterpret_cast<const float4*>(at + k);
    }
    return values;
}
__device__ inline void store(float* at, const Floats& values) {
#pragma unroll
    for (int k = 0; k < PACK; k += 4) {
        *reinterpret_cast<float4*>(at + k) = *reinterpret_cast<const float4*>(values.x + k);
    }
}

__device__ inline float to_float(float x) { return x; }
__device__ inline void from_float(float& out, float x) { out = x; }
#if BFLOAT16
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(__nv_bfloat16& out, float x) { out = __float2bfloat16_rn(x); }
// Two elements side by side, the first one in the low half.
__device__ inline float2 as_floats(uint32 pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ inline uint32 as_pair(float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// For the residual stream. Values beyond the largest half saturate; inf and NaN stay, so that the
// loss shows them.
__device__ inline float within_half(float x) {
    return fabsf(x) < INFINITE ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x;
}
__device__ inline uint32 as_halves(float low, float high) {
    uint32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ inline float2 of_halves(uint32 pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline void from_float(__half& out, float x) { out = __float2half_rn(within_half(x)); }

// What load_bits has loaded, as floats; floats(word) converts two.
template <class Convert>
__device__ inline Floats unpack(uint4 bits, Convert floats) {
    const uint32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    Floats values;
#pragma unroll
    for (int k = 0; k < PACK; k += 2)
        *reinterpret_cast<float2*>(values.x + k) = floats(words[k / 2]);
    return values;
}
__device__ inline Floats unpack(uint4 bits) { return unpack(bits, as_floats); }
// The inverse; pair(left, right) rounds two floats.
template <class Pair>
__device__ inline uint4 pack(const Floats& values, Pair pair) {
    uint32 words[4];
#pragma unroll
    for (int k = 0; k < PACK; k += 2) words[k / 2] = pair(values.x[k], values.x[k + 1]);
    return {words[0], words[1], words[2], words[3]};
}
__device__ inline Floats load(const __nv_bfloat16* at) { return unpack(load_bits(at)); }
__device__ inline void store(__nv_bfloat16* at, const Floats& values) {
    *reinterpret_cast<uint4*>(at) = pack(values, as_pair);
}

// The same for the residual stream.
__device__ inline Floats unpack_residual(uint4 bits) { return unpack(bits, of_halves); }
__device__ inline uint4 pack_residual(const Floats& values) {
    return pack(values, [](float x, float y) { return as_halves(within_half(x), within_half(y)); });
}
__device__ inline Floats load(const __half* at) { return unpack_residual(load_bits(at)); }
__device__ inline void store(__half* at, const Floats& x) {
    *reinterpret_cast<uint4*>(at) = pack_residual(x);
}
#else
__device__ inline Floats unpack(uint4 bits) {
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
            __uint_as_float(bits.w)};
}
__device__ inline Floats unpack_residual(uint4 bits) { return unpack(bits); }
__device__ inline uint4 pack_residual(const Floats& values) {
    const float* const x = values.x;
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
            __float_as_uint(x[3])};
}
#endif

// Start copying 16 bytes from global to shared memory, or zeros if not `exists`. Before sm_80, this
// is an ordinary load and store.
template <class T>
__device__ inline void copy_async(T* shared, const T* global, bool exists) {
#if __CUDA_ARCH__ >= 800
    const uint32 to = __cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(exists ? 16 : 0)
                 : "memory");
#else
    *reinterpret_cast<uint4*>(shared) = exists ? *reinterpret_cast<const uint4*>(global) : uint4{};
#endif
}
// The same for one float.
__device__ inline void copy_async_float(float* shared, const float* global, bool exists) {
#if __CUDA_ARCH__ >= 800
    const uint32 to = __cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global),
                 "r"(exists ? 4 : 0) : "memory");
#else
    *shared = exists ? *global : 0.0f;
#endif
}
__device__ inline void copies_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until all but the newest PENDING groups of copies have arrived.
template <int PENDING>
__device__ inline void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Repeated division by the same number, in 20 cycles each instead of hundreds. Exact for 0 <= n <
// 2^31.
struct Divisor {
    uint32 divisor, inverse;
    __device__ explicit Divisor(int divisor) : divisor(divisor), inverse(0xffffffffu / divisor) {}
    __device__ int quotient(int n) const {
        const uint32 q = __umulhi(n, inverse);  // at most 1 too small
        return q + (n - q * divisor >= divisor);
    }
};

// 2^x, in one instruction; results below 2^-126 are 0.
__device__ inline float exp2_approx(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// 1 / x, in one instruction.
__device__ inline float inverse(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// 32 random bits, a function of the three numbers. The constants are those of Chris Wellons' hash
// "lowbias32".
__device__ inline uint32 random_bits(uint32 i, uint32 step, uint32 seed) {
    uint32 x = i * 0x9e3779b9u + step;
    x ^= seed * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// The bits of x rounded to TF32 (to nearest, ties away from 0); tensor cores ignore the low 13
// bits.
__device__ inline uint32 tf32(float x) { return __float_as_uint(x) + 0x1000; }

// out[0], out[1] = left, right. out must be at an even index of its tensor.
__device__ inline void put_pair(float* out, float left, float right) {
    *reinterpret_cast<float2*>(out) = float2{left, right};
}
#if BFLOAT16
__device__ inline void put_pair(__nv_bfloat16* out, float left, float right) {
    *reinterpret_cast<uint32*>(out) = as_pair(left, right);
}
#endif

// -------------------------------------------------------------------------------------------------
// reductions: every thread gets the result; the order of additions is fixed, so two runs agree bit
// for bit

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
    return x;
}

// Sum or maximum over the 4 lanes that share a row of an mma tile.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Two sums over WARPS consecutive warps, the first of them a multiple of WARPS; only these warps
// wait for each other. buffer: 0 and 1 in turn, because a slower warp may still be reading the sums
// of the previous call.
template <int WARPS>
__device__ inline float2 sum_over_warps(float2 x, int buffer) {
    x = {warp_sum(x.x), warp_sum(x.y)};
    if constexpr (WARPS > 1) {
        __shared__ float2 sums[2][32];
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) sums[buffer][warp] = x;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / WARPS), "n"(32 * WARPS) : "memory");
        x = {0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 y = sums[buffer][warp / WARPS * WARPS + w];
            x = {x.x + y.x, x.y + y.y};
        }
    }
    return x;
}

// -------------------------------------------------------------------------------------------------
// sums over the rows of an (N,columns) tensor. Block (32, ROW_GROUPS); grid (columns / (32 * PACK)
// rounded up, any number of blocks that share the rows): each writes a row of partial sums, which
// column_sums adds up.

struct BlockRows {
    int c;           // the first of PACK columns that this thread has
    int begin, end;  // the block's rows; a thread has every ROW_GROUPS-th of them
    __device__ explicit BlockRows(int N) : c((blockIdx.x * 32 + threadIdx.x) * PACK) {
        const int rows = (N + gridDim.y - 1) / gridDim.y;
        begin = blockIdx.y * rows, end = min(N, begin + rows);
    }
};

// partials (gridDim.y,columns) = the sums over the block of each thread's `sum`, if `exists`;
// column(k): of its k-th.
template <class Column>
__device__ inline void store_column_sums(float* partials, Floats sum, bool exists, int columns,
                                         const Column& column) {
    __shared__ Floats sums[ROW_GROUPS][32];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || !exists) return;
    for (int i = 1; i < ROW_GROUPS; i++) sum = sum + sums[i][threadIdx.x];
#pragma unroll
    for (int k = 0; k < PACK; k++) partials[int64(blockIdx.y) * columns + column(k)] = sum.x[k];
}
