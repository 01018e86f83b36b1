// classifier.cu for the speed run on Hopper: of capped logits, and with the gradient of the
// classifier's bias.
//
//     losses[n] = log(sum over v of exp(y[n,v])) - y[n,targets[n]], y = capped(logits)                 losses =
//     logits[n,v] = (softmax(y[n])[v] - (v is the target)) * slope(logits[n,v]) * of_row,
//     of_row = dloss * weights[n]                                                                      logits = (*)
//     partials[cluster,v] = factor * the sum of these over the cluster's rows, before they are
//     rounded partials = (*)
//
// (*) if write_gradient; from V on, 0. partials (clusters,Vp) float32; all else as in
// classifier.cu.
//
// A block has some columns of all of its cluster's rows, so that a thread can add up its own in
// registers: dbias costs no pass over dlogits. As y is within +-CAP, softmax needs no maximum; and
// half precision holds exp(y) * slope, which is at most 6.1e4, between a row's sum and its gradient
// (with fewer digits from y = -9 down, none below -14).
//
// Bound by bytes: a row is read once and written once. Each warp loads and stores its slice by one
// TMA copy, of 2 KB: copies of half as many bytes took longer. It sums row i + 1 before it writes
// the gradient of row i, so that exps overlap with stores, and sums have arrived from the cluster's
// other blocks when they are needed.

#include "cap.cuh"
#include "dlogits.cuh"
#include "hopper/hopper.cuh"

constexpr int CLUSTER = CAPPED_CLUSTER;  // blocks
// of a block, a multiple of 16; the last one may have fewer
constexpr int COLUMNS = CAPPED_COLUMNS;
constexpr int WARPS = CAPPED_WARPS, STAGES = CAPPED_STAGES;  // rows on chip
// that a thread has of a row; elements that its warp has
constexpr int PACKS = 4, SLICE = PACKS * 32 * PACK;
// slots of warp_sums: while a warp sums row i, another may still read those of row i - 3
constexpr int TURNS = 4;
constexpr float LOG2_UNIT = 1.5863f;  // 3 log2(LOG2E)
static_assert(WARPS * SLICE >= COLUMNS && STAGES >= 3);  // of the rows on chip, two are in work
static_assert(CAP <= 15.0f, "half precision holds exp(y) * slope");

// *at = x in that block's shared memory, 4 bytes that count towards the phase of its `full`.
__device__ inline void store_in_block(float* at, float x, Mbarrier* full, int block) {
    asm volatile("{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [bar]; }" ::"r"(
                     shared_address(at)),
                 "r"(shared_address(full)), "r"(block), "f"(x)
                 : "memory");
}

// Block (32 * WARPS); grid (CLUSTER * partials' rows). Shared memory: the block's columns of STAGES
// rows.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, 1)
classifier_capped(float* losses, element* logits, float* partials, float factor, const int* targets,
                  const float* weights, float dloss, int write_gradient, int N) {
    extern __shared__ uint4 shared[];
    __shared__ Mbarrier barriers[WARPS][STAGES], summed[TURNS];
    __shared__ float warp_sums[TURNS][CLUSTER * WARPS];
    element* const rows = reinterpret_cast<element*>(shared);
    // see classifier.cu
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int block = block_of_cluster(), first = block * COLUMNS,
        columns = min(COLUMNS, Vp - first);
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    Mbarrier* const loaded = barriers[warp];
    const int slice = warp * SLICE,
        bytes = max(0, min(SLICE, columns - slice)) * int(sizeof(element));
    // the first of 8
    const auto column_of = [&](int pack) { return slice + (pack * 32 + lane) * PACK; };
    // Called by lane 0: start loading this warp's slice of the cluster's row number `turn`, if it
    // exists.
    const auto fetch = [&](int turn) {
        const int n = cluster + turn * clusters, stage = turn % STAGES;
        if (n >= N) return;
        mbarrier_arrive_expect_tx(&loaded[stage], bytes);
        if (bytes > 0) {
            load_bytes(rows + stage * COLUMNS + slice, logits + int64(n) * Vp + first + slice,
                       &loaded[stage], bytes);
        }
    };
    // Row n, number `turn`: its sum to warp_sums, its terms of the gradient in place of its logits.
    // Returns the target's logit, if this thread has it.
    const auto sum_row = [&](int n, int turn) {
        const int stage = turn % STAGES, target = targets[n] - first;
        float sum = 0.0f, target_logit = 0.0f;
        mbarrier_wait(&loaded[stage], turn / STAGES % 2);
#pragma unroll
        for (int pack = 0; pack < PACKS; pack++) {
            const int c = column_of(pack);
            if (c >= columns) continue;
            element* const at = rows + stage * COLUMNS + c;
            if (has_target(c, target)) target_logit = to_float(at[target - c]);
            Floats x = unpack(load_bits(at)), slopes;
#pragma unroll
            // r^3 is LOG2E^3 times the slope: exp(y) is divided by that
            for (int k = 0; k < PACK; k++) {
                const float z = x.x[k], w = z * (1.0f / (CAP * LOG2E));
                const float r = rsqrtf(fmaf(w, w, 1.0f / (LOG2E * LOG2E)));
                x.x[k] = exp2_approx(fmaf(z, r, -LOG2_UNIT));
                slopes.x[k] = r * r * r;
            }
            if (first + c + PACK > V) {
#pragma unroll
                for (int k = 0; k < PACK; k++) {
                    if (first + c + k >= V) x.x[k] = slopes.x[k] = 0.0f;
                }
            }
#pragma unroll
            for (int k = 0; k < PACK; k++) {
                sum += x.x[k];
                x.x[k] *= slopes.x[k];
            }
            if (write_gradient) *reinterpret_cast<uint4*>(at) = kept(x);
        }
        sum = warp_sum(sum);
        const int slot = turn % TURNS;
        if (lane < CLUSTER)
            store_in_block(&warp_sums[slot][block * WARPS + warp], sum, &summed[slot], lane);
        if (!write_gradient) {
            fence_for_async();
            __syncwarp();  // all lanes have read the slice
            if (lane == 0) fetch(turn + STAGES);
        }
        return target_logit;
    };
    Floats column_sums[PACKS] = {};
    const auto expect_sums =
        [&](int slot) { mbarrier_arrive_expect_tx(&summed[slot], CLUSTER * WARPS * 4); };
    const auto write_row = [&](int n, int turn, float target_logit) {
        const int slot = turn % TURNS, target = targets[n] - first;
        float sum = 0.0f;
        mbarrier_wait(&summed[slot], turn / TURNS % 2);
        if (threadIdx.x == 0) expect_sums(slot);
        for (int i = lane; i < CLUSTER * WARPS; i += 32) sum += warp_sums[slot][i];
        sum = warp_sum(sum) * exp2f(LOG2_UNIT);
        if (target >= 0 && target < columns && target / SLICE == warp
            && target / PACK % 32 == lane) {
            losses[n] = logf(sum) - capped(target_logit);
        }
        if (!write_gradient) return;
        if (lane == 0 && turn > 0) {
            stores_wait<0>();  // of the row before
            fetch(turn - 1 + STAGES);
        }
        const float of_row = dloss * weights[n], scale = of_row / sum;
        element* const row = rows + turn % STAGES * COLUMNS;
        dlogit* const to = reinterpret_cast<dlogit*>(row + slice) - slice;  // in the slice's room
        Rounding rounding(block * 32 * WARPS + threadIdx.x, scale, first + target);
#pragma unroll
        for (int half = 0; half < PACKS; half += PACKS / 2) {
            uint4 bits[PACKS / 2];
#pragma unroll
            for (int i = 0; i < PACKS / 2; i++) {
                if (column_of(half + i) < columns) bits[i] = load_bits(row + column_of(half + i));
            }
            // all lanes have read what dlogits are going to overwrite
            if (CLASSIFIER_FP8) __syncwarp();
#pragma unroll
            for (int i = 0; i < PACKS / 2; i++) {
                const int c = column_of(half + i);
                const bool exists = c < columns;
                const uint32 lanes = CLASSIFIER_FP8 ? __ballot_sync(0xffffffff, exists) : 0;
                if (!exists) continue;
                Floats x = unpack_kept(bits[i]);
#pragma unroll
                for (int k = 0; k < PACK; k++) x.x[k] *= scale;
                if (has_target(c, target)) {
                    const float of_target = cap_slope(target_logit) * of_row;
#pragma unroll
                    for (int k = 0; k < PACK; k++) x.x[k] -= c + k == target ? of_target : 0.0f;
                }
                column_sums[half + i] = column_sums[half + i] + x;
                store_dlogits(to + c, x, lanes, rounding);
            }
        }
        fence_for_async();
        __syncwarp();
        if (lane == 0 && bytes > 0) {
            store_bytes(reinterpret_cast<dlogit*>(logits + int64(n) * Vp) + first + slice,
                        to + slice,
                        bytes / int(sizeof(element) / sizeof(dlogit)));
        }
    };

    if (lane == 0) {
        for (int stage = 0; stage < STAGES; stage++) mbarrier_init(&loaded[stage], 1);
        for (int slot = 0; warp == 0 && slot < TURNS; slot++) mbarrier_init(&summed[slot], 1);
        fence_mbarrier_init();
        for (int slot = 0; warp == 0 && slot < TURNS; slot++) expect_sums(slot);
        for (int turn = 0; turn < STAGES; turn++) fetch(turn);
    }
    __syncwarp();
    cluster_sync();
    float target_logit = 0.0f;
    for (int turn = -1, n = cluster - clusters; n < N; turn++, n += clusters) {
        const float next = n + clusters < N ? sum_row(n + clusters, turn + 1) : 0.0f;
        if (turn >= 0) write_row(n, turn, target_logit);
        target_logit = next;
    }
    // the block must not exit before TMA has read its shared memory
    if (lane == 0) stores_wait<0>();

#pragma unroll
    for (int pack = 0; pack < PACKS; pack++) {
        Floats& sums = column_sums[pack];
#pragma unroll
        for (int k = 0; k < PACK; k++) sums.x[k] *= factor;
        if (write_gradient && column_of(pack) < columns) {
            store(partials + int64(cluster) * Vp + first + column_of(pack), sums);
        }
    }
}
