// The steps of decode_token, each by all worker warps of a block: the residual stream and its
// norms, products, attention.

#pragma once

#include "decode/token.cuh"
#include "mma.cuh"

__device__ constexpr int parts_of(int n, int part) { return (n + part - 1) / part; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }

constexpr int L = TOKEN_LAYERS, GROUP = NH / NKV;
// of a cluster: heads, each with its keys and values; columns of attproj, of fcproj
constexpr int HEADS = TOKEN_HEADS, HEAD_COLUMNS = HEADS * HS, SLICE = TOKEN_SLICE;
constexpr int ATT_CLUSTERS = parts_of(NH, HEADS), FC_CLUSTERS = parts_of(F, SLICE);
// of a block: rows of queries, or keys, or values; of fc
constexpr int THIRD = HEAD_COLUMNS / CLUSTER, FC_ROWS = SLICE / CLUSTER;
constexpr int QKV_ROWS = 3 * THIRD, UP_ROWS = (SWIGLU ? 2 : 1) * FC_ROWS;
constexpr int ROUND = 64;  // rows of the classifier's, at a time
constexpr int MOST_ROWS = most(ROUND, most(QKV_ROWS, UP_ROWS));  // of a product

static_assert(HS % UNIT == 0 && HS % THIRD == 0, "a block has rows of one head");
static_assert(SLICE % UNIT == 0 && F % PIECE_ROWS == 0, "pieces are whole");
static_assert(ATT_CLUSTERS <= CLUSTERS && FC_CLUSTERS <= CLUSTERS);
static_assert(most(QKV_ROWS, FC_ROWS) / 2 * CLUSTER <= WORKER_THREADS, "a thread sends once");

constexpr int BATCH = SLOTS < 4 ? SLOTS : 4;            // pieces that are multiplied together
constexpr int PAIRS = parts_of(C / 2, WORKER_THREADS);  // of channels, for a thread
constexpr int TILES = parts_of(C_ROWS / 8, WORKERS);    // of attproj and fcproj, for a warp

struct Weights {
    const element *wte, *wpe, *ln0w, *lnfw, *lnfb, *head, *headb;
    const element *ln1w, *ln1b, *qkvw, *qkvb, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojb;
};

// -------------------------------------------------------------------------------------------------
// the residual stream, and its norms. A thread has two channels at a time, those of the others of
// its warp: what its warp multiplies.

__device__ inline uint32 load_pair(const element* at) {
    return *reinterpret_cast<const uint32*>(at);
}

__device__ inline int pair_of(int p) { return p * WORKER_THREADS + threadIdx.x; }
__device__ inline bool has_pair(int p) {  // the same for all lanes of a warp
    return (p + 1) * WORKER_THREADS <= C / 2 || pair_of(p) < C / 2;
}

// A thread's part of the vectors of a half's norm, and of the sum before it, requested long before.
struct Vectors {
    uint32 branch_bias[PAIRS], weight[PAIRS], bias[PAIRS];
    __device__ void request(const Weights& w, int half) {
        const bool is_mlp = half % 2, is_last = half == 2 * L;
        const int at = half / 2 * C;
        const element* const of_weight = is_last ? w.lnfw : (is_mlp ? w.ln2w : w.ln1w) + at;
        const element* const of_bias = is_last ? w.lnfb : (is_mlp ? w.ln2b : w.ln1b) + at;
        const element* const of_branch = is_mlp ? w.attprojb + at : w.fcprojb + at - C;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            branch_bias[p] = weight[p] = bias[p] = 0;
            if (!has_pair(p)) continue;
            weight[p] = load_pair(of_weight + 2 * pair_of(p));
            if (!RMS) bias[p] = load_pair(of_bias + 2 * pair_of(p));
            if (BIASES && half > 0) branch_bias[p] = load_pair(of_branch + 2 * pair_of(p));
        }
    }
};

struct Stream {
    float2 x[PAIRS] = {};
    float mean = 0.0f;

    // x = wte[token] + wpe[position]
    __device__ void embed(const Weights& w, int token, int position) {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            if (!has_pair(p)) continue;
            x[p] = as_floats(load_pair(w.wte + int64(token) * C + 2 * pair_of(p)));
            if (ROPE) continue;
            const float2 y = as_floats(load_pair(w.wpe + int64(position) * C + 2 * pair_of(p)));
            x[p] = {x[p].x + y.x, x[p].y + y.y};
        }
    }

    // x += the branch's bias and its sums over `count` clusters, as soon as these are complete.
    __device__ void add_branch(const uint64* sums, int count, const Vectors& vectors) {
        uint64 words[PAIRS][2];
        const uint32 begun = cycles();
        for (bool complete = false; !complete; trap_if_late(begun)) {
#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                if (has_pair(p)) load_sums(words[p], sums + sum_place(2 * pair_of(p)));
            complete = true;
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                if (!has_pair(p)) continue;
                complete &= count_of(words[p][0]) == count && count_of(words[p][1]) == count;
            }
        }
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            if (!has_pair(p)) continue;
            const float2 bias = as_floats(vectors.branch_bias[p]);
            x[p].x += bias.x + value_of(words[p][0]);
            x[p].y += bias.y + value_of(words[p][1]);
        }
    }

    // Return 1 / the standard deviation of all channels; with RMS, the mean counts as 0. All
    // distances are from the mean before, which is near: the squares do not cancel.
    __device__ float rstd() {
        __shared__ float2 of_warps[WORKERS];
        float2 sum = {};  // of the distances, of their squares
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            if (!has_pair(p)) continue;
            const float2 y = {x[p].x - mean, x[p].y - mean};
            sum = {sum.x + y.x + y.y, sum.y + y.x * y.x + y.y * y.y};
        }
        sum = {RMS ? 0.0f : warp_sum(sum.x), warp_sum(sum.y)};
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
        workers_sync();
        sum = {};
#pragma unroll
        for (int w = 0; w < WORKERS; w++)
            sum = {sum.x + of_warps[w].x, sum.y + of_warps[w].y};
        const float change = RMS ? 0.0f : sum.x * (1.0f / C);
        mean += change;
        return rsqrtf(sum.y * (1.0f / C) - change * change + float(DECODE_EPS));
    }

    // normed (C,) = the norm of x; a warp writes what it reads.
    __device__ void normalize(element* normed, const Vectors& vectors) {
        const float scale = rstd();
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            if (!has_pair(p)) continue;
            const float2 weight = as_floats(vectors.weight[p]), bias = as_floats(vectors.bias[p]);
            put_pair(normed + 2 * pair_of(p), (x[p].x - mean) * scale * weight.x + bias.x,
                     (x[p].y - mean) * scale * weight.y + bias.y);
        }
        __syncwarp();
    }

    // x = its RMSNorm, for the speed run's model
    __device__ void normalize_itself(const element* weight) {
        const float scale = rstd();
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            if (!has_pair(p)) continue;
            const float2 gain = as_floats(load_pair(weight + 2 * pair_of(p)));
            x[p] = {x[p].x * scale * gain.x, x[p].y * scale * gain.y};
        }
        workers_sync();  // before the next sums of warps
    }
};

// -------------------------------------------------------------------------------------------------
// products of a weight and one vector, on the tensor cores, 8 rows of the weight at a time. Of the
// 16 rows of the other operand, two are used: even rows of the weight meet a chunk of 32 elements
// of the vector in row 0, odd rows the next chunk in row 1, and then the other way around. So the 8
// lanes of a quarter-warp, 4 of each of two rows that are a multiple of 128 bytes apart, meet in no
// bank.

__device__ inline void multiply(FragmentD (&d)[2], uint4 x, uint4 w) {
    mma(d[0], {x.x, 0, x.y, 0}, {w.x, w.y});
    mma(d[1], {x.z, 0, x.w, 0}, {w.z, w.w});
}
// Lanes 0 to 7 have a row's product each: row 2t + g.
__device__ inline int row_of_lane() { return threadIdx.x % 4 * 2 + threadIdx.x % 32 / 4; }
__device__ inline float product_of(const FragmentD (&d)[2]) {
    return threadIdx.x % 32 / 4 == 0 ? d[0][0] + d[1][0] : d[0][1] + d[1][1];
}

// sums (WORKERS,MOST_ROWS): each warp's part of the products of the next pieces, rows of a weight
// (.,C), and the vector x, of which it has units of 64 elements.
__device__ inline void multiply_rows(float* sums, const element* x, int pieces, Cursor& cursor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int first = 0; first < pieces; first += BATCH) {
        const int count = min(BATCH, pieces - first);
        FragmentD d[BATCH][2] = {};
        const element* rows[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            rows[i] = cursor.after(min(i, count - 1)).data() + g * C;
        cursor.wait_full(count);
#pragma unroll 1
        for (int unit = warp; unit < C / UNIT; unit += WORKERS) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = unit * UNIT + ((half ^ (g & 1)) * 4 + t) * PACK;
                const uint4 y = load_bits(x + at);
#pragma unroll
                for (int i = 0; i < BATCH; i++) multiply(d[i], y, load_bits(rows[i] + at));
            }
        }
        float* const own = sums + warp * MOST_ROWS + first * PIECE_ROWS + row_of_lane();
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float product = product_of(d[i]);
            if (lane < 8 && i < count) own[i * PIECE_ROWS] = product;
        }
        cursor.release(count);
    }
}
// The products of rows r and r + 1, plus a bias.
__device__ inline float2 pair_of_products(const float* sums, int r, uint32 bias = 0) {
    float2 sum = as_floats(bias);
#pragma unroll
    for (int w = 0; w < WORKERS; w++) {
        const float2 y = *reinterpret_cast<const float2*>(sums + w * MOST_ROWS + r);
        sum = {sum.x + y.x, sum.y + y.y};
    }
    return sum;
}

// Adds to sums, from first_row on, the products of the block's rows of a weight, of which `units`
// units of columns are next in the ring, and x.
__device__ inline void project(uint64* sums, int first_row, const element* x, int units,
                               Cursor& cursor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    FragmentD d[TILES][2] = {};
#pragma unroll 1
    for (int first = 0; first < units; first += BATCH) {
        const int count = min(BATCH, units - first);
        cursor.wait_full(count);
#pragma unroll 2
        for (int i = 0; i < 2 * count; i++) {  // halves of units
            const int pack = (i % 2 ^ (g & 1)) * 4 + t;
            const uint4 y = load_bits(x + (first + i / 2) * UNIT + pack * PACK);
            // TMA has swizzled the box
            const element* const w =
                cursor.after(i / 2).data() + g * UNIT + (pack ^ g) * PACK;
#pragma unroll
            for (int turn = 0; turn < TILES; turn++) {
                const int tile = min(turn * WORKERS + warp, C_ROWS / 8 - 1);
                multiply(d[turn], y, load_bits(w + tile * 8 * UNIT));
            }
        }
        cursor.release(count);
    }
#pragma unroll
    for (int turn = 0; turn < TILES; turn++) {
        const int tile = turn * WORKERS + warp;
        const float product = product_of(d[turn]);
        if (lane < 8 && tile < C_ROWS / 8)
            add_to_sum(sums + sum_place(first_row + 8 * tile + row_of_lane()), product);
    }
}

// -------------------------------------------------------------------------------------------------
// what a block has in shared memory beside the ring. Part of attention: for each two channels, the
// sums of p * value, the largest score, the sum of p

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

// -------------------------------------------------------------------------------------------------
// attention: lanes that share a row of keys or values have 16 bytes of it each

constexpr int ROW_LANES = DECODE_ROW_LANES, ROWS_AT_ONCE = 32 / ROW_LANES;
constexpr float LOWEST = -1e30f;
static_assert(ROW_LANES * PACK == HS);

// x * y, by the lanes that share a row.
__device__ inline float dot_product(const Floats& x, const Floats& y) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < PACK; e++) sum += x.x[e] * y.x[e];
#pragma unroll
    for (int distance = ROW_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    return sum;
}
__device__ inline float inverse_length(const Floats& x) {
    return rsqrtf(dot_product(x, x) * (1.0f / HS) + float(DECODE_EPS));
}

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

// warp_parts = the attention of a head's query to this block's `count` positions, which are next in
// the ring, and, if has_new, to the new one.
__device__ inline void attend(Shared& shared, int head, int count, bool has_new, Cursor& cursor) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / ROW_LANES,
        c = head * HS + lane % ROW_LANES * PACK;
    Floats q = load(shared.qkv[0] + c);
    const float scale =
        QK_NORM ? LOG2E * MODEL_QK_SCALE * inverse_length(q) : LOG2E / sqrtf(float(HS));
#pragma unroll
    for (int e = 0; e < PACK; e++) q.x[e] *= scale;
    Part part;
#pragma unroll 1
    for (int first = 0;; first += POSITIONS) {
        const bool is_new = first >= count;
        const element* const keys =
            is_new ? shared.qkv[1] + c : cursor.data() + lane % ROW_LANES * PACK;
        const element* const values = keys + (is_new ? HEAD_COLUMNS : POSITIONS * HS);
        const int here = is_new ? has_new : min(POSITIONS, count - first);
        if (!is_new) cursor.wait_full(1);
#pragma unroll 1
        for (int i = warp * ROWS_AT_ONCE; i < here; i += WORKERS * ROWS_AT_ONCE) {
            const bool exists = i + group < here;
            const int at = exists ? (i + group) * HS : 0;
            const Floats k = load(keys + at), v = load(values + at);
            const float score = dot_product(q, k) * (QK_NORM ? inverse_length(k) : 1.0f);
            if (exists) part.add(score, v);
        }
        if (is_new) break;
        cursor.release(1);
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
// parts each block makes all of it. turn: the layer.
__device__ inline void exchange_parts(Shared& shared, int own_rank, int turn) {
#pragma unroll 1
    for (int n = threadIdx.x; n < CLUSTER * HEAD_COLUMNS / 2; n += WORKER_THREADS) {
        const int i = n % (HEAD_COLUMNS / 2), rank = n / (HEAD_COLUMNS / 2);
        send(&shared.parts[own_rank][i], merged(shared.warp_parts, i), &shared.parts_inbox.full,
             rank);
    }
    shared.parts_inbox.wait(turn);
    for (int i = threadIdx.x; i < HEAD_COLUMNS / 2; i += WORKER_THREADS) {
        const float4 all = merged(shared.parts, i);
        const float scale = inverse(all.w);
        put_pair(shared.atty + 2 * i, all.x * scale, all.y * scale);
    }
}
