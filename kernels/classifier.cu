// Fused softmax and cross entropy: the loss of each row, and the logits overwritten with their
// gradient.
//
//     losses[n] = log(sum over v of exp(logits[n,v])) - logits[n,targets[n]]               losses =
//     logits[n,v] = (softmax(logits[n])[v] - (v is the target)) * dloss * weights[n]       logits = (*)
//
// (*) if write_gradient; from V on, 0. logits (N,Vp), whose columns V .. Vp-1 come from the padding
// of wte; losses, weights (N) float32; targets (N) int32. In FP8 runs, the gradient is in E5M2,
// stochastically rounded, in the order of fp8.cuh, in the first half of each row's bytes. With
// MODEL_CAP, the logits z are first capped (cap.cuh); the gradient is that of z.
//
// Bound by bytes: a row is read from memory once and written once. On Hopper, if shared memory has
// room for a row (it holds two of 50304 bfloat16 logits), TMA loads and stores rows in parts, and
// each warp handles its own slice of each part; of a row of Llama 3's 128256, the last part is in
// registers. Blocks are persistent, as many per multiprocessor as rows fit; once a slice of the
// gradient has been stored, the same slice of the block's next row is loaded. In bfloat16, the row
// holds exp(x - maximum so far) between the sum and the gradient: one exp per element instead of
// two. On other GPUs, the second pass reads the row from the L2 cache, beginning at its end, which
// was read last.

#include "cap.cuh"
#include "dlogits.cuh"
#include "softmax.cuh"

#define ON_CHIP (CLASSIFIER_ROWS_ON_CHIP > 0)
#if ON_CHIP
#include "hopper/hopper.cuh"
constexpr int BLOCKS = CLASSIFIER_ROWS_ON_CHIP;  // per multiprocessor, each with a row
#endif
constexpr int THREADS = CLASSIFIER_THREADS;
static_assert(ON_CHIP || !CLASSIFIER_FP8, "bytes that would overwrite logits not yet read");

constexpr int LOADS_AT_ONCE = ON_CHIP ? 2 : 1;  // packs that a thread loads at a time
// A row is cut into PARTS parts of PART elements; the last one may be shorter. Of each part, each
// warp has SLICE elements.
constexpr int WARPS = THREADS / 32, SLICE = LOADS_AT_ONCE * 32 * PACK;
constexpr int PART = WARPS * SLICE, PARTS = (Vp + PART - 1) / PART;
// the last part, in registers
constexpr bool HOLDS = ON_CHIP && CLASSIFIER_SHARED < Vp * sizeof(element);
constexpr int SHARED_PARTS = PARTS - HOLDS;
static_assert(!ON_CHIP || CLASSIFIER_SHARED == (HOLDS ? SHARED_PARTS * PART : Vp) * sizeof(element),
              "shared memory: one row of logits, or its whole parts");

// Merge over the block. buffer: 0 and 1 in turn: a slower warp may still be reading the previous
// row's.
__device__ inline MaxAndSum block_merge(MaxAndSum s, int buffer) {
    __shared__ MaxAndSum of_warps[2][WARPS];
    s = warp_merge(s);
    if (threadIdx.x % 32 == 0) of_warps[buffer][threadIdx.x / 32] = s;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_merge(lane < WARPS ? of_warps[buffer][lane] : MaxAndSum{-INFINITE, 0.0f});
}

// scaled_exp(x, offset_of(largest, log2(scale)), scale) = exp(x - largest) * scale; in bfloat16,
// one multiply-add and one exp2. The compiler does not see that the offset is the same for a whole
// row.
#if BFLOAT16
__device__ inline float offset_of(float largest, float log2_scale) {
    return largest * LOG2E - log2_scale;
}
__device__ inline float scaled_exp(float x, float offset, float scale) {
    return exp2_approx(x * LOG2E - offset);
}
#else
__device__ inline float offset_of(float largest, float log2_scale) { return largest; }
__device__ inline float scaled_exp(float x, float offset, float scale) {
    return expf(x - offset) * scale;
}
#endif

// In bfloat16, a row on chip holds its exponentials in half precision, scaled by 2^15: down to
// 2^-29 of the maximum, they keep all 11 bits, 3 more than the gradient has. (Capped logits in
// bfloat16 have hopper/classifier_capped.cu.)
constexpr bool KEEPS = ON_CHIP && BFLOAT16;
#ifdef MODEL_CAP
static_assert(!KEEPS, "the slope would be missing");
#endif
constexpr float LOG2_KEPT_SCALE = KEEPS ? 15.0f : 0.0f, KEPT_SCALE = KEEPS ? 32768.0f : 1.0f;

// The index of a thread's i-th pack of part s, in its warp's slice.
__device__ inline int begin_of(int s, int i) {
    return s * PART + int(threadIdx.x / 32) * SLICE + (i * 32 + int(threadIdx.x % 32)) * PACK;
}

// Whether element v of part s comes before `end`: known at compile time for most parts.
__device__ inline bool is_before(int end, int s, int v) { return (s + 1) * PART <= end || v < end; }

typedef uint4 Packs[LOADS_AT_ONCE];  // a thread's bits of a part

// Elements [v, v + PACK) of part s, -inf from V on.
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
__device__ inline void load_part(Packs& packs, const element* row, int s) {
#pragma unroll
    for (int i = 0; i < LOADS_AT_ONCE; i++) packs[i] = load_logits(row, s, begin_of(s, i));
}

// The maximum of some packs, and the sum of one pack, in short chains of dependent operations.
__device__ inline float largest_of(const Packs& packs) {
#if BFLOAT16
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(packs);
    __nv_bfloat162 largest = pairs[0];
#pragma unroll
    for (int k = 1; k < LOADS_AT_ONCE * PACK / 2; k++) largest = __hmax2(largest, pairs[k]);
    return fmaxf(__low2float(largest), __high2float(largest));
#else
    const auto* x = reinterpret_cast<const float*>(packs);
    float largest = x[0];
#pragma unroll
    for (int k = 1; k < LOADS_AT_ONCE * PACK; k++) largest = fmaxf(largest, x[k]);
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

// Merge logits of part s into `so_far`. If KEEPS and write_gradient, they become their
// exponentials, for the gradient.
__device__ inline MaxAndSum add_part(MaxAndSum so_far, Packs& packs, bool write_gradient) {
    const float largest = fmaxf(so_far.largest, capped(largest_of(packs)));
    // only padding so far: -inf - -inf would be NaN
    const float finite = largest == -INFINITE ? 0.0f : largest;
    const float offset = offset_of(finite, LOG2_KEPT_SCALE);
    float sum = so_far.sum * scaled_exp(so_far.largest - finite, 0.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < LOADS_AT_ONCE; i++) {
        Floats x = unpack(packs[i]);
#pragma unroll
        for (int k = 0; k < PACK; k++) x.x[k] = scaled_exp(capped(x.x[k]), offset, KEPT_SCALE);
        sum += sum_of(x);
        if (KEEPS && write_gradient) packs[i] = kept(x);
    }
    return {largest, sum};
}

// Write the gradient of part s to the row; packs: logits or, if KEEPS, their exponentials. of_row:
// dloss times the row's weight; scale: that / the row's sum; offset: offset_of the row's maximum and
// log2(|scale|), which has lost the sign; largest_then: this thread's maximum so far when it had
// merged part s; target_logit: before the cap, of the thread that has the target.
__device__ inline void write_gradient_part(dlogit* row, const Packs& packs, int s, float offset,
                                           float scale, float largest_then, int target,
                                           float target_logit, float of_row, Rounding& rounding) {
    const float factor = copysignf(scaled_exp(largest_then, offset, scale), scale);
#pragma unroll
    for (int i = 0; i < LOADS_AT_ONCE; i++) {
        const int v = begin_of(s, i);
        const bool exists = is_before(Vp, s, v);
        const uint32 lanes = CLASSIFIER_FP8 ? __ballot_sync(0xffffffff, exists) : 0;
        if (!exists) continue;
        Floats x = KEEPS ? unpack_kept(packs[i]) : unpack(packs[i]);
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            x.x[k] = KEEPS ? x.x[k] * factor
                : cap_slope(x.x[k]) * copysignf(scaled_exp(capped(x.x[k]), offset, scale), scale);
        }
        if (has_target(v, target)) {
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                if (v + k == target) x.x[k] -= cap_slope(target_logit) * of_row;
            }
        }
        store_dlogits(row + v, x, lanes, rounding);
    }
}

__device__ inline float loss_of(MaxAndSum whole, float target_logit) {
    return logf(whole.sum / KEPT_SCALE) + (whole.largest - capped(target_logit));
}

// Whether the target is in this thread's packs.
__device__ inline bool owns_target(int target) {
    return target % PART / (32 * PACK) / LOADS_AT_ONCE * 32 + target / PACK % 32
        == int(threadIdx.x);
}

#if ON_CHIP

constexpr int STORES_IN_FLIGHT = 2;  // slices being stored while the next row replaces earlier ones

// Block (THREADS); grid (BLOCKS per multiprocessor). Shared memory: a row, or its SHARED_PARTS.
// Warps meet for its sum.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
classifier(float* losses, element* logits, const int* targets, const float* weights, float dloss,
           int write_gradient, int N) {
    extern __shared__ uint4 shared[];
    __shared__ Mbarrier barriers[WARPS][SHARED_PARTS];
    element* const row = reinterpret_cast<element*>(shared);
    // The shuffle tells the compiler that it is uniform across the warp.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const bool is_lane_0 = threadIdx.x % 32 == 0;
    Mbarrier* const loaded = barriers[warp];     // for each part, this warp's slice
    // this warp's slice of part s begins s * PART further on
    element* const slices = row + warp * SLICE;
    const auto bytes_of = [&](int s) {           // of that slice; <= 0: the row ends before it
        return ((s + 1) * PART <= Vp ? SLICE : min(SLICE, Vp - s * PART - warp * SLICE))
            * int(sizeof(element));
    };
    // Called by lane 0: start loading this warp's slice of part s. from: its slice of part 0, in
    // the logits.
    const auto fetch = [&](const element* from, int s) {
        if (bytes_of(s) <= 0) return;
        mbarrier_arrive_expect_tx(&loaded[s], bytes_of(s));
        load_bytes(slices + s * PART, from + s * PART, &loaded[s], bytes_of(s));
    };
    if (is_lane_0) {
        for (int s = 0; s < SHARED_PARTS; s++) mbarrier_init(&loaded[s], 1);
        fence_mbarrier_init();
        for (int s = 0; s < SHARED_PARTS; s++)
            fetch(logits + int64(blockIdx.x) * Vp + warp * SLICE, s);
    }
    __syncwarp();

    int target = targets[blockIdx.x];
    for (int n = blockIdx.x, parity = 0; n < N; n += gridDim.x, parity ^= 1) {
        const int next = n + gridDim.x, next_target = next < N ? targets[next] : 0;
        element* const global_row = logits + int64(n) * Vp;
        dlogit* const global_dlogits = reinterpret_cast<dlogit*>(global_row);
        const element* const next_global_slice = global_row + int64(gridDim.x) * Vp + warp * SLICE;
        const bool has_the_target = owns_target(target);
        const float target_logit = has_the_target ? to_float(global_row[target]) : 0.0f;
        Packs held;
        if (HOLDS) load_part(held, global_row, SHARED_PARTS);
        MaxAndSum so_far = {-INFINITE, 0.0f};
        float largest_then[PARTS];
#pragma unroll
        for (int s = 0; s < SHARED_PARTS; s++) {
            Packs packs;
            if (bytes_of(s) > 0) mbarrier_wait(&loaded[s], parity);
            load_part(packs, row, s);
            so_far = add_part(so_far, packs, write_gradient);
            largest_then[s] = so_far.largest;
#pragma unroll
            for (int i = 0; i < LOADS_AT_ONCE; i++) {
                if (KEEPS && write_gradient && is_before(Vp, s, begin_of(s, i))) {
                    *reinterpret_cast<uint4*>(row + begin_of(s, i)) = packs[i];
                }
            }
            if (!write_gradient) {
                fence_for_async();
                __syncwarp();  // all lanes have read the slice
                if (is_lane_0 && next < N) fetch(next_global_slice, s);
            }
        }
        if (HOLDS) {
            so_far = add_part(so_far, held, write_gradient);
            largest_then[PARTS - 1] = so_far.largest;
        }
        const MaxAndSum whole = block_merge(so_far, parity);
        if (has_the_target) losses[n] = loss_of(whole, target_logit);
        if (write_gradient) {
            const float of_row = dloss * weights[n], scale = of_row / whole.sum;
            const float offset = offset_of(whole.largest, log2f(fabsf(scale)));
            Rounding rounding(threadIdx.x, scale, target);
            if (HOLDS) {
                write_gradient_part(global_dlogits, held, PARTS - 1, offset, scale,
                                    largest_then[PARTS - 1], target,
                                    target_logit, of_row, rounding);
            }
#pragma unroll
            for (int s = 0; s < SHARED_PARTS; s++) {
                Packs packs;
#pragma unroll
                for (int i = 0; i < LOADS_AT_ONCE; i++) {
                    if (KEEPS && is_before(Vp, s, begin_of(s, i)))
                        packs[i] = load_bits(row + begin_of(s, i));
                    if (!KEEPS) packs[i] = load_logits(row, s, begin_of(s, i));
                }
                // In FP8, a slice of dlogits begins where that of the logits does, which all lanes
                // must have read.
                if (CLASSIFIER_FP8) __syncwarp();
                dlogit* const slice = reinterpret_cast<dlogit*>(slices + s * PART);
                write_gradient_part(slice - s * PART - warp * SLICE, packs, s, offset, scale,
                                    largest_then[s], target,
                                    target_logit, of_row, rounding);
                fence_for_async();
                __syncwarp();
                if (is_lane_0) {
                    if (bytes_of(s) > 0) {
                        store_bytes(global_dlogits + s * PART + warp * SLICE, slice,
                                    bytes_of(s) / int(sizeof(element) / sizeof(dlogit)));
                    } else {
                        // an empty group, so that stores_wait counts the same in all warps
                        stores_commit();
                    }
                    stores_wait<STORES_IN_FLIGHT>();
                    if (s >= STORES_IN_FLIGHT && next < N)
                        fetch(next_global_slice, s - STORES_IN_FLIGHT);
                }
            }
            if (is_lane_0) {
                stores_wait<0>();
                for (int s = max(0, SHARED_PARTS - STORES_IN_FLIGHT); s < SHARED_PARTS; s++) {
                    if (next < N) fetch(next_global_slice, s);
                }
            }
        }
        target = next_target;
    }
}

#else

// Block (THREADS); grid (N).
extern "C" __global__ void __launch_bounds__(THREADS)
classifier(float* losses, element* logits, const int* targets, const float* weights, float dloss,
           int write_gradient, int N) {
    const int n = blockIdx.x, target = targets[n];
    element* const row = logits + int64(n) * Vp;
    const float target_logit = owns_target(target) ? to_float(row[target]) : 0.0f;
    Packs packs;
    MaxAndSum so_far = {-INFINITE, 0.0f};
    for (int s = 0; s < PARTS; s++) {
        load_part(packs, row, s);
        so_far = add_part(so_far, packs, false);
    }
    // Because of the barrier in block_merge, no thread writes to the row while others read it.
    const MaxAndSum whole = block_merge(so_far, 0);
    if (owns_target(target)) losses[n] = loss_of(whole, target_logit);
    if (!write_gradient) return;
    const float of_row = dloss * weights[n], scale = of_row / whole.sum;
    const float offset = offset_of(whole.largest, log2f(fabsf(scale)));
    Rounding rounding(threadIdx.x, scale, target);
    for (int s = PARTS - 1; s >= 0; s--) {
        load_part(packs, row, s);
        write_gradient_part(row, packs, s, offset, scale, 0.0f, target, target_logit, of_row,
                            rounding);
    }
}

#endif
