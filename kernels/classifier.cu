// Softmax and cross entropy in one kernel: the loss of each row, and the logits overwritten with their gradient.
//
//     losses[n] = log(sum over v of exp(logits[n,v])) - logits[n,targets[n]]                           losses =
//     logits[n,v] = (softmax(logits[n])[v] - (v is the target)) * dloss, 0 for v >= V                  logits = (if write_gradient)
//
// logits (N,Vp), of which columns V..Vp-1 belong to the padding of wte; losses (N) float32; targets (N) int32.
//
// Bound by bytes: a row is read from memory once and written once. On Hopper, where shared memory has room for two rows of 50304
// bfloat16 logits, a row comes and goes by TMA: a block works on its row there while the other block's row is on its way.
// Else, the second reading finds the row in the L2 cache, where all rows at hand have room (132 blocks of 201 KB = 27 MB in
// float32), and starts at the end, which was read last. H200 (a copy: 4250 GB/s), float32: 3010 GB/s, counting one reading and
// one writing; four loads underway at once instead of one changed nothing.

#include "common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
#include "hopper.cuh"
constexpr bool ON_CHIP = Vp * sizeof(element) <= 110 << 10;
#else
constexpr bool ON_CHIP = false;
#endif

constexpr int THREADS = ON_CHIP ? 512 : 1024;
constexpr int BATCH = 4;  // loads of a thread underway at once
constexpr int STEP = BATCH * THREADS * PACK, STEPS = (Vp + STEP - 1) / STEP;

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
    const int lane = threadIdx.x % 32;
    return warp_merge(lane < THREADS / 32 ? parts[lane] : Softmax{-INFINITE, 0.0f});
}

// exp(x - largest) * scale; in bfloat16 as one multiply-add and one power of 2.
__device__ inline float weight(float x, float largest, float scale) {
#if BFLOAT16
    return power_of_2(x * LOG2E - (largest * LOG2E - log2f(scale)));
#else
    return expf(x - largest) * scale;
#endif
}

// Elements [v, v + PACK) of a row, -infinity from V on.
__device__ inline Floats load_logits(const element* row, int v) {
    Floats x;
    if (v < V) x = load(row + v);
    if (v + PACK > V) {
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            if (v + k >= V) x.x[k] = -INFINITE;
        }
    }
    return x;
}

// Block (THREADS); grid (N). Shared memory: one row, if ON_CHIP.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
classifier(float* losses, element* logits, const int* targets, float dloss, int write_gradient) {
    element* const global = logits + int64(blockIdx.x) * Vp;
    element* row = global;
    const int target = targets[blockIdx.x];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 shared[];
    __shared__ Barrier here[STEPS];  // each step's part of the row
    if (ON_CHIP) {
        row = reinterpret_cast<element*>(shared);
        if (threadIdx.x == 0) {
            for (int s = 0; s < STEPS; s++) barrier_make(&here[s], 1);
            fence_barriers();
            for (int s = 0; s < STEPS; s++) {
                const int bytes = min(STEP, Vp - s * STEP) * sizeof(element);
                barrier_expect(&here[s], bytes);
                load_bytes(row + s * STEP, global + s * STEP, &here[s], bytes);
            }
        }
        __syncthreads();
    }
#endif
    Softmax part = {-INFINITE, 0.0f};
    for (int s = 0; s < STEPS; s++) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if (ON_CHIP) barrier_wait(&here[s], 0);
#endif
        Floats x[BATCH];
        float largest = part.largest;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            x[i] = load_logits(row, s * STEP + (i * THREADS + int(threadIdx.x)) * PACK);
#pragma unroll
            for (int k = 0; k < PACK; k++) largest = fmaxf(largest, x[i].x[k]);
        }
        if (largest == -INFINITE) continue;  // nothing yet
        float sum = part.sum * expf(part.largest - largest);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int k = 0; k < PACK; k++) sum += weight(x[i].x[k], largest, 1.0f);
        }
        part = {largest, sum};
    }
    const float target_logit = to_float(row[target]);  // every thread reads it before the barrier in block_merge,
    const Softmax whole = block_merge(part);           // no thread writes to the row before it has passed that barrier
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(whole.sum) + (whole.largest - target_logit);
    if (!write_gradient) return;

    const float scale = dloss / whole.sum;
    for (int s = STEPS - 1; s >= 0; s--) {
        Floats x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) x[i] = load_logits(row, s * STEP + (i * THREADS + int(threadIdx.x)) * PACK);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int v = s * STEP + (i * THREADS + int(threadIdx.x)) * PACK;
            if (v >= Vp) continue;
#pragma unroll
            for (int k = 0; k < PACK; k++) x[i].x[k] = weight(x[i].x[k], whole.largest, scale);
            if (v <= target && target < v + PACK) {
#pragma unroll
                for (int k = 0; k < PACK; k++) {
                    if (v + k == target) x[i].x[k] -= dloss;
                }
            }
            store(row + v, x[i]);
        }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if (ON_CHIP) {
            fence_for_async();
            __syncthreads();
            if (threadIdx.x == 0) store_bytes(global + s * STEP, row + s * STEP, min(STEP, Vp - s * STEP) * sizeof(element));
        }
#endif
    }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (ON_CHIP && threadIdx.x == 0) stores_wait();
#endif
}
