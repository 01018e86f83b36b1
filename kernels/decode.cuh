// What the kernels of text generation share: their launch, and the layernorm before a matmul, with the sum before it.

#pragma once

#include "common.cuh"

constexpr int WARPS = DECODE_WARPS, THREADS = 32 * WARPS;
constexpr int ROWS = DECODE_ROWS;  // of a weight, in a tile of a matmul: 16 or 8

typedef unsigned long long uint64;

// What a step knows beside its tensors; the host sets it before the first one.
struct Control {
    int position;  // of the token that is about to be read, the first one of each sequence
    int step;      // how many tokens were drawn so far
    int arrived;   // blocks of decode_sample that are done
    int top_k;     // these three: llmc/sampler.py's Choice
    float temperature, top_p;
};

// Of the logits of a tile of decode_logits: the largest, and the sums of exp(logit - largest) with and without the
// temperature.
struct Tile {
    float largest, sum, plain_sum;
};

// The next kernel may begin, as soon as all blocks of this one have.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until then, nothing that this pass writes may be read. Control is: only the last kernel of a step writes it.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Where N is small, each block of a matmul does the layernorm for itself, in less time than a kernel of its own takes
// to begin; both ways have the same bits.

// out (N,C) = inp (N,C) + branch_bias (C,) + the parts of branches (.,N,C), or their pieces; out is another buffer than
// inp.
struct Residual {
    float* out;
    const float *inp, *branches;
    const element* branch_bias;
};

// 4 neighbouring values.
__device__ inline float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ inline void store4(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
#if BFLOAT16
__device__ inline float4 load4(const __nv_bfloat16* at) {
    const uint2 bits = *reinterpret_cast<const uint2*>(at);
    const float2 low = as_floats(bits.x), high = as_floats(bits.y);
    return {low.x, low.y, high.x, high.y};
}
__device__ inline void store4(__nv_bfloat16* at, float4 x) {
    *reinterpret_cast<uint2*>(at) = {as_pair(x.x, x.y), as_pair(x.z, x.w)};
}
#endif
__device__ inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The sum over the block, for all its threads. turn: 0 and 1, alternately, so that none waits for who still reads.
__device__ inline float sum_over_block(float x, int turn) {
    __shared__ float sums[2][WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) x += sums[turn][w];
    return x;
}

// normed (C,) = the layernorm of row n of N of residual.out, of COUNT parts of PIECES each, by all threads of a block;
// write: that row, too. Waits for what other kernels write after it has requested what they do not.
template <int COUNT, int PIECES = 1>
__device__ inline void normalize(element* normed, const Residual& residual, const element* weight, const element* bias,
                                 int n, int N, bool write) {
    constexpr int EACH = (C + 4 * THREADS - 1) / (4 * THREADS);
    float4 x[EACH], scale[EACH], shift[EACH];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int p = 0; p < EACH; p++) {
        const int c = 4 * (p * THREADS + threadIdx.x);
        if (c < C) x[p] = load4(residual.branch_bias + c), scale[p] = load4(weight + c), shift[p] = load4(bias + c);
    }
    wait_for_inputs();
#pragma unroll
    for (int p = 0; p < EACH; p++) {
        const int c = 4 * (p * THREADS + threadIdx.x);
        if (c >= C) continue;
        const int64 at = int64(n) * C + c;
        float4 parts[COUNT][PIECES];
#pragma unroll
        for (int i = 0; i < COUNT * PIECES; i++) {
            parts[i / PIECES][i % PIECES] = load4(residual.branches + i * int64(N) * C + at);
        }
        x[p] = x[p] + load4(residual.inp + at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
#pragma unroll
            for (int piece = 1; piece < PIECES; piece++) parts[i][0] = parts[i][0] + parts[i][piece];
            x[p] = x[p] + parts[i][0];
        }
        if (write) store4(residual.out + at, x[p]);
        sum += x[p].x + x[p].y + (x[p].z + x[p].w);
    }
    const float mean = sum_over_block(sum, 0) / C;
#pragma unroll
    for (int p = 0; p < EACH; p++) {
        if (4 * (p * THREADS + threadIdx.x) >= C) continue;
        x[p] = {x[p].x - mean, x[p].y - mean, x[p].z - mean, x[p].w - mean};
        squares += x[p].x * x[p].x + x[p].y * x[p].y + (x[p].z * x[p].z + x[p].w * x[p].w);
    }
    const float rstd = 1.0f / sqrtf(sum_over_block(squares, 1) / C + 1e-5f);
#pragma unroll
    for (int p = 0; p < EACH; p++) {
        const int c = 4 * (p * THREADS + threadIdx.x);
        const float4 a = scale[p], b = shift[p];
        if (c < C) {
            store4(normed + c, {x[p].x * rstd * a.x + b.x, x[p].y * rstd * a.y + b.y, x[p].z * rstd * a.z + b.z,
                                x[p].w * rstd * a.w + b.w});
        }
    }
}
