// Softmax and cross entropy in one kernel: the loss of each row, and the logits overwritten with their gradient.
//
//     losses[n] = log(sum over v of exp(logits[n,v])) - logits[n,targets[n]]                           losses =
//     logits[n,v] = (softmax(logits[n])[v] - (v is the target)) * dloss, 0 for v >= V                  logits = (if write_gradient)
//
// logits (N,Vp), of which columns V..Vp-1 belong to the padding of wte; losses (N) float32; targets (N) int32.
//
// Bound by bytes: a row is read from memory once and written once. On Hopper, where shared memory has room for a row, or for two of 50304
// bfloat16 logits, rows come and go by TMA, in parts, of which each warp sees to its own slice: a block for each row that has room stays on
// a multiprocessor, and where a slice of the gradient has left, the same slice of the block's next row comes in. In bfloat16,
// exp(x - the largest so far) stands in the row between the sum and the gradient, so that there is one exp for each element, and not two:
// at the GPU's power limit, they took two thirds of the time that memory took. Else, the second reading finds the row in the L2 cache, and
// starts at the end, which was read last.
//
// H200 (a copy: 4250 GB/s), counting one reading and one writing, bfloat16, B=64: with the second reading from the cache 1600 GB/s, whole
// rows by TMA and a block a row 3120; parts, with a warp of its own to see to them, 3520; parts, thread 0 sees to them, 3770 by itself, and
// 3190 in a step, at the GPU's power limit; with one exp for each element 3850 by itself, and 3590 to 3640 in a step; each warp sees to its
// slice, and instructions are fewer (no barrier but for the row's sum; no loop over parts; the largest in pairs of bfloat16; sums of pairs
// instead of a chain), 3820 to 3840 in a step, and the version before 3700. float32, B=16, in a step: 3960.

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
constexpr int WARPS = THREADS / 32, SLICE = BATCH * 32 * PACK;  // elements of each part of a row that a warp sees to
constexpr int STEP = WARPS * SLICE, STEPS = (Vp + STEP - 1) / STEP;

// `turn` is 0 and 1 in turns, because a slower warp may still read what it needs of the row before.
__device__ inline Softmax block_merge(Softmax s, int turn) {
    __shared__ Softmax parts[2][WARPS];
    s = warp_merge(s);
    if (threadIdx.x % 32 == 0) parts[turn][threadIdx.x / 32] = s;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_merge(lane < WARPS ? parts[turn][lane] : Softmax{-INFINITE, 0.0f});
}

// weight(x, offset(largest, log2(scale)), scale) = exp(x - largest) * scale; in bfloat16 as one multiply-add and one power of 2. The
// compiler does not see that the offset is the same for a whole row.
#if BFLOAT16
__device__ inline float offset(float largest, float log2_scale) { return largest * LOG2E - log2_scale; }
__device__ inline float weight(float x, float offset, float scale) { return power_of_2(x * LOG2E - offset); }
#else
__device__ inline float offset(float largest, float log2_scale) { return largest; }
__device__ inline float weight(float x, float offset, float scale) { return expf(x - offset) * scale; }
#endif

// In bfloat16, a row on chip keeps exp(x - the largest so far) between the sum and the gradient, as halves and 2^15 times as large. What is
// 2^-29 of the largest still has its 11 bits, 3 more than the gradient.
constexpr bool KEEPS = ON_CHIP && BFLOAT16;
constexpr float LOG2_RAISE = KEEPS ? 15.0f : 0.0f, RAISE = KEEPS ? 32768.0f : 1.0f;
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

// Where a thread's i-th PACK elements of part s begin, in its warp's slice.
__device__ inline int begin_of(int s, int i) { return s * STEP + int(threadIdx.x / 32) * SLICE + (i * 32 + int(threadIdx.x % 32)) * PACK; }

// Whether all of part s comes before `end`, which the compiler knows, or this pack's first element, v, does.
__device__ inline bool is_before(int end, int s, int v) { return (s + 1) * STEP <= end || v < end; }

// Whether the pack at v has the target.
__device__ inline bool has(int v, int target) { return uint32(target - v) < PACK; }

// Elements [v, v + PACK) of part s, -infinity from V on.
__device__ inline uint4 load_logits(const element* row, int s, int v) {
    uint4 bits = {};
    if (is_before(V, s, v)) bits = load_bits(row + v);
    if (!is_before(V - PACK + 1, s, v)) {
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            if (v + k >= V) from_float(reinterpret_cast<element*>(&bits)[k], -INFINITE);
        }
    }
    return bits;
}

// The largest of BATCH packs, and the sum of one: few steps that wait for the one before.
__device__ inline float largest_of(const uint4 (&packs)[BATCH]) {
#if BFLOAT16
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(packs);
    __nv_bfloat162 largest = pairs[0];
#pragma unroll
    for (int k = 1; k < BATCH * PACK / 2; k++) largest = __hmax2(largest, pairs[k]);
    return fmaxf(__low2float(largest), __high2float(largest));
#else
    const auto* x = reinterpret_cast<const float*>(packs);
    float largest = x[0];
#pragma unroll
    for (int k = 1; k < BATCH * PACK; k++) largest = fmaxf(largest, x[k]);
    return largest;
#endif
}
__device__ inline float sum_of(Floats x) {
#pragma unroll
    for (int half = PACK / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; k++) x.x[k] += x.x[k + half];
    }
    return x.x[0];
}

// `part`, and part s of the row; target_logit in the thread that has the target. With `again`, there will be a gradient, and what it
// takes stands in the row from then on.
__device__ inline Softmax add_part(Softmax part, element* row, int s, int target, float& target_logit, bool again) {
    uint4 packs[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        packs[i] = load_logits(row, s, begin_of(s, i));
        if (has(begin_of(s, i), target)) target_logit = to_float(row[target]);
    }
    const float largest = fmaxf(part.largest, largest_of(packs));
    const float finite = largest == -INFINITE ? 0.0f : largest;  // nothing yet but padding: -inf - -inf would be NaN
    const float from = offset(finite, LOG2_RAISE);
    float sum = part.sum * weight(part.largest - finite, 0.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        Floats x = unpack(packs[i]);
#pragma unroll
        for (int k = 0; k < PACK; k++) x.x[k] = weight(x.x[k], from, RAISE);
        sum += sum_of(x);
        if (KEEPS && again && is_before(Vp, s, begin_of(s, i))) keep(row + begin_of(s, i), x);
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
        if (!KEEPS) x[i] = unpack(load_logits(row, s, begin_of(s, i)));
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int v = begin_of(s, i);
        if (!is_before(Vp, s, v)) continue;
#pragma unroll
        for (int k = 0; k < PACK; k++) x[i].x[k] = KEEPS ? x[i].x[k] * factor : weight(x[i].x[k], from, scale);
        if (has(v, target)) {
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                if (v + k == target) x[i].x[k] -= dloss;
            }
        }
        store(row + v, x[i]);
    }
}

__device__ inline float loss_of(Softmax whole, float target_logit) { return logf(whole.sum / RAISE) + (whole.largest - target_logit); }

// Whether this thread has the target.
__device__ inline bool is_owner(int target) { return target % STEP / (32 * PACK) / BATCH * 32 + target / PACK % 32 == int(threadIdx.x); }

#if ON_CHIP

constexpr int LAG = 2;  // slices of a gradient that may be on their way out before the next row's slice is asked for

// Block (THREADS); grid (BLOCKS for each multiprocessor). Shared memory: one row. But for the row's sum, no warp waits for another.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
classifier(float* losses, element* logits, const int* targets, float dloss, int write_gradient, int N) {
    extern __shared__ uint4 shared[];
    __shared__ Barrier barriers[WARPS][STEPS];
    element* const row = reinterpret_cast<element*>(shared);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // so, the compiler sees that it is one for all lanes
    const bool leads = threadIdx.x % 32 == 0;
    Barrier* const here = barriers[warp];        // this warp's slice of each part
    element* const slices = row + warp * SLICE;  // the one of part s stands s * STEP further on, here and in memory,
    const auto bytes_of = [&](int s) {           // and has so many bytes, if any
        return ((s + 1) * STEP <= Vp ? SLICE : min(SLICE, Vp - s * STEP - warp * SLICE)) * int(sizeof(element));
    };
    const auto fetch = [&](const element* from, int s) {  // by the thread that leads; from: the slice of a row's first part
        if (bytes_of(s) <= 0) return;
        barrier_expect(&here[s], bytes_of(s));
        load_bytes(slices + s * STEP, from + s * STEP, &here[s], bytes_of(s));
    };
    if (leads) {
        for (int s = 0; s < STEPS; s++) barrier_make(&here[s], 1);
        fence_barriers();
        for (int s = 0; s < STEPS; s++) fetch(logits + int64(blockIdx.x) * Vp + warp * SLICE, s);
    }
    __syncwarp();

    int target = targets[blockIdx.x];
    for (int n = blockIdx.x, parity = 0; n < N; n += gridDim.x, parity ^= 1) {
        const int next = n + gridDim.x, next_target = next < N ? targets[next] : 0;
        element* const home = logits + int64(n) * Vp + warp * SLICE;
        const element* const next_home = home + int64(gridDim.x) * Vp;
        Softmax part = {-INFINITE, 0.0f};
        float before[STEPS], target_logit = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (bytes_of(s) > 0) barrier_wait(&here[s], parity);
            part = add_part(part, row, s, target, target_logit, write_gradient);
            before[s] = part.largest;
            if (!write_gradient) {
                fence_for_async();
                __syncwarp();  // all have read it
                if (leads && next < N) fetch(next_home, s);
            }
        }
        const Softmax whole = block_merge(part, parity);
        if (is_owner(target)) losses[n] = loss_of(whole, target_logit);
        if (write_gradient) {
            const float scale = dloss / whole.sum, from = offset(whole.largest, log2f(scale));
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                turn_part(row, s, from, scale, before[s], target, dloss);
                fence_for_async();
                __syncwarp();
                if (leads) {
                    if (bytes_of(s) > 0) {
                        store_bytes(home + s * STEP, slices + s * STEP, bytes_of(s));
                    } else {
                        stores_commit();  // nothing, but stores_wait counts it: all warps have as many copies underway
                    }
                    stores_wait<LAG>();
                    if (s >= LAG && next < N) fetch(next_home, s - LAG);
                }
            }
            if (leads) {
                stores_wait<0>();
                for (int s = max(0, STEPS - LAG); s < STEPS; s++) {
                    if (next < N) fetch(next_home, s);
                }
            }
        }
        target = next_target;
    }
}

#else

// Block (THREADS); grid (N).
extern "C" __global__ void __launch_bounds__(THREADS)
classifier(float* losses, element* logits, const int* targets, float dloss, int write_gradient, int N) {
    const int n = blockIdx.x, target = targets[n];
    element* const row = logits + int64(n) * Vp;
    Softmax part = {-INFINITE, 0.0f};
    float target_logit = 0.0f;
    for (int s = 0; s < STEPS; s++) part = add_part(part, row, s, target, target_logit, false);
    const Softmax whole = block_merge(part, 0);  // no thread writes to the row before it has passed the barrier in there
    if (is_owner(target)) losses[n] = loss_of(whole, target_logit);
    if (!write_gradient) return;
    const float scale = dloss / whole.sum, from = offset(whole.largest, log2f(scale));
    for (int s = STEPS - 1; s >= 0; s--) turn_part(row, s, from, scale, 0.0f, target, dloss);
}

#endif
