// Softmax and cross entropy in one kernel: the loss of each row, and the logits overwritten with their gradient.
//
//     losses[n] = log(sum over v of exp(logits[n,v])) - logits[n,targets[n]]                           losses =
//     logits[n,v] = (softmax(logits[n])[v] - (v is the target)) * dloss, 0 for v >= V                  logits = (if write_gradient)
//
// logits (N,Vp), of which columns V..Vp-1 belong to the padding of wte; losses (N) float32; targets (N) int32.
//
// Bound by bytes: a row is read from memory once and written once. On Hopper, where shared memory has room for a row, or for two of 50304
// bfloat16 logits, rows come and go by TMA, part by part: a block for each row that has room stays on a multiprocessor, and where a part
// of the gradient has left, the same part of the block's next row comes in. In bfloat16, exp(x - the largest so far) stands in the row
// between the sum and the gradient, so that there is one exp for each element, and not two: at the GPU's power limit, they took two thirds
// of the time that memory took. Else, the second reading finds the row in the L2 cache, and starts at the end, which was read last.
//
// H200 (a copy: 4250 GB/s), counting one reading and one writing, bfloat16, B=64: with the second reading from the cache 1600 GB/s, whole
// rows by TMA and a block a row 3120; parts, with a warp of its own to see to them, 3520; parts, thread 0 sees to them, 3770 by itself, and
// 3190 in a step, at the GPU's power limit; with one exp for each element 3850 by itself, and 3590 in a step.

#include "softmax.cuh"

// As in rows_on_chip and classifier_threads of train_gpt2_cuda.py.
#define ROW_BYTES (MODEL_VP * (BFLOAT16 ? 2 : 4))
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && ROW_BYTES <= 220 << 10  // sm_90a
#define ON_CHIP 1
#include "hopper.cuh"
constexpr int BLOCKS = ROW_BYTES <= 110 << 10 ? 2 : 1;  // that a multiprocessor has room for
constexpr int THREADS = 1024 / BLOCKS;
#else
#define ON_CHIP 0
constexpr int THREADS = BFLOAT16 ? 256 : 1024;
#endif

constexpr int BATCH = ON_CHIP ? 2 : 1;  // loads of a thread underway at once
constexpr int STEP = BATCH * THREADS * PACK, STEPS = (Vp + STEP - 1) / STEP;

__device__ inline Softmax block_merge(Softmax s) {
    __shared__ Softmax parts[THREADS / 32];
    s = warp_merge(s);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = s;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_merge(lane < THREADS / 32 ? parts[lane] : Softmax{-INFINITE, 0.0f});
}

// weight(x, offset(largest, scale), scale) = exp(x - largest) * scale; in bfloat16 as one multiply-add and one power of 2. The
// compiler does not see that the offset is the same for a whole row.
#if BFLOAT16
__device__ inline float offset(float largest, float scale) { return largest * LOG2E - log2f(scale); }
__device__ inline float weight(float x, float offset, float scale) { return power_of_2(x * LOG2E - offset); }
#else
__device__ inline float offset(float largest, float scale) { return largest; }
__device__ inline float weight(float x, float offset, float scale) { return expf(x - offset) * scale; }
#endif

// In bfloat16, a row on chip keeps exp(x - the largest so far) between the sum and the gradient, as halves and 2^15 times as large. What is
// 2^-29 of the largest still has its 11 bits, 3 more than the gradient.
constexpr bool KEEPS = ON_CHIP && BFLOAT16;
constexpr float RAISE = KEEPS ? 32768.0f : 1.0f;
#if BFLOAT16
__device__ inline void keep(element* to, const Floats& x) {
    *reinterpret_cast<uint4*>(to) = {as_halves(x.x[0], x.x[1]), as_halves(x.x[2], x.x[3]),  //
                                     as_halves(x.x[4], x.x[5]), as_halves(x.x[6], x.x[7])};
}
__device__ inline Floats load_kept(const element* from) { return load(reinterpret_cast<const __half*>(from)); }
#else
__device__ inline void keep(element* to, const Floats& x) {}
__device__ inline Floats load_kept(const element* from) { return Floats(); }
#endif

// Where a thread's i-th PACK elements of part s begin.
__device__ inline int begin_of(int s, int i) { return s * STEP + (i * THREADS + int(threadIdx.x)) * PACK; }

// Whether all of part s comes before `end`, which the compiler knows, or this pack's first element, v, does.
__device__ inline bool is_before(int end, int s, int v) { return (s + 1) * STEP <= end || v < end; }

// Elements [v, v + PACK) of part s, -infinity from V on.
__device__ inline Floats load_logits(const element* row, int s, int v) {
    Floats x;
    if (is_before(V, s, v)) x = load(row + v);
    if (!is_before(V - PACK + 1, s, v)) {
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            if (v + k >= V) x.x[k] = -INFINITE;
        }
    }
    return x;
}

// `part`, and part s of the row. With `again`, there will be a gradient, and what it takes stands in the row from then on.
__device__ inline Softmax add_part(Softmax part, element* row, int s, bool again) {
    Floats x[BATCH];
    float largest = part.largest;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        x[i] = load_logits(row, s, begin_of(s, i));
#pragma unroll
        for (int k = 0; k < PACK; k++) largest = fmaxf(largest, x[i].x[k]);
    }
    const float finite = largest == -INFINITE ? 0.0f : largest;  // nothing yet but padding: -inf - -inf would be NaN
    const float from = offset(finite, RAISE);
    float sum = part.sum * expf(part.largest - finite);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            x[i].x[k] = weight(x[i].x[k], from, RAISE);
            sum += x[i].x[k];
        }
        if (KEEPS && again && is_before(Vp, s, begin_of(s, i))) keep(row + begin_of(s, i), x[i]);
    }
    return {largest, sum};
}

// The gradient in place of part s of the row; scale: dloss / the row's sum, from: the offset for that, of the row's largest; before: the
// largest so far when this thread added up part s.
__device__ inline void turn_part(element* row, int s, float from, float scale, float before, int target, float dloss) {
    Floats x[BATCH];
    const float factor = weight(before, from, scale);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (KEEPS && is_before(Vp, s, begin_of(s, i))) x[i] = load_kept(row + begin_of(s, i));
        if (!KEEPS) x[i] = load_logits(row, s, begin_of(s, i));
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int v = begin_of(s, i);
        if (!is_before(Vp, s, v)) continue;
#pragma unroll
        for (int k = 0; k < PACK; k++) x[i].x[k] = KEEPS ? x[i].x[k] * factor : weight(x[i].x[k], from, scale);
        if (target / STEP == s && v <= target && target < v + PACK) {
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                if (v + k == target) x[i].x[k] -= dloss;
            }
        }
        store(row + v, x[i]);
    }
}

#if ON_CHIP

constexpr int LAG = 2;  // parts of a gradient that may be on their way out before the next row's part is asked for

// Block (THREADS); grid (BLOCKS for each multiprocessor). Shared memory: one row.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
classifier(float* losses, element* logits, const int* targets, float dloss, int write_gradient, int N) {
    extern __shared__ uint4 shared[];
    __shared__ Barrier here[STEPS];  // each part of the row
    element* const row = reinterpret_cast<element*>(shared);
    const auto part_bytes = [](int s) { return min(STEP, Vp - s * STEP) * int(sizeof(element)); };
    const auto fetch = [&](int n, int s) {  // by thread 0
        if (n >= N) return;
        barrier_expect(&here[s], part_bytes(s));
        load_bytes(row + s * STEP, logits + int64(n) * Vp + s * STEP, &here[s], part_bytes(s));
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STEPS; s++) barrier_make(&here[s], 1);
        fence_barriers();
        for (int s = 0; s < STEPS; s++) fetch(blockIdx.x, s);
    }
    __syncthreads();

    for (int n = blockIdx.x, parity = 0; n < N; n += gridDim.x, parity ^= 1) {
        const int target = targets[n], next = n + gridDim.x;
        Softmax part = {-INFINITE, 0.0f};
        float before[STEPS], target_logit = 0.0f;
#pragma unroll 1
        for (int s = 0; s < STEPS; s++) {
            barrier_wait(&here[s], parity);
            // From memory, for on chip its exp may stand there already. By now, all of the row has passed through the L2 cache.
            if (s == STEPS - 1 && threadIdx.x == 0) target_logit = to_float(logits[int64(n) * Vp + target]);
            part = add_part(part, row, s, write_gradient);
            if (!write_gradient) {
                __syncthreads();  // all have read it
                if (threadIdx.x == 0) fetch(next, s);
            }
#pragma unroll
            for (int k = 0; k < STEPS; k++) {  // before[s], but in registers
                if (k == s) before[k] = part.largest;
            }
        }
        const Softmax whole = block_merge(part);
        if (threadIdx.x == 0) losses[n] = logf(whole.sum / RAISE) + (whole.largest - target_logit);
        if (write_gradient) {
            const float scale = dloss / whole.sum, from = offset(whole.largest, scale);
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                turn_part(row, s, from, scale, before[s], target, dloss);
                fence_for_async();
                __syncthreads();
                if (threadIdx.x == 0) {
                    store_bytes(logits + int64(n) * Vp + s * STEP, row + s * STEP, part_bytes(s));
                    stores_wait<LAG>();
                    if (s >= LAG) fetch(next, s - LAG);
                }
            }
            if (threadIdx.x == 0) {
                stores_wait<0>();
                for (int s = max(0, STEPS - LAG); s < STEPS; s++) fetch(next, s);
            }
        }
    }
}

#else

// Block (THREADS); grid (N).
extern "C" __global__ void __launch_bounds__(THREADS)
classifier(float* losses, element* logits, const int* targets, float dloss, int write_gradient, int N) {
    const int n = blockIdx.x, target = targets[n];
    element* const row = logits + int64(n) * Vp;
    Softmax part = {-INFINITE, 0.0f};
    for (int s = 0; s < STEPS; s++) part = add_part(part, row, s, false);
    const float target_logit = to_float(row[target]);  // every thread reads it before the barrier in block_merge,
    const Softmax whole = block_merge(part);           // no thread writes to the row before it has passed that barrier
    if (threadIdx.x == 0) losses[n] = logf(whole.sum) + (whole.largest - target_logit);
    if (!write_gradient) return;
    const float scale = dloss / whole.sum, from = offset(whole.largest, scale);
    for (int s = STEPS - 1; s >= 0; s--) turn_part(row, s, from, scale, 0.0f, target, dloss);
}

#endif
