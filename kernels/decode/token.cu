// A whole pass over one token of one sequence in one kernel, from the embedding to the logits. All
// its blocks are resident, one on a multiprocessor. A layer has two sums over the GPU, after
// attproj and after fcproj, and nothing else that all blocks wait for: a cluster has whole heads,
// and a slice of F, and its blocks exchange queries, keys, values, parts of attention and
// activations by messages.
//
//     a block's rows of QKV, of its cluster's heads      -> the cluster's blocks
//     its part of the positions, of all these heads      -> the cluster's blocks
//     its rows of attproj, of the heads' columns         -> sums over the clusters, read by all
//     its rows of fc, of its cluster's slice             -> the cluster's blocks
//     its rows of fcproj, of the slice's columns         -> sums over the clusters, read by all
//
// Every block keeps the residual stream for itself. One thread loads weights, keys and values
// ahead; what the others wait for is the latency of this chain, and memory, whichever takes longer.
// Both halves of a layer are one loop: each instruction is executed once a half, so to fetch what
// does not fit the instruction caches would take longer than to execute it.

#include "decode/token_steps.cuh"
#include "cap.cuh"
#include "gelu.cuh"
#include "rope.cuh"
#include "swiglu.cuh"

// -------------------------------------------------------------------------------------------------
// what a block has of the model

// Where a cluster lacks a head, or rows of fc, it has the last ones again: they meet columns of
// attproj, of fcproj that do not exist, which are 0.
struct Place {
    const int rank = rank_in_cluster(), cluster = blockIdx.x / CLUSTER;
    __device__ int head(int h) const { return min(cluster * HEADS + h, NH - 1); }
    // row r of the block's QKV_ROWS, within its head; which row of QKV that is
    __device__ int channel(int r) const { return (rank * THIRD + r % THIRD) % HS; }
    __device__ int qkv_row(int r) const {
        const int third = r / THIRD, own = head(rank * THIRD / HS);
        return (third ? Q + (third - 1) * KV + own / GROUP * HS : own * HS) + channel(r);
    }
    __device__ int fc_row(int r) const { return cluster * SLICE + rank * FC_ROWS + r; }
    __device__ bool takes_part(bool is_mlp) const {
        return cluster < (is_mlp ? FC_CLUSTERS : ATT_CLUSTERS);
    }
    // of the logits: whole tiles
    __device__ int first_token(int block) const {
        return Vp / DECODE_ROWS * block / BLOCKS * DECODE_ROWS;
    }
    // of the positions before this one; none, if `count` is not positive
    __device__ int first_position(int position) const { return rank * parts_of(position, CLUSTER); }
    __device__ int count(int position) const {
        return min(parts_of(position, CLUSTER), position - first_position(position));
    }
};

// The thread that loads.
__device__ inline void load_all(const Weights& w, const TensorMap* attproj, const TensorMap* fcproj,
                                const element* keys, const element* values, const Control* control,
                                int maxT) {
    const Place place;
    Loader loader;
    int position = 0;
#pragma unroll 1
    for (int half = 0; half < 2 * L; half++) {
        const int l = half / 2;
        const bool is_mlp = half % 2;
        if (!place.takes_part(is_mlp)) continue;
        const element* const weight =
            is_mlp ? w.fcw + int64(l) * (UP_ROWS / FC_ROWS * F) * C : w.qkvw + int64(l) * QKV * C;
#pragma unroll 1
        for (int part = 0; part < (is_mlp ? UP_ROWS / FC_ROWS : 3); part++)
            loader.rows(weight, is_mlp ? part * F + place.fc_row(0) : place.qkv_row(part * THIRD),
                        is_mlp ? FC_ROWS : THIRD, is_mlp ? (part + 1) * F : QKV);
        if (half == 0) {
            wait_for_inputs();
            asm volatile("fence.proxy.async;" ::: "memory");  // TMA reads what others wrote
            position = control->position;
        }
#pragma unroll 1
        for (int h = 0; h < HEADS && !is_mlp; h++) {
            const int64 first = int64(l * NKV + place.head(h) / GROUP) * maxT
                + place.first_position(position);
            loader.positions(keys + first * HS, values + first * HS, place.count(position));
        }
        loader.columns(is_mlp ? fcproj : attproj, place.cluster * (is_mlp ? SLICE : HEAD_COLUMNS),
                       is_mlp ? SLICE : HEAD_COLUMNS, place.rank * C_ROWS, l);
    }
    const int first = place.first_token(blockIdx.x);
    loader.rows(w.head, first, place.first_token(blockIdx.x + 1) - first, Vp);
}

// -------------------------------------------------------------------------------------------------
// the warps that compute

// f(x, y) over the lanes that have a tile's logits.
template <class F>
__device__ inline float over_tile(float x, const F& f) {
#pragma unroll
    for (int distance = 1; distance < DECODE_ROWS / 2; distance *= 2)
        x = f(x, __shfl_xor_sync(0xffffffff, x, distance));
    return x;
}

// Tokens `at` and at + 1 have logits y; what decode_logits writes of them and of their tile. All
// lanes of a warp call it, those that `exist` write.
__device__ inline void put_logits(float* logits, TileOfLogits* tiles, int at, float2 y, bool exists,
                                  float temperature) {
    const bool is_token[2] = {at < V, at + 1 < V};
    const auto sum_of = [&](float largest, float temperature) {
        return over_tile((is_token[0] ? expf((y.x - largest) / temperature) : 0.0f)
                             + (is_token[1] ? expf((y.y - largest) / temperature) : 0.0f),
                         [](float a, float b) { return a + b; });
    };
    const float largest = over_tile(
        fmaxf(is_token[0] ? y.x : -INFINITE, is_token[1] ? y.y : -INFINITE),
        [](float a, float b) { return fmaxf(a, b); });
    const float sum = sum_of(largest, 1.0f);
    const float weight =
        temperature != 1.0f && temperature > 0.0f ? sum_of(largest, temperature) : sum;
    if (!exists) return;
    put_pair(logits + at, y.x, y.y);
    if (at % DECODE_ROWS == 0) tiles[at / DECODE_ROWS] = {largest, sum, weight, 0.0f};
}

// Logits and tiles of this block's tokens. Warps take turns at what follows a product.
__device__ inline void classify(Shared& shared, float* logits, TileOfLogits* tiles,
                                const element* bias, float temperature, const Place& place,
                                Cursor& cursor) {
    const int end = place.first_token(blockIdx.x + 1), own = threadIdx.x % 32 * 2;
    int turn = 0;
#pragma unroll 1
    for (int first = place.first_token(blockIdx.x); first < end; first += ROUND, turn++) {
        const int rows = min(ROUND, end - first);
        float* const sums = shared.sums[turn % 2];
        multiply_rows(sums, shared.normed, rows / PIECE_ROWS, cursor);
        workers_sync();
        if (threadIdx.x / 32 != turn % WORKERS) continue;
        const int row = min(own, rows - 2);
        const float2 y =
            pair_of_products(sums, row, bias ? load_pair(bias + first + row) : 0);
        put_logits(logits, tiles, first + own, {capped(y.x), capped(y.y)}, own < rows, temperature);
    }
}

// act = the activations of the cluster's slice; a thread sends those of rows r and r + 1 to one
// block.
__device__ inline void exchange_activations(Shared& shared, const Place& place, float2 y, int r,
                                            int to, int turn) {
    if (SWIGLU) {
        const float2 gate = pair_of_products(shared.sums[0], FC_ROWS + min(r, FC_ROWS - 2));
        y = {swiglu(y.x, gate.x), swiglu(y.y, gate.y)};
    } else {
        y = {gelu(y.x), gelu(y.y)};
    }
    if (r < FC_ROWS)
        send(&shared.act[place.rank * FC_ROWS + r], as_pair(y.x, y.y), &shared.act_inbox.full, to);
    shared.act_inbox.wait(turn);
}

// qkv = queries, keys and values of the cluster's heads, likewise; keys and values also go to the
// cache.
__device__ inline void exchange_qkv(Shared& shared, const Place& place, float2 y, int r, int to,
                                    int turn, element* keys, element* values, int64 maxT,
                                    int position) {
    const int third = r / THIRD;
    if (r < QKV_ROWS) {
        const uint32 pair = as_pair(y.x, y.y);
        send(&shared.qkv[third][place.rank * THIRD + r % THIRD], pair, &shared.qkv_inbox.full, to);
        if (third > 0 && to == place.rank) {
            const int64 head = turn * NKV + place.head(place.rank * THIRD / HS) / GROUP;
            element* const cache = third == 1 ? keys : values;
            *reinterpret_cast<uint32*>(cache + (head * maxT + position) * HS + place.channel(r)) =
                pair;
        }
    }
    shared.qkv_inbox.wait(turn);
}

// normed = the norm of the residual stream after all layers.
__device__ inline void compute_layers(Shared& shared, Stream& stream, Vectors& vectors,
                                      uint64* sums, element* keys, element* values,
                                      const Weights& w, const float2* rope, const Place& place,
                                      int position, int maxT, Cursor& cursor) {
    // in each half, a thread has rows r and r + 1, for one block
    const int to = threadIdx.x % CLUSTER, r = threadIdx.x / CLUSTER * 2;
    const int qkv_row = place.qkv_row(min(r, QKV_ROWS - 2));
    const int fc_row = min(place.fc_row(min(r, FC_ROWS - 2)), F - 2);
    float2 angle = {1.0f, 0.0f};
    if (ROPE && r < 2 * THIRD) angle = rope[(position * HS + place.channel(r)) / 2];
#pragma unroll 1
    for (int half = 0; half < 2 * L; half++) {
        const int l = half / 2;
        const bool is_mlp = half % 2, takes_part = place.takes_part(is_mlp);
        uint32 bias = 0;  // requested early
        if (BIASES && takes_part)
            bias = load_pair(is_mlp ? w.fcb + l * F + fc_row : w.qkvb + l * QKV + qkv_row);
        if (half > 0)
            stream.add_branch(sums + (half - 1) * SUMS, is_mlp ? ATT_CLUSTERS : FC_CLUSTERS,
                              vectors);
        if (takes_part) stream.normalize(shared.normed, vectors);
        vectors.request(w, half + 1);
        if (!takes_part) continue;

        const int rows = is_mlp ? UP_ROWS : QKV_ROWS;
        multiply_rows(shared.sums[0], shared.normed, rows / PIECE_ROWS, cursor);
        workers_sync();
        float2 y = pair_of_products(shared.sums[0], min(r, rows - 2), bias);
        if (is_mlp) {
            exchange_activations(shared, place, y, r, to, l);
        } else {
            if (ROPE) y = rotated(y.x, y.y, angle);
            exchange_qkv(shared, place, y, r, to, l, keys, values, maxT, position);
#pragma unroll 1
            for (int h = 0; h < HEADS; h++)
                attend(shared, h, place.count(position), place.rank == CLUSTER - 1, cursor);
            workers_sync();
            exchange_parts(shared, place.rank, l);
            workers_sync();
        }
        project(sums + half * SUMS, place.rank * C_ROWS, is_mlp ? shared.act : shared.atty,
                (is_mlp ? SLICE : HEAD_COLUMNS) / UNIT, cursor);
    }
    stream.add_branch(sums + (2 * L - 1) * SUMS, FC_CLUSTERS, vectors);
    stream.normalize(shared.normed, vectors);
}

__device__ inline void compute_all(Shared& shared, float* logits, TileOfLogits* tiles,
                                   uint64* sums, element* keys, element* values, const int* tokens,
                                   const Weights& w, const float2* rope, const Control* control,
                                   int maxT) {
    const Place place;
    Cursor cursor;
    Stream stream;
    Vectors vectors;
    vectors.request(w, 0);
    wait_for_inputs();
    const int position = control->position, step = control->step;
    // those of the step before become 0 for the next one
    uint64* const others = sums + (step + 1) % 2 * (2 * L * SUMS);
#pragma unroll 1
    for (int i = blockIdx.x * WORKER_THREADS + threadIdx.x; i < 2 * L * C;
         i += BLOCKS * WORKER_THREADS)
        others[sum_place(i)] = 0;
    stream.embed(w, tokens[0], position);
    if (QK_NORM) stream.normalize_itself(w.ln0w);
    compute_layers(shared, stream, vectors, sums + step % 2 * (2 * L * SUMS), keys, values, w, rope,
                   place, position, maxT, cursor);
    classify(shared, logits, tiles, w.headb, control->temperature, place, cursor);
}

// Block (WORKER_THREADS + 32); grid (BLOCKS). logits (Vp,); tiles (Vp/DECODE_ROWS,); keys and
// values (L,NKV,maxT,HS) get the new position's; sums (2,2L,SUMS): the half of the step's parity is
// 0 before, the other one after. attproj (L,C,Q) and fcproj (L,C,F): TensorMaps of boxes of C_ROWS
// rows, UNIT columns. Dynamic shared memory: the ring.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WORKER_THREADS + 32, 1)
decode_token(float* logits, TileOfLogits* tiles, uint64* sums, element* keys, element* values,
             const int* tokens, const Weights weights, MAP attproj, MAP fcproj, const float2* rope,
             const Control* control, int maxT) {
    __shared__ Shared shared;
    let_next_begin();
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int s = 0; s < SLOTS; s++) {
            mbarrier_init(&ring_full[s], 1);
            mbarrier_init(&ring_empty[s], WORKERS);
        }
        shared.qkv_inbox.init();
        shared.parts_inbox.init();
        shared.act_inbox.init();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < WORKER_THREADS) {
        compute_all(shared, logits, tiles, sums, keys, values, tokens, weights, rope, control,
                    maxT);
    } else if (threadIdx.x == WORKER_THREADS) {
        load_all(weights, &attproj, &fcproj, keys, values, control, maxT);
    }
    __syncwarp();
    cluster_sync();  // no block ends while another one may send to it
}
