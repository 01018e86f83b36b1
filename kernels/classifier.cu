// Softmax and cross entropy in one kernel: the loss of each row, and the logits overwritten with their gradient.
//
//     losses[n] = log(sum over v of exp(logits[n,v])) - logits[n,targets[n]]                           losses =
//     logits[n,v] = (softmax(logits[n])[v] - (v is the target)) * dloss, 0 for v >= V                  logits = (if write_gradient)
//
// logits (N,Vp), of which columns V..Vp-1 belong to the padding of wte; losses (N) float32; targets (N) int32.
//
// Bound by bytes: a row is read from memory once and written once. The second reading finds it in the L2 cache, where all
// rows at hand have room (132 blocks of 201 KB = 27 MB in float32), and starts at the end, which was read last. H200 (a copy:
// 4250 GB/s): 3010 GB/s, counting one reading and one writing; four loads underway at once instead of one changed nothing.

#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int BATCH = 4;  // loads of a thread underway at once

// The largest value so far, and the sum of exp(value - largest).
struct Softmax {
    float largest, sum;
};

__device__ inline Softmax merge(Softmax a, Softmax b) {
    const float largest = fmaxf(a.largest, b.largest);
    if (largest == -INFINITE) return {largest, 0.0f};  // nothing yet: -inf - -inf would be NaN
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

__device__ inline Softmax warp_merge(Softmax s) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Softmax other = {__shfl_xor_sync(0xffffffff, s.largest, distance), __shfl_xor_sync(0xffffffff, s.sum, distance)};
        s = merge(s, other);
    }
    return s;
}

__device__ inline Softmax block_merge(Softmax s) {
    __shared__ Softmax parts[THREADS / 32];
    s = warp_merge(s);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = s;
    __syncthreads();
    return warp_merge(parts[threadIdx.x % 32]);
}

// Block (1024); grid (N).
extern "C" __global__ void __launch_bounds__(THREADS)
classifier(float* losses, element* logits, const int* targets, float dloss, int write_gradient) {
    element* row = logits + int64(blockIdx.x) * Vp;
    const int target = targets[blockIdx.x];
    const float target_logit = to_float(row[target]);  // every thread reads it before the barrier in block_merge,
                                                       // no thread writes to the row before it has passed that barrier
    Softmax part = {-INFINITE, 0.0f};
    for (int start = 0; start < V; start += BATCH * THREADS * PACK) {
        Floats x[BATCH];
        float largest = part.largest;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int v = start + (i * THREADS + int(threadIdx.x)) * PACK;
            if (v < V) x[i] = load(row + v);
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                if (v + k >= V) x[i].x[k] = -INFINITE;
                largest = fmaxf(largest, x[i].x[k]);
            }
        }
        if (largest == -INFINITE) continue;  // nothing yet
        float sum = part.sum * expf(part.largest - largest);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int k = 0; k < PACK; k++) sum += expf(x[i].x[k] - largest);
        }
        part = {largest, sum};
    }
    const Softmax whole = block_merge(part);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(whole.sum) + (whole.largest - target_logit);
    if (!write_gradient) return;

    const float scale = dloss / whole.sum;
    constexpr int STEP = BATCH * THREADS * PACK;
    for (int start = (Vp - 1) / STEP * STEP; start >= 0; start -= STEP) {
        Floats x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int v = start + (i * THREADS + int(threadIdx.x)) * PACK;
            if (v < Vp) x[i] = load(row + v);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int v = start + (i * THREADS + int(threadIdx.x)) * PACK;
            if (v >= Vp) continue;
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                const float p = v + k < V ? scale * expf(x[i].x[k] - whole.largest) : 0.0f;
                x[i].x[k] = v + k == target ? p - dloss : p;
            }
            store(row + v, x[i]);
        }
    }
}
