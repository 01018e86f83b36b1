// How a matmul is cut into work items, and how blocks pass on the sums of a tile.
//
// Each matmul is out (M,N) = A (M,K) @ B (K,N); an operand whose contiguous dimension is not K is
// called "across".
//
// matmul_backward_weight may split the inner dimension (split-K). Then each split of a tile is a
// work item of its own, and a tile's splits are added up in order, so that the result does not
// depend on which block was first. partials: BM * BN float32 per tile, the sums of its splits so
// far; done: the number of these splits, 0 before and after. Neither is used if splits is 1. An
// item waits until the previous split of its tile, an item with a lower number, is in partials.
// This cannot deadlock: there are no more blocks than multiprocessors, all run at once, and each
// takes its items in the order of their numbers. (Of two such grids at once, the GPU must start all
// blocks of one first.)

#pragma once

#include "common.cuh"

struct Sizes {
    int M, N, K;
    // rows of tiles done together, column by column, so that their operands stay in the L2 cache
    int band;
    int splits;  // of the inner dimension
};

// A work item: the BM x BN tile of out at (row, column), and steps begin .. end - 1 of the inner
// dimension, BK each, which make up its `split`.
struct Item {
    int row, column, tile, split, begin, end;
};

// How many steps item w has.
template <int BM, int BN, int BK>
__device__ inline int steps_of(int w, const Sizes& z) {
    const int tiles = (z.M + BM - 1) / BM * ((z.N + BN - 1) / BN), steps = (z.K + BK - 1) / BK;
    if (z.splits == 1) return steps;
    const int split = w / tiles;
    return steps * (split + 1) / z.splits - steps * split / z.splits;
}

// Find item number w; false if there are none left. Divisions are few, because each takes hundreds
// of cycles.
template <int BM, int BN, int BK>
__device__ inline bool pick(Item& item, int w, const Sizes& z) {
    const int down = (z.M + BM - 1) / BM, across = (z.N + BN - 1) / BN, steps = (z.K + BK - 1) / BK;
    const bool whole = z.splits == 1;
    item.split = whole ? w >= down * across : w / (down * across);
    item.tile = whole ? w : w % (down * across);
    const int first = item.tile / (z.band * across) * z.band,
        height = max(1, min(z.band, down - first));
    const int in_band = item.tile - first * across;
    item.row = (first + in_band % height) * BM;
    item.column = in_band / height * BN;
    item.begin = whole ? 0 : steps * item.split / z.splits;
    item.end = whole ? steps : steps * (item.split + 1) / z.splits;
    return item.split < z.splits;
}

// Between blocks: announce() sets *count, after everything that this thread has written; wait_for()
// waits until *count is `value`, and then sees these writes.
__device__ inline void wait_for(const int* count, int value) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
    } while (found != value);
}
__device__ inline void announce(int* count, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}

// The splits of a tile, in turn, by THREADS threads, for which sync() is a barrier. quad(j): four
// of the QUADS * 4 sums of a thread, to which those of the splits before are added. Returns whether
// they are complete: all splits but the last pass theirs on. partials, done: the tile's, see above.
template <int THREADS, int QUADS, class Quad, class Sync>
__device__ __forceinline__ bool add_splits(float4* partials, int* done, const Item& item,
                                           int splits, Quad quad,
                                           Sync sync) {
    constexpr int IN_FLIGHT = QUADS % 8 ? 4 : 8;  // loads
    static_assert(QUADS % IN_FLIGHT == 0, "none beyond the tile");
    const auto leads = [] { return threadIdx.x % THREADS == 0; };
    partials += threadIdx.x % THREADS;
    if (item.split > 0) {
        if (leads()) wait_for(done, item.split);
        sync();
#pragma unroll
        for (int first = 0; first < QUADS; first += IN_FLIGHT) {
            float4 y[IN_FLIGHT];
#pragma unroll
            for (int j = 0; j < IN_FLIGHT; j++) y[j] = __ldcg(partials + (first + j) * THREADS);
#pragma unroll
            for (int j = 0; j < IN_FLIGHT; j++) {
                float* const x = quad(first + j);
                x[0] += y[j].x, x[1] += y[j].y, x[2] += y[j].z, x[3] += y[j].w;
            }
        }
    }
    if (item.split < splits - 1) {
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            __stcg(partials + j * THREADS, float4{quad(j)[0], quad(j)[1], quad(j)[2], quad(j)[3]});
        }
        sync();  // all have written before the first thread announces it
        if (leads()) announce(done, item.split + 1);
        return false;
    }
    if (splits > 1 && leads()) *done = 0;
    return true;
}
