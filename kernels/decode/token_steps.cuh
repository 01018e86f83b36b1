// The steps of decode_token, each by all worker warps of a block: the residual stream and its
// norms, products, attention.

#pragma once

#include "decode/head.cuh"
#include "decode/token.cuh"
#include "mma.cuh"

constexpr int GROUP = NH / NKV;  // query heads of a key and value head
// of a cluster: heads, each with its keys and values; columns of attproj, of fcproj
constexpr int HEADS = TOKEN_HEADS, HEAD_COLUMNS = HEADS * HS, SLICE = TOKEN_SLICE;
constexpr int ATT_CLUSTERS = parts_of(NH, HEADS), FC_CLUSTERS = parts_of(F, SLICE);
// of a block: rows of queries, or keys, or values; of fc
constexpr int THIRD = HEAD_COLUMNS / CLUSTER, FC_ROWS = SLICE / CLUSTER;
constexpr int QKV_ROWS = 3 * THIRD, UP_ROWS = (SWIGLU ? 2 : 1) * FC_ROWS;
constexpr int ROUND = 64;  // rows of the classifier at a time
constexpr int MOST_ROWS = most(ROUND, most(QKV_ROWS, UP_ROWS));  // of a product

static_assert(HS % UNIT == 0 && HS % THIRD == 0, "a block has rows of one head");
static_assert(SLICE % UNIT == 0 && F % PIECE_ROWS == 0, "pieces are whole");
static_assert(ATT_CLUSTERS <= CLUSTERS && FC_CLUSTERS <= CLUSTERS);
static_assert(most(QKV_ROWS, FC_ROWS) / 2 * CLUSTER <= WORKER_THREADS, "a thread sends once");

constexpr int PAIRS = parts_of(C / 2, WORKER_THREADS);  // of channels, for a thread
constexpr int UNITS = parts_of(C / UNIT, WORKERS);      // of C channels, for a warp
constexpr int TILES = parts_of(C_ROWS / 8, WORKERS);    // of the block's C_ROWS rows, for a warp

// Parameters by train_gpt2.py's names (head: lm_head, or wte); from ln1w on of all layers, (L,..);
// null where the model has none. In the order of WEIGHTS of llmc/gpu/decoder.py.
struct Weights {
    const element *wte, *wpe, *ln0w, *lnfw, *lnfb, *head, *headb;
    const element *ln1w, *ln1b, *qkvw, *qkvb, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojb;
};

// -------------------------------------------------------------------------------------------------
// the residual stream, and its norms

__device__ inline uint32 load_pair(const element* at) {
    return *reinterpret_cast<const uint32*>(at);
}

// f(p, c) for each pair of channels of a thread: its p-th, channels c and c + 1. A warp's pairs are
// units of 64 channels: those that it multiplies.
template <class Do>
__device__ inline void each_pair(const Do& f) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const int c = 2 * (p * WORKER_THREADS + threadIdx.x);
        if ((p + 1) * 2 * WORKER_THREADS <= C || c < C) f(p, c);  // the same for all its lanes
    }
}

// A thread's part of the vectors of a half's norm, and of the sum before it, requested long before.
struct Vectors {
    uint32 branch_bias[PAIRS] = {}, weight[PAIRS], bias[PAIRS] = {};
    __device__ void request(const Weights& w, int half) {
        const bool is_mlp = half % 2, is_last = half == 2 * L;
        const int at = half / 2 * C;
        const element* const of_weight = is_last ? w.lnfw : (is_mlp ? w.ln2w : w.ln1w) + at;
        const element* const of_bias = is_last ? w.lnfb : (is_mlp ? w.ln2b : w.ln1b) + at;
        const element* const of_branch = is_mlp ? w.attprojb + at : w.fcprojb + at - C;
        each_pair([&](int p, int c) {
            weight[p] = load_pair(of_weight + c);
            if (!RMS) bias[p] = load_pair(of_bias + c);
            if (BIASES && half > 0) branch_bias[p] = load_pair(of_branch + c);
        });
    }
};

struct Stream {
    float2 x[PAIRS] = {};
    float mean = 0.0f;

    // x = wte[token] + wpe[position]
    __device__ void embed(const Weights& w, int token, int position) {
        each_pair([&](int p, int c) {
            x[p] = as_floats(load_pair(w.wte + int64(token) * C + c));
            if (ROPE) return;
            const float2 y = as_floats(load_pair(w.wpe + int64(position) * C + c));
            x[p] = {x[p].x + y.x, x[p].y + y.y};
        });
    }

    // x += the branch's bias and its sums over `count` clusters, as soon as these are complete.
    __device__ void add_branch(const uint64* sums, int count, const Vectors& vectors) {
        uint64 words[PAIRS][2];
        for (bool complete = false; !complete;) {
            each_pair([&](int p, int c) { load_sums(words[p], sums + sum_place(c)); });
            complete = true;
            each_pair([&](int p, int) {
                complete &= count_of(words[p][0]) == count && count_of(words[p][1]) == count;
            });
            // Lanes that leave a loop one by one are slow afterwards.
            complete = __all_sync(0xffffffff, complete);
        }
        each_pair([&](int p, int) {
            const float2 bias = as_floats(vectors.branch_bias[p]);
            x[p] = {x[p].x + bias.x + value_of(words[p][0]),
                    x[p].y + bias.y + value_of(words[p][1])};
        });
    }

    // Set mean to that of all channels, and return 1 / their standard deviation; with RMS, the mean
    // stays 0. Distances are from the last norm's mean, at first 0, so that one pass has both sums.
    // Squares cancel only where the mean moves by many standard deviations.
    __device__ float rstd() {
        __shared__ float2 of_warps[WORKERS];
        float2 sum = {};  // of the distances, of their squares
        each_pair([&](int p, int) {
            const float2 y = {x[p].x - mean, x[p].y - mean};
            sum = {sum.x + y.x + y.y, sum.y + y.x * y.x + y.y * y.y};
        });
        sum = {RMS ? 0.0f : warp_sum(sum.x), warp_sum(sum.y)};
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
        workers_sync();
        sum = {};
#pragma unroll
        for (int w = 0; w < WORKERS; w++)
            sum = {sum.x + of_warps[w].x, sum.y + of_warps[w].y};
        const float change = RMS ? 0.0f : sum.x * (1.0f / C);
        mean += change;
        const float variance = fmaxf(sum.y * (1.0f / C) - change * change, 0.0f);
        return rsqrtf(variance + float(DECODE_EPS));
    }

    // normed (C,) = the norm of x; a warp writes what it reads.
    __device__ void normalize(element* normed, const Vectors& vectors) {
        const float scale = rstd();
        each_pair([&](int p, int c) {
            const float2 weight = as_floats(vectors.weight[p]), bias = as_floats(vectors.bias[p]);
            put_pair(normed + c, (x[p].x - mean) * scale * weight.x + bias.x,
                     (x[p].y - mean) * scale * weight.y + bias.y);
        });
        __syncwarp();
    }

    // x = its RMSNorm, for the speed run's model
    __device__ void normalize_itself(const element* weight) {
        const float scale = rstd();
        each_pair([&](int p, int c) {
            const float2 gain = as_floats(load_pair(weight + c));
            x[p] = {x[p].x * scale * gain.x, x[p].y * scale * gain.y};
        });
        workers_sync();  // before the next sums of warps
    }
};

// -------------------------------------------------------------------------------------------------
// products of a weight and one vector, on the tensor cores, 8 rows of the weight at a time. Of 64
// elements of a row, a lane has 8 of one half, then 8 of the other; even rows begin with the first
// half, odd rows with the last: so the 8 lanes of a quarter-warp, 4 of each of two rows that are a
// multiple of 128 bytes apart, meet in no bank. Two words of the 8 elements are row g of the first
// operand, two are row g + 8. The second operand's columns 0 to 3, and 4 to 7 again, are the
// vector's four parts that these meet.

// Of 64 elements, a lane's in each half.
__device__ inline int lane_offset(int half) {
    return ((half ^ threadIdx.x / 4 % 2) * 4 + threadIdx.x % 4) * PACK;
}
__device__ inline uint2 load_vector(const element* x, int half) {
    const uint4 bits = load_bits(x + ((half ^ threadIdx.x / 8 % 2) * 4 + threadIdx.x % 4) * PACK);
    return threadIdx.x / 4 % 2 ? uint2{bits.y, bits.w} : uint2{bits.x, bits.z};
}
__device__ inline void multiply(FragmentD& d, uint4 weight, uint2 x) {
    mma(d, {weight.x, weight.y, weight.z, weight.w}, {x.x, x.y});
}
// One of each four lanes has a product, of row g.
__device__ inline bool has_product() { return threadIdx.x % 4 == threadIdx.x / 4 % 2; }
__device__ inline float product_of(const FragmentD& d) { return d[0] + d[3]; }

// sums (WORKERS,MOST_ROWS): each warp's part of the products of the next pieces, 8 rows of a weight
// (.,C) each, and the vector x, of which it has units of 64 elements.
__device__ inline void multiply_rows(float* sums, const element* x, int pieces, Next& next) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const auto exists = [&](int u) {
        return (u + 1) * WORKERS <= C / UNIT || u * WORKERS + warp < C / UNIT;
    };
    x += warp * UNIT, sums += warp * MOST_ROWS + g;
    uint2 own[UNITS][2] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (!exists(u)) continue;
#pragma unroll
        for (int half = 0; half < 2; half++)
            own[u][half] = load_vector(x + u * WORKERS * UNIT, half);
    }
#pragma unroll 4
    for (int piece = 0; piece < pieces; piece++) {
        const element* const row = next.wait() + g * C + warp * UNIT;
        FragmentD d[2] = {};
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            if (!exists(u)) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
                multiply(d[half], load_bits(row + u * WORKERS * UNIT + lane_offset(half)),
                         own[u][half]);
        }
        if (has_product()) sums[piece * PIECE_ROWS] = product_of(d[0]) + product_of(d[1]);
        next.release();
    }
}
// All of row r's product.
__device__ inline float product(const float* sums, int r) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WORKERS; w++) sum += sums[w * MOST_ROWS + r];
    return sum;
}

// Adds to sums, from first_row on, the products of the block's rows of a weight, of which `units`
// units of columns are next, and x.
__device__ inline void project(uint64* sums, int first_row, const element* x, int units,
                               Next& next) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    FragmentD d[TILES] = {};
#pragma unroll 2
    for (int unit = 0; unit < units; unit++) {
        const element* const rows = next.wait() + g * UNIT;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 own = load_vector(x + unit * UNIT, half);
#pragma unroll
            for (int turn = 0; turn < TILES; turn++) {
                const int tile = min(turn * WORKERS + warp, C_ROWS / 8 - 1);
                const int at = lane_offset(half) ^ g * PACK;  // TMA has swizzled the box
                multiply(d[turn], load_bits(rows + tile * 8 * UNIT + at), own);
            }
        }
        next.release();
    }
#pragma unroll
    for (int turn = 0; turn < TILES; turn++) {
        const int tile = turn * WORKERS + warp;
        if (has_product() && tile < C_ROWS / 8)
            add_to_sum(sums + sum_place(first_row + 8 * tile + g), product_of(d[turn]));
    }
}

// -------------------------------------------------------------------------------------------------
// what a block has in shared memory beside the ring. A float4 of attention's parts is of two
// channels: their sums of p * value, then the head's largest score and sum of p

struct Shared {
    Inbox<3 * HEAD_COLUMNS * int(sizeof(element))> qkv_inbox;
    Inbox<CLUSTER * HEAD_COLUMNS / 2 * int(sizeof(float4))> parts_inbox;
    Inbox<SLICE * int(sizeof(element))> act_inbox;
    alignas(16) element qkv[3][HEAD_COLUMNS];            // of the cluster's heads
    alignas(16) float4 parts[CLUSTER][HEAD_COLUMNS / 2];  // of attention, of each block
    float4 warp_parts[WORKERS][HEAD_COLUMNS / 2];         // and of each of this block's warps
    element normed[C], atty[HEAD_COLUMNS], act[SLICE];
    alignas(16) float sums[2][WORKERS * MOST_ROWS];
};
__shared__ Shared shared;

// -------------------------------------------------------------------------------------------------
// attention

constexpr float LOWEST = -1e30f;
static_assert(ROW_LANES * PACK == HS);

// The attention of a query to some positions. Scores are logarithms to base 2.
struct Part {
    float largest = LOWEST, total = 0.0f;
    Floats o = {};
    __device__ void scale_to(float now) {
        const float scale = exp2_approx(largest - now);
        largest = now, total *= scale;
#pragma unroll
        for (int e = 0; e < PACK; e++) o.x[e] *= scale;
    }
    __device__ void add(float score, const Floats& value) {
        scale_to(fmaxf(largest, score));
        const float p = exp2_approx(score - largest);
        total += p;
#pragma unroll
        for (int e = 0; e < PACK; e++) o.x[e] += p * value.x[e];
    }
    // All of a warp's groups of lanes.
    __device__ void merge() {
        float all = largest;
#pragma unroll
        for (int distance = ROW_LANES; distance < 32; distance *= 2)
            all = fmaxf(all, __shfl_xor_sync(0xffffffff, all, distance));
        scale_to(all);
#pragma unroll
        for (int distance = ROW_LANES; distance < 32; distance *= 2) {
            total += __shfl_xor_sync(0xffffffff, total, distance);
#pragma unroll
            for (int e = 0; e < PACK; e++)
                o.x[e] += __shfl_xor_sync(0xffffffff, o.x[e], distance);
        }
    }
};

// warp_parts = the attention of a head's query to this block's `count` positions, which are next,
// and, if has_new, to the new one.
__device__ inline void attend(int head, int count, bool has_new, Next& next) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / ROW_LANES,
        c = head * HS + lane % ROW_LANES * PACK;
    Floats q = load(shared.qkv[0] + c);
    const float scale =
        QK_NORM ? LOG2E * MODEL_QK_SCALE * inverse_length(q) : LOG2E / sqrtf(float(HS));
#pragma unroll
    for (int e = 0; e < PACK; e++) q.x[e] *= scale;
    Part part;
    const int all = count + has_new;
#pragma unroll 1
    for (int first = 0; first < all; first += POSITIONS) {
        const int here = min(POSITIONS, all - first);
        const bool is_piece = first < count;  // or only the new one is left
        const element* const keys = is_piece ? next.wait() + lane % ROW_LANES * PACK : nullptr;
#pragma unroll 1
        for (int i = warp * ROWS_AT_ONCE; i < here; i += WORKERS * ROWS_AT_ONCE) {
            const int at = min(i + group, here - 1);
            const bool is_new = first + at == count;
            const element* const key = is_new ? shared.qkv[1] + c : keys + at * HS;
            const element* const value = key + (is_new ? HEAD_COLUMNS : POSITIONS * HS);
            const Floats k = load(key), v = load(value);
            const float score = dot_product(q, k) * (QK_NORM ? inverse_length(k) : 1.0f);
            if (i + group < here) part.add(score, v);
        }
        if (is_piece) next.release();
    }
    part.merge();
    if (group > 0) return;
#pragma unroll
    for (int e = 0; e < PACK; e += 2)
        shared.warp_parts[warp][(c + e) / 2] =
            {part.o.x[e], part.o.x[e + 1], part.largest, part.total};
}

// Channels 2i and 2i + 1 of all parts, added up.
template <int COUNT>
__device__ inline float4 merged(const float4 (&parts)[COUNT][HEAD_COLUMNS / 2], int i) {
    float4 all = {0.0f, 0.0f, LOWEST, 0.0f};
#pragma unroll
    for (int n = 0; n < COUNT; n++) all.z = fmaxf(all.z, parts[n][i].z);
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const float4 part = parts[n][i];
        const float scale = exp2_approx(part.z - all.z);
        all.x += part.x * scale, all.y += part.y * scale, all.w += part.w * scale;
    }
    return all;
}

// atty = the attention of the cluster's heads: this block's part goes to the cluster, from whose
// parts each block makes all of it.
__device__ inline void exchange_parts(int own_rank, int l) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < HEAD_COLUMNS / 2; i += 32) {
        const float4 own = merged(shared.warp_parts, i);
        for (int rank = threadIdx.x / 32; rank < CLUSTER; rank += WORKERS)
            send(&shared.parts[own_rank][i], own, &shared.parts_inbox.full, rank);
    }
    shared.parts_inbox.wait(l);
    for (int i = threadIdx.x; i < HEAD_COLUMNS / 2; i += WORKER_THREADS) {
        const float4 all = merged(shared.parts, i);
        const float scale = inverse(all.w);
        put_pair(shared.atty + 2 * i, all.x * scale, all.y * scale);
    }
    workers_sync();
}
