// What the optimizers' kernels share: what changes from step to step, a rank's chunks, their
// gradients, rounding.

#pragma once

#include "common.cuh"

constexpr int THREADS = UPDATE_THREADS;

struct Control {
    int64 step;         // updates done
    int64 steps_begun;  // its lowest bit: the half of the pinned memory that holds the current step
    float rate;         // learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t), t counted from 1
    float eps;          // eps * sqrt(1 - beta2^t)
    float learning_rate;
    float grad_scale;   // what gradients are multiplied by: the batch's scale, and by clipping
    int halted;         // a loss or norm was not finite: the weights no longer change
    int skipped;        // this update is an outlier, or has no target
};

struct Chunk {       // CHUNKS of llmc/gpu/shares.py
    int64 local;     // offset in the buffers of the rank that owns it
    int64 flat;      // offset in the buffers of all parameters
    int64 received;  // offset of the first rank's gradients
    int stride;      // from one rank's gradients to the next's
    int count;       // elements, at most UPDATE_CHUNK
    int index;       // in the flat buffer's order
    float rate;      // what the learning rate is multiplied by
    float decay;
    int at_random;   // 1: always rounded stochastically (weights of layernorms)
};

// Four numbers, 16 bytes of float32 or 8 of bfloat16: what a thread works on at once. Even in a
// bfloat16 run, six of seven bytes that adamw_update moves are float32, of which 8 numbers per
// thread would not be contiguous in a warp.
constexpr int NUMBERS = UPDATE_ADAMW_NUMBERS;
struct Quad {
    float x[4];
};
static_assert(NUMBERS * sizeof(float) == sizeof(Quad), "a thread works on one Quad");
static_assert(UPDATE_CHUNK % (THREADS * NUMBERS) == 0, "whole blocks work on a chunk");
constexpr int BLOCKS = UPDATE_CHUNK / (THREADS * NUMBERS);  // of a chunk, in adamw_update's grid
__device__ inline int within_chunk() {
    return (blockIdx.x % BLOCKS * THREADS + threadIdx.x) * NUMBERS;
}

__device__ inline Quad load_quad(const float* at) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    return {four.x, four.y, four.z, four.w};
}
__device__ inline void store_quad(float* at, const Quad& values) {
    *reinterpret_cast<float4*>(at) = {values.x[0], values.x[1], values.x[2], values.x[3]};
}
#if BFLOAT16
__device__ inline Quad load_quad(const __nv_bfloat16* at) {
    const uint2 bits = *reinterpret_cast<const uint2*>(at);
    const float2 low = as_floats(bits.x), high = as_floats(bits.y);
    return {low.x, low.y, high.x, high.y};
}
__device__ inline void store_quad(__nv_bfloat16* at, const Quad& values) {
    *reinterpret_cast<uint2*>(at) =
        {as_pair(values.x[0], values.x[1]), as_pair(values.x[2], values.x[3])};
}
#endif

__device__ inline float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// A rank's gradients for an update. sums (elements of its chunks): of earlier micro-batches, or
// null; gradients: the last ones of all ranks, see Chunk. They are added in the order of the ranks,
// which is that of their micro-batches.
struct Gradients {
    const float* sums;
    const gradient* gradients;
    int rank_count;

    __device__ Quad operator()(const Chunk& chunk, int i) const {
        const gradient* at = gradients + chunk.received + i;
        Quad g = load_quad(at), sum = {};
        if (sums) sum = load_quad(sums + chunk.local + i);
        for (int r = 1;; r++) {
#pragma unroll
            for (int k = 0; k < NUMBERS; k++) sum.x[k] += g.x[k];
            if (r == rank_count) return sum;
            g = load_quad(at += chunk.stride);
        }
    }
};

// x rounded to one of the two adjacent bfloat16 numbers, the nearer one with the higher
// probability, so that the expected value is x: 16 random bits are added below the last bit that is
// kept, and the rest is truncated. inf and NaN stay: a carry could turn NaN into -0.
__device__ inline float round_stochastically(float x, uint32 random16) {
    return isfinite(x) ? __uint_as_float(__float_as_uint(x) + random16 & 0xffff0000) : x;
}

// The same for each of four; float32 weights are not rounded.
__device__ inline void round_stochastically(Quad& values, uint32 i, uint32 step, uint32 seed) {
#if BFLOAT16
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const uint32 random = random_bits(i + k, step, seed);
        values.x[k] = round_stochastically(values.x[k], random & 0xffff);
        values.x[k + 1] = round_stochastically(values.x[k + 1], random >> 16);
    }
#endif
}
