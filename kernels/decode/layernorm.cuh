// The layernorm (or RMSNorm) before a matmul, and the sum before it. For a few rows, each block of
// the matmul does both for itself, which takes less time than a kernel of its own; either way has
// the same bits.

#pragma once

#include "decode/step.cuh"

// The sum over the block, for all its threads. turn: 0 and 1, alternately, so that none waits for
// who still reads.
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

constexpr int PACKS = (C / PACK + THREADS - 1) / THREADS;  // of a row, for a thread
__device__ inline int channel_of(int p) { return PACK * (p * THREADS + threadIdx.x); }

// A thread's part of the vectors of a layernorm, and of the sum before it: weights, which do not
// queue behind the matmul's if they are requested before those. They stay bits: what converts them
// waits for them.
struct Vectors {
    uint4 branch_bias[PACKS], weight[PACKS], bias[PACKS];

    __device__ Vectors(const element* branch_bias_, const element* weight_, const element* bias_) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int c = channel_of(p);
            if (c >= C) continue;
            if (BIASES) branch_bias[p] = load_bits(branch_bias_ + c);
            weight[p] = load_bits(weight_ + c);
            if (!RMS) bias[p] = load_bits(bias_ + c);
        }
    }
};

// out (N,C) = inp (N,C) + branch_bias (C,), of Vectors, + the parts of branches (.,N,C); out is not
// inp's buffer.
struct Residual {
    float* out;
    const float *inp, *branches;
};

// normed (C,) = the layernorm of row n of N of residual.out, a sum of COUNT parts, by all threads
// of a block, after wait_for_inputs(). write: whether that row of residual.out is stored, too.
template <int COUNT>
__device__ inline void normalize(element* normed, const Residual& residual, const Vectors& vectors,
                                 int n, int N, bool write) {
    Floats x[PACKS];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (channel_of(p) >= C) continue;
        const int64 at = int64(n) * C + channel_of(p);
        Floats parts[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) parts[i] = load(residual.branches + i * int64(N) * C + at);
        x[p] = load(residual.inp + at);
        const Floats branch_bias = BIASES ? unpack(vectors.branch_bias[p]) : Floats{};
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            x[p].x[k] += branch_bias.x[k];
#pragma unroll
            for (int i = 0; i < COUNT; i++) x[p].x[k] += parts[i].x[k];
            sum += x[p].x[k];
        }
        if (write) store(residual.out + at, x[p]);
    }
    const float mean = RMS ? 0.0f : sum_over_block(sum, 0) / C;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
#pragma unroll
        for (int k = 0; k < PACK && channel_of(p) < C; k++) {
            x[p].x[k] -= mean;
            squares += x[p].x[k] * x[p].x[k];
        }
    }
    const float rstd = 1.0f
        / sqrtf(sum_over_block(squares, RMS ? n % 2 : 1) / C + float(DECODE_EPS));
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (channel_of(p) >= C) continue;
        const Floats weight = unpack(vectors.weight[p]),
            bias = RMS ? Floats{} : unpack(vectors.bias[p]);
#pragma unroll
        for (int k = 0; k < PACK; k++) x[p].x[k] = x[p].x[k] * rstd * weight.x[k] + bias.x[k];
        store(normed + channel_of(p), x[p]);
    }
}
