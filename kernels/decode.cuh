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

// 4 neighbouring values.
__device__ inline float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ inline void store4(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
// The same of elements, left as bits: what converts them waits for their arrival.
#if BFLOAT16
typedef uint2 Bits4;
__device__ inline float4 to_floats(Bits4 bits) {
    const float2 low = as_floats(bits.x), high = as_floats(bits.y);
    return {low.x, low.y, high.x, high.y};
}
__device__ inline void store4(__nv_bfloat16* at, float4 x) {
    *reinterpret_cast<uint2*>(at) = {as_pair(x.x, x.y), as_pair(x.z, x.w)};
}
#else
typedef float4 Bits4;
__device__ inline float4 to_floats(Bits4 bits) { return bits; }
#endif
__device__ inline Bits4 load_bits4(const element* at) { return *reinterpret_cast<const Bits4*>(at); }
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

constexpr int VECTOR_EACH = (C + 4 * THREADS - 1) / (4 * THREADS);  // times 4 channels of a row, of a thread
__device__ inline int channel_of(int p) { return 4 * (p * THREADS + threadIdx.x); }

// What a thread has of the vectors of a layernorm, and of the sum before it: weights, which do not queue behind the
// matmul's if they are requested before those.
struct Vectors {
    Bits4 branch_bias[VECTOR_EACH], weight[VECTOR_EACH], bias[VECTOR_EACH];

    __device__ Vectors(const element* branch_bias_, const element* weight_, const element* bias_) {
#pragma unroll
        for (int p = 0; p < VECTOR_EACH; p++) {
            const int c = channel_of(p);
            if (c >= C) continue;
            branch_bias[p] = load_bits4(branch_bias_ + c);
            weight[p] = load_bits4(weight_ + c), bias[p] = load_bits4(bias_ + c);
        }
    }
};

// out (N,C) = inp (N,C) + branch_bias (C,), which is in Vectors, + the parts of branches (.,N,C), or their pieces; out
// is another buffer than inp.
struct Residual {
    float* out;
    const float *inp, *branches;
};

// normed (C,) = the layernorm of row n of N of residual.out, of COUNT parts of PIECES each, by all threads of a block,
// after wait_for_inputs(); write: that row, too.
template <int COUNT, int PIECES = 1>
__device__ inline void normalize(element* normed, const Residual& residual, const Vectors& vectors, int n, int N,
                                 bool write) {
    float4 x[VECTOR_EACH];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int p = 0; p < VECTOR_EACH; p++) {
        if (channel_of(p) >= C) continue;
        const int64 at = int64(n) * C + channel_of(p);
        float4 parts[COUNT][PIECES];
#pragma unroll
        for (int i = 0; i < COUNT * PIECES; i++) {
            parts[i / PIECES][i % PIECES] = load4(residual.branches + i * int64(N) * C + at);
        }
        x[p] = to_floats(vectors.branch_bias[p]) + load4(residual.inp + at);
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
    for (int p = 0; p < VECTOR_EACH; p++) {
        if (channel_of(p) >= C) continue;
        x[p] = {x[p].x - mean, x[p].y - mean, x[p].z - mean, x[p].w - mean};
        squares += x[p].x * x[p].x + x[p].y * x[p].y + (x[p].z * x[p].z + x[p].w * x[p].w);
    }
    const float rstd = 1.0f / sqrtf(sum_over_block(squares, 1) / C + 1e-5f);
#pragma unroll
    for (int p = 0; p < VECTOR_EACH; p++) {
        if (channel_of(p) >= C) continue;
        const float4 a = to_floats(vectors.weight[p]), b = to_floats(vectors.bias[p]);
        store4(normed + channel_of(p), {x[p].x * rstd * a.x + b.x, x[p].y * rstd * a.y + b.y,
                                        x[p].z * rstd * a.z + b.z, x[p].w * rstd * a.w + b.w});
    }
}
