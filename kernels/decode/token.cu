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
// ahead for the others. A small model's time is that of each block's own instructions, one after
// the other; a large one's is reading the weights. Both halves of a layer are one loop, whose code
// fits the instruction caches.

#include "decode/tile.cuh"
#include "decode/token_steps.cuh"
#include "gelu.cuh"
#include "rope.cuh"
#include "swiglu.cuh"

// -------------------------------------------------------------------------------------------------
// what a block has of the model

// A cluster that lacks a head, or rows of fc, computes the last ones once more: their columns of
// attproj, of fcproj lie beyond the weight, where TMA delivers zeros.
struct Place {
    const int rank = block_of_cluster(), cluster = blockIdx.x / CLUSTER;
    __device__ int head(int h) const { return min(cluster * HEADS + h, NH - 1); }
    // row r of the block's QKV_ROWS: its channel within the head; its row of QKV
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
        return Vp / ROWS * block / BLOCKS * ROWS;
    }
    // of the positions before this one
    __device__ int first_position(int position) const { return rank * parts_of(position, CLUSTER); }
    __device__ int positions(int position) const {
        return max(0, min(parts_of(position, CLUSTER), position - first_position(position)));
    }
};

// Of all layers, (L,NKV,maxT,HS); position: the token's.
struct Cache {
    element *keys, *values;
    int maxT, position;
    __device__ int64 at(int l, int head, int position) const {
        return (int64(l * NKV + head / GROUP) * maxT + position) * HS;
    }
};

// The thread that loads.
__device__ inline void load_all(const Weights& w, const TensorMap* attproj, const TensorMap* fcproj,
                                const Cache& cache) {
    const Place place;
    Loader loader;
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
#pragma unroll 1
        for (int h = 0; h < HEADS && !is_mlp; h++) {
            const int64 at = cache.at(l, place.head(h), place.first_position(cache.position));
            loader.positions(cache.keys + at, cache.values + at, place.positions(cache.position));
        }
        loader.columns(is_mlp ? fcproj : attproj, place.cluster * (is_mlp ? SLICE : HEAD_COLUMNS),
                       is_mlp ? SLICE : HEAD_COLUMNS, place.rank * C_ROWS, l);
    }
    const int first = place.first_token(blockIdx.x);
    loader.rows(w.head, first, place.first_token(blockIdx.x + 1) - first, Vp);
}

// -------------------------------------------------------------------------------------------------
// the warps that compute. In each half, a thread has rows r and r + 1 of a product, and sends them
// to one block of the cluster.

__device__ inline int receiver() { return threadIdx.x % CLUSTER; }
__device__ inline int own_row() { return threadIdx.x / CLUSTER * 2; }

// shared.qkv = queries, keys and values of the cluster's heads; keys and values also go to the
// cache. y: rows r and r + 1.
__device__ inline void exchange_qkv(float2 y, int r, int l, const Cache& cache,
                                    const Place& place) {
    const int third = r / THIRD;
    if (r < QKV_ROWS) {
        const uint32 pair = as_pair(y.x, y.y);
        send(&shared.qkv[third][place.rank * THIRD + r % THIRD], pair, &shared.qkv_inbox.full,
             receiver());
        if (third > 0 && receiver() == place.rank) {
            const int64 at = cache.at(l, place.head(place.rank * THIRD / HS), cache.position);
            element* const row = (third == 1 ? cache.keys : cache.values) + at;
            *reinterpret_cast<uint32*>(row + place.channel(r)) = pair;
        }
    }
    shared.qkv_inbox.wait(l);
}

// shared.act = the activations of the cluster's slice.
__device__ inline void exchange_activations(float2 y, int r, int l, const Place& place) {
    if (SWIGLU) {
        const float* const gates = shared.sums[0] + FC_ROWS + min(r, FC_ROWS - 2);
        y = {swiglu(y.x, product(gates, 0)), swiglu(y.y, product(gates, 1))};
    } else {
        y = {gelu(y.x), gelu(y.y)};
    }
    if (r < FC_ROWS)
        send(&shared.act[place.rank * FC_ROWS + r], as_pair(y.x, y.y), &shared.act_inbox.full,
             receiver());
    shared.act_inbox.wait(l);
}

// shared.normed = the norm of the residual stream after all layers. sums (2L,SUMS): 0 before.
__device__ inline void compute_layers(Stream& stream, Vectors& vectors, uint64* sums,
                                      const Weights& w, const float2* rope, const Cache& cache,
                                      const Place& place, Next& next) {
    const int r = own_row();
    const int qkv_row = place.qkv_row(min(r, QKV_ROWS - 2));
    const int fc_row = min(place.fc_row(min(r, FC_ROWS - 2)), F - 2);
    float2 angle = {1.0f, 0.0f};
    if (ROPE && r < 2 * THIRD) angle = rope[(cache.position * HS + place.channel(r)) / 2];
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
        const int rows = is_mlp ? UP_ROWS : QKV_ROWS;
        if (takes_part) {
            stream.normalize(shared.normed, vectors);
            multiply_rows(shared.sums[0], shared.normed, rows / PIECE_ROWS, next);
        }
        vectors.request(w, half + 1);
        if (!takes_part) continue;

        workers_sync();
        const float* const products = shared.sums[0] + min(r, rows - 2);
        float2 y = as_floats(bias);
        y = {y.x + product(products, 0), y.y + product(products, 1)};
        if (is_mlp) {
            exchange_activations(y, r, l, place);
        } else {
            if (ROPE) y = rotated(y.x, y.y, angle);
            exchange_qkv(y, r, l, cache, place);
#pragma unroll 1
            for (int h = 0; h < HEADS; h++)
                attend(h, place.positions(cache.position), place.rank == CLUSTER - 1, next);
            workers_sync();
            exchange_parts(place.rank, l);
        }
        project(sums + half * SUMS, place.rank * C_ROWS, is_mlp ? shared.act : shared.atty,
                (is_mlp ? SLICE : HEAD_COLUMNS) / UNIT, next);
    }
    stream.add_branch(sums + (2 * L - 1) * SUMS, FC_CLUSTERS, vectors);
    stream.normalize(shared.normed, vectors);
}

// Logits and tiles of this block's tokens, a thread for each; threads take turns, so that most can
// multiply.
__device__ inline void classify(float* logits, TileOfLogits* tiles, const element* bias,
                                float temperature, const Place& place, Next& next) {
    const int end = place.first_token(blockIdx.x + 1), r = threadIdx.x % ROUND;
    int turn = 0;
#pragma unroll 1
    for (int first = place.first_token(blockIdx.x); first < end; first += ROUND, turn++) {
        float* const sums = shared.sums[turn % 2];
        multiply_rows(sums, shared.normed, min(ROUND, end - first) / PIECE_ROWS, next);
        workers_sync();
        const int row = first + r;
        if (threadIdx.x / ROUND != turn % (WORKER_THREADS / ROUND) || row >= end) continue;
        const float x = product(sums, r) + (bias ? to_float(bias[row]) : 0.0f);
        put_logit(logits, tiles, row, x, temperature);
    }
}

// Block (WORKER_THREADS + 32); grid (BLOCKS). tokens (1,); logits (Vp,); tiles (Vp/ROWS,);
// keys and values (L,NKV,maxT,HS) get the new position's; sums (2,2L,SUMS): sums[step % 2] is 0
// before, the other one after. attproj (L,C,Q) and fcproj (L,C,F): TensorMaps of boxes of C_ROWS
// rows, UNIT columns. Dynamic shared memory: SLOTS pieces.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WORKER_THREADS + 32, 1)
decode_token(float* logits, TileOfLogits* tiles, uint64* sums, element* keys, element* values,
             const int* tokens, const Weights weights, MAP attproj, MAP fcproj, const float2* rope,
             const Control* control, int maxT) {
    let_next_begin();
    if (threadIdx.x == 0) {
        ring.init(1, WORKERS);
        shared.qkv_inbox.init();
        shared.parts_inbox.init();
        shared.act_inbox.init();
    }
    __syncthreads();
    cluster_sync();
    const Cache cache = {keys, values, maxT, control->position};
    if (threadIdx.x < WORKER_THREADS) {
        const Place place;
        Next next;
        Stream stream;
        Vectors vectors;
        vectors.request(weights, 0);
        const int parity = control->step % 2;
        zero_sums(sums + (1 - parity) * (2 * L * SUMS));
        stream.embed(weights, tokens[0], cache.position);
        if (QK_NORM) stream.normalize_itself(weights.ln0w);
        compute_layers(stream, vectors, sums + parity * (2 * L * SUMS), weights, rope, cache, place,
                       next);
        classify(logits, tiles, weights.headb, control->temperature, place, next);
    } else if (threadIdx.x == WORKER_THREADS) {
        load_all(weights, &attproj, &fcproj, cache);
    }
    __syncwarp();
    cluster_sync();  // no block ends while another one may send to it
}
