// Text generation: a forward pass over T more positions of each of B sequences, whose keys and values are kept, and the
// next token of each.
//
//     decode_embed      wte[token] + wpe[position]                                      residual, branches =
//     decode_layernorm  residual, layernorm, unless the matmul does it                  residual, normed =
//     decode_qkv        residual, layernorm, matmul; keys and values go to the cache    residual, query, keys, values =
//     decode_attention  softmax(query @ keys^T / sqrt(HS)) @ values                     atty =
//     decode_project    matmul, of atty or fch_gelu                                     branches =
//     decode_fc         residual, layernorm, matmul, GELU                               residual, fch_gelu =
//     decode_logits     residual, layernorm, matmul                                     logits, tiles =
//     decode_sample     draws the next token                                            tokens, randoms, control =
//
// train_gpt2.py's Decoder is the specification, llmc/sampler.py's Choice that of decode_sample. There are N = B*T rows.
// residual (N,C) and logits (B,Vp) are float32; query and atty (N,C), fch_gelu (N,4C), keys and values (B,NH,maxT,HS)
// are elements. The position is in GPU memory, so that one graph is every step. `residual` above: what decode_project
// left in `branches`, a part for each C of its inner dimension, is added to the residual stream. Many rows have kernels
// of their own, *_many, for all but the first and the last one above; in place of decode_project there are two, for
// attproj and fcproj, which leave each part in pieces. A row's bits do not depend on who else is there.
//
// A step reads all weights once: that is its floor; what it waits for otherwise is one kernel after the other. So each
// begins as early as there is room, requests its weights, and only then waits for its inputs (programmatic dependent
// launch); and its code is short, because it is fetched for a single pass. The matmuls are in decode_matmul.cu,
// decode_many.cu and decode_logits.cu.

#include "decode.cuh"
#include "softmax.cuh"

// Block (any number); grid (N). branches (4,N,C) = 0, for the first layernorm.
extern "C" __global__ void decode_embed(float* residual, float* branches, const int* tokens, const element* wte,
                                        const element* wpe, const Control* control, int T) {
    let_next_begin();
    wait_for_inputs();
    const int n = blockIdx.x;
    const element *token = wte + int64(tokens[n]) * C, *position = wpe + int64(control->position + n % T) * C;
    for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
        Floats x = load(token + c);
        const Floats y = load(position + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) x.x[k] += y.x[k];
        store(residual + int64(n) * C + c, x);
        for (int part = 0; part < 4; part++) store(branches + (int64(part) * gridDim.x + n) * C + c, Floats{});
    }
}

// Block (THREADS); grid (N).
extern "C" __global__ void __launch_bounds__(THREADS)
decode_layernorm(element* normed, float* residual, const float* inp, const float* branches, const element* branch_bias,
                 const element* weight, const element* bias, int count) {
    let_next_begin();
    const int n = blockIdx.x, N = gridDim.x;
    const Residual stream = {residual, inp, branches};
    const Vectors vectors(branch_bias, weight, bias);
    element* const to = normed + int64(n) * C;
    wait_for_inputs();
    if (count == 1) normalize<1>(to, stream, vectors, n, N, true);
    else normalize<4>(to, stream, vectors, n, N, true);
}

// The same where decode_attproj_many or decode_fcproj_many has left the parts in pieces. Given the second bound, the
// compiler takes enough registers to request all pieces at once.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
decode_layernorm_many(element* normed, float* residual, const float* inp, const float* branches,
                      const element* branch_bias, const element* weight, const element* bias, int count) {
    let_next_begin();
    const int n = blockIdx.x, N = gridDim.x;
    const Residual stream = {residual, inp, branches};
    const Vectors vectors(branch_bias, weight, bias);
    element* const to = normed + int64(n) * C;
    wait_for_inputs();
    if (count == 1) normalize<1, DECODE_PIECES>(to, stream, vectors, n, N, true);
    else normalize<4, DECODE_PIECES>(to, stream, vectors, n, N, true);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention: SPLIT positions of a head at a time; the last block of a head adds up all parts

constexpr int SPLIT = DECODE_SPLIT;
constexpr int ROW_LANES = DECODE_ROW_LANES, ROWS_AT_ONCE = 32 / ROW_LANES;  // of a warp
constexpr int COUNT = SPLIT / (WARPS * ROWS_AT_ONCE);                       // positions of a group of lanes
constexpr int PART = HS + 2;  // floats: the largest score, the sum of p = exp(score - largest), and that of p * value

static_assert(ROW_LANES * PACK >= HS && THREADS >= HS, "a lane for each 16 bytes, a thread a channel");
static_assert(SPLIT % (WARPS * ROWS_AT_ONCE) == 0, "all warps have equally many positions");

// What `count` parts are as one, a channel each thread. read(i): float i of the parts.
template <class Read>
__device__ inline void merge_parts(const Read& read, int count, float& largest, float& sum, float& out) {
    largest = -INFINITE, sum = out = 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; i++) largest = fmaxf(largest, read(i * PART));
#pragma unroll 4
    for (int i = 0; i < count; i++) {
        const float scale = expf(read(i * PART) - largest);
        sum += read(i * PART + 1) * scale;
        out += read(i * PART + 2 + threadIdx.x) * scale;
    }
}

// What both kernels below do. MANY: values are copied to shared memory, COUNT times 16 bytes for each thread, rather
// than held in registers, so that a multiprocessor has room for three blocks.
template <bool MANY>
__device__ inline void attend(element* atty, float* parts, int* arrived, const element* query, const element* keys,
                              const element* values, const Control* control, int maxT, int T, uint4* values_here) {
    __shared__ float warp_parts[WARPS * PART];
    __shared__ bool is_last;
    const int h = blockIdx.x, n = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = n * NH + h;
    let_next_begin();
    const int before = control->position, count = before + n % T + 1;  // positions: of earlier passes, all
    const int splits = (count + SPLIT - 1) / SPLIT, blocks = min(splits, int(gridDim.y));  // with work to do
    if (blockIdx.y >= blocks) return;

    const int c = lane % ROW_LANES * PACK, channel = threadIdx.x;
    const bool has_channels = c < HS;
    const int64 start = int64(n / T * NH + h) * maxT * HS + c;
    float* const head_parts = parts + int64(head) * ((maxT + SPLIT - 1) / SPLIT) * PART;
    Floats q = {};
    for (int s = blockIdx.y; s < splits; s += blocks) {
        uint4 k[COUNT] = {}, v[COUNT] = {};
        uint4* const mine = values_here + threadIdx.x;
        const auto position = [&](int i) {
            return s * SPLIT + (i * WARPS + warp) * ROWS_AT_ONCE + lane / ROW_LANES;
        };
        const auto load_positions = [&](int from, int to) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (!has_channels || position(i) < from || position(i) >= to) continue;
                const int64 at = start + int64(position(i)) * HS;
                k[i] = load_bits(keys + at);
                if (!MANY) v[i] = load_bits(values + at);
                else copy_async(mine + i * THREADS, reinterpret_cast<const uint4*>(values + at), true);
            }
        };
        load_positions(0, before);
        if (s == blockIdx.y) {
            wait_for_inputs();
            if (has_channels) q = load(query + int64(n) * C + h * HS + c);
        }
        load_positions(before, count);
        copies_commit();
        float scores[COUNT], largest = -INFINITE;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const Floats key = unpack(k[i]);
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < PACK; e++) sum += q.x[e] * key.x[e];
#pragma unroll
            for (int distance = ROW_LANES / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(0xffffffff, sum, distance);
            }
            scores[i] = position(i) < count ? sum / sqrtf(float(HS)) : -INFINITE;
            largest = fmaxf(largest, scores[i]);
        }
        largest = warp_max(largest);
        const float finite = largest == -INFINITE ? 0.0f : largest;  // a warp without positions
        Floats o = {};
        float total = 0.0f;
        copies_wait<0>();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float p = expf(scores[i] - finite);
            uint4 bits = {};
            if (!MANY) bits = v[i];
            else if (has_channels && position(i) < count) bits = mine[i * THREADS];
            const Floats value = unpack(bits);
            total += p;
#pragma unroll
            for (int e = 0; e < PACK; e++) o.x[e] += p * value.x[e];
        }
#pragma unroll
        for (int distance = ROW_LANES; distance < 32; distance *= 2) {
            total += __shfl_xor_sync(0xffffffff, total, distance);
#pragma unroll
            for (int e = 0; e < PACK; e++) o.x[e] += __shfl_xor_sync(0xffffffff, o.x[e], distance);
        }
        float* const part = warp_parts + warp * PART;
        if (lane < ROW_LANES && has_channels) {
#pragma unroll
            for (int e = 0; e < PACK; e++) part[2 + c + e] = o.x[e];
        }
        if (lane == 0) part[0] = largest, part[1] = total;
        __syncthreads();
        if (channel < HS) {
            float sum, out, *const part = head_parts + s * PART;
            merge_parts([&](int i) { return warp_parts[i]; }, WARPS, largest, sum, out);
            if (splits == 1) from_float(atty[int64(n) * C + h * HS + channel], out / sum);
            part[2 + channel] = out;
            if (channel == 0) part[0] = largest, part[1] = sum;
        }
        __syncthreads();  // all have read the warps' parts
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived + head, 1) == blocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) arrived[head] = 0;
    if (channel < HS) {
        float largest, sum, out;
        merge_parts([&](int i) { return __ldcg(head_parts + i); }, splits, largest, sum, out);
        from_float(atty[int64(n) * C + h * HS + channel], out / sum);
    }
}

// Block (THREADS); grid (NH, up to maxT / SPLIT, N). parts (N,NH,maxT / SPLIT rounded up,PART); arrived
// (N,NH) is 0 before and after.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
decode_attention(element* atty, float* parts, int* arrived, const element* query, const element* keys,
                 const element* values, const Control* control, int maxT, int T) {
    attend<false>(atty, parts, arrived, query, keys, values, control, maxT, T, nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
decode_attention_many(element* atty, float* parts, int* arrived, const element* query, const element* keys,
                      const element* values, const Control* control, int maxT, int T) {
    __shared__ uint4 values_here[COUNT * THREADS];
    attend<true>(atty, parts, arrived, query, keys, values, control, maxT, T, values_here);
}

// ---------------------------------------------------------------------------------------------------------------------
// sampling: a block draws a sequence's next token

constexpr int SAMPLE_THREADS = DECODE_SAMPLE_THREADS, SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr int BINS = 2 * SAMPLE_THREADS, BIN_BITS = 11;
static_assert(BINS == 1 << BIN_BITS, "two bins a thread");

// The sum of x over this thread and those before it, in a fixed order.
template <class T>
__device__ inline T scan_block(T x) {
    __shared__ T warp_sums[SAMPLE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T below = __shfl_up_sync(0xffffffff, x, distance);
        if (lane >= distance) x += below;
    }
    __syncthreads();  // all have read the sums of the call before
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    T before = warp_sums[lane < SAMPLE_WARPS ? lane : 0];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T below = __shfl_up_sync(0xffffffff, before, distance);
        if (lane >= distance) before += below;
    }
    before = __shfl_sync(0xffffffff, before, max(warp - 1, 0));
    return warp ? before + x : x;
}

__device__ inline float block_max(float x) {
    __shared__ float warp_maxima[SAMPLE_WARPS];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(warp_maxima[threadIdx.x % SAMPLE_WARPS]);
}

// What a thread has, for all.
template <class T>
__device__ inline T broadcast(T x, int thread) {
    __shared__ T shared;
    __syncthreads();
    if (threadIdx.x == thread) shared = x;
    __syncthreads();
    return shared;
}

// The first thread for which `is_it`, else the last one with `else_it`, else 0.
__device__ inline int first_thread(bool is_it, bool else_it) {
    __shared__ int first, last;
    __syncthreads();
    if (threadIdx.x == 0) first = SAMPLE_THREADS, last = 0;
    __syncthreads();
    if (is_it) atomicMin(&first, threadIdx.x);
    if (else_it) atomicMax(&last, threadIdx.x);
    __syncthreads();
    return first < SAMPLE_THREADS ? first : last;
}

// The likeliest tokens: those of larger bins, and in this bin those whose key is at least `key`.
struct Likeliest {
    float largest, bins_per_logit;
    int bin;
    uint64 key;

    // Evenly wide, so that no bin has most of the tokens, which would add to it one after the other.
    __device__ int bin_of(float logit) const {
        return BINS - 1 - int(fminf((largest - logit) * bins_per_logit, BINS - 1.0f));
    }
    // Larger for a likelier token; of equally likely ones, for a lower id.
    __device__ uint64 key_of(int v, float logit) const {
        const uint32 bits = __float_as_uint(logit + 0.0f);  // -0 is as likely as 0
        return uint64(bits & 0x80000000 ? ~bits : bits | 0x80000000) << 32 | ~uint32(v);
    }
    __device__ bool has(int v, float logit) const {
        const int b = bin_of(logit);
        return b > bin || b == bin && key_of(v, logit) >= key;
    }
};

// Tokens of a row: all, or those of some tiles, by ascending ids.
struct Tokens {
    const float* logits;
    const int* tiles;  // null: all
    int count;         // of ids; those from V on are no tokens

    __device__ int id(int i) const { return tiles ? tiles[i / ROWS] * ROWS + i % ROWS : i; }
    __device__ float logit(int id) const { return logits[id]; }
    static constexpr int IDS = V;
};

constexpr int TOKEN_TILES = (V + ROWS - 1) / ROWS;

// Tiles, each as likely as the likeliest of its tokens.
struct Tiles {
    const Tile* tiles;
    static constexpr int count = TOKEN_TILES, IDS = count;

    __device__ int id(int i) const { return i; }
    __device__ float logit(int id) const { return tiles[id].largest; }
};

// f(id, its logit) for items begin .. end - 1, each thread for some. Several loads are underway at a time.
template <class Items, class F>
__device__ inline void for_items(const Items& items, int begin, int end, int thread, int threads, const F& f) {
    for (int first = begin + thread; first < end; first += 8 * threads) {
        int id[8];
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            id[i] = first + i * threads < end ? items.id(first + i * threads) : Items::IDS;
            x[i] = id[i] < Items::IDS ? items.logit(id[i]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (id[i] < Items::IDS) f(id[i], x[i]);
        }
    }
}
template <class Items, class F>
__device__ inline void for_items(const Items& items, const F& f) {
    for_items(items, 0, items.count, threadIdx.x, SAMPLE_THREADS, f);
}

// All items, in bins from `largest` down: what find_likeliest begins with.
template <class Items>
__device__ inline Likeliest all_of(const Items& items, float largest) {
    float smallest = INFINITE;
    for_items(items, [&](int, float x) { smallest = fminf(smallest, x); });
    return {largest, BINS / fmaxf(largest + block_max(-smallest), 1e-30f), 0, 0};
}

struct Histogram {
    uint64 weights[BINS];
    int counts[BINS];
};

// As many of the likeliest items as it takes until the weights of those before add up to `target`, at least 1. Radix
// sort's first half, from the highest digit on. Weights are integers: the order of additions does not matter.
template <class Items, class Weight>
__device__ inline Likeliest find_likeliest(Histogram& histogram, const Items& items, float largest,
                                           const Weight& weight, uint64 target) {
    Likeliest found = all_of(items, largest);
    auto& weights = histogram.weights;
    auto& counts = histogram.counts;
    uint64 mask = 0;  // the digits of the key that are known
    for (int shift = 64; shift >= 0; shift = shift ? max(0, shift - BIN_BITS) : -1) {
        const bool by_bin = shift == 64;  // then by digits of the key
        __syncthreads();  // all have read the counts of the digit before
        for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) weights[i] = counts[i] = 0;
        __syncthreads();
        for_items(items, [&](int v, float logit) {
            int digit = found.bin_of(logit);
            if (!by_bin) {
                const uint64 key = found.key_of(v, logit);
                if (digit != found.bin || (key & mask) != found.key) return;
                digit = int(key >> shift) & (BINS - 1);
            }
            atomicAdd(weights + digit, weight(v, logit));
            atomicAdd(counts + digit, 1);
        });
        __syncthreads();
        int digit = BINS - 1 - 2 * threadIdx.x;  // this thread's higher one
        const uint64 higher = weights[digit], both = higher + weights[digit - 1];
        const uint64 through = scan_block(both);
        uint64 before = through - both;
        const int thread = first_thread(through >= target, both > 0);
        if (before + higher < target && weights[digit - 1]) before += higher, digit--;
        digit = broadcast(digit, thread);
        target -= min(target, broadcast(before, thread));
        if (by_bin) found.bin = digit;
        else found.key |= uint64(digit) << shift, mask |= uint64(BINS - 1) << shift;
        if (counts[digit] == 1) break;
    }
    return found;
}

constexpr int MAX_KEPT = 1024;

// Where only the likeliest `count` < TOKEN_TILES tokens may be drawn: the tokens of the likeliest `count` tiles. As
// many tokens are likelier than all of any other tile: the likeliest of each of these. kept (MAX_KEPT): shared memory.
__device__ inline Tokens keep_tiles(Histogram& histogram, int* kept, const float* logits, const Tile* tiles,
                                    float largest, int count) {
    constexpr int EACH_THREAD = (TOKEN_TILES + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    const auto one = [](int, float) { return uint64(1); };
    const Likeliest likeliest = find_likeliest(histogram, Tiles{tiles}, largest, one, uint64(count));
    const int first = threadIdx.x * EACH_THREAD, end = min(TOKEN_TILES, first + EACH_THREAD);
    int mine = 0;
    for (int t = first; t < end; t++) mine += likeliest.has(t, tiles[t].largest);
    int at = scan_block(mine) - mine;
    for (int t = first; t < end; t++) {
        if (likeliest.has(t, tiles[t].largest)) kept[at++] = t;
    }
    __syncthreads();
    return {logits, kept, count * ROWS};
}

// xorshift64*: the next 24 random bits as a float in [0, 1).
__device__ inline float next_coin(uint64& state) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return float(uint32(state * 0x2545F4914F6CDD1Dull >> 32) >> 8) / 16777216.0f;
}

// Block (SAMPLE_THREADS); grid (B). drawn, logprobs (ring,B): pinned memory of the host, a row a step in turn; the
// latter of the token drawn, under the model.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
decode_sample(int* next_tokens, uint64* randoms, Control* control, int* drawn, float* logprobs, const float* logits,
              const Tile* tiles, int ring) {
    constexpr int ALL_TILES = Vp / ROWS, TILES_EACH = (ALL_TILES + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    constexpr uint64 ONE = 1ull << 40;  // of the integers that stand for probabilities
    __shared__ Histogram histogram;
    __shared__ int kept_tiles[MAX_KEPT];
    let_next_begin();
    wait_for_inputs();
    const int b = blockIdx.x, top_k = control->top_k, step = control->step;
    const float temperature = control->temperature, top_p = control->top_p;
    logits += int64(b) * Vp, tiles += int64(b) * ALL_TILES;
    uint64 random = randoms[b];
    const float coin = next_coin(random);

    float largest = -INFINITE;
    for (int i = threadIdx.x; i < ALL_TILES; i += SAMPLE_THREADS) largest = fmaxf(largest, tiles[i].largest);
    largest = block_max(largest);

    // Without a temperature, only the likeliest counts, the first of equal ones. Otherwise, what is kept of the others.
    const auto exponential = [&](float logit) { return expf((logit - largest) / temperature); };
    const bool choosy = temperature > 0.0f && (top_k > 0 || top_p < 1.0f);
    Tokens tokens = {logits, nullptr, V};
    Likeliest of_top_k = {largest, 0.0f, -1, 0}, of_top_p = of_top_k;  // all
    if (choosy && top_k > 0) {
        if (top_k <= MAX_KEPT && top_k < TOKEN_TILES) {
            tokens = keep_tiles(histogram, kept_tiles, logits, tiles, largest, top_k);
        }
        const auto one = [](int, float) { return uint64(1); };
        of_top_k = find_likeliest(histogram, tokens, largest, one, uint64(min(top_k, V)));
    }
    if (choosy && top_p < 1.0f) {
        const auto exact = [&](int v, float x) { return of_top_k.has(v, x) ? uint64(exponential(x) * ONE) : 0; };
        uint64 all = 0;
        for_items(tokens, [&](int v, float x) { all += exact(v, x); });
        all = broadcast(scan_block(all), SAMPLE_THREADS - 1);
        of_top_p = find_likeliest(histogram, tokens, largest, exact, max(uint64(1), uint64(double(all) * top_p)));
    }
    const auto weight = [&](int v, float x) {
        if (temperature == 0.0f) return x == largest ? 1.0f : 0.0f;
        return of_top_k.has(v, x) && of_top_p.has(v, x) ? exponential(x) : 0.0f;
    };

    // The first token at which the running sum of the weights exceeds the coin's part of the whole: first the span of
    // tokens that it is in, a thread's tiles, or a warp's where only some tokens of a tile are kept; then a part of
    // that, down to one.
    float mine = 0.0f, plain = 0.0f;  // of this thread's span
    const int first_tile = threadIdx.x * TILES_EACH;
    for (int i = first_tile; i < min(ALL_TILES, first_tile + TILES_EACH); i++) {
        const Tile tile = tiles[i];
        plain += tile.plain_sum * expf(tile.largest - largest);
        if (temperature == 0.0f) mine += tile.largest == largest ? 1.0f : 0.0f;
        else mine += tile.sum * expf((tile.largest - largest) / temperature);
    }
    const float log_sum = logf(broadcast(scan_block(plain), SAMPLE_THREADS - 1));
    int begin = 0, end = tokens.count, each = TILES_EACH * ROWS, span = each;  // of a thread; of one with a `mine`
    if (choosy) {
        each = (tokens.count + SAMPLE_THREADS - 1) / SAMPLE_THREADS, span = 32 * each, mine = 0.0f;
        const int from = threadIdx.x / 32 * span;
        for_items(tokens, from, min(end, from + span), threadIdx.x % 32, 32,
                  [&](int v, float x) { mine += weight(v, x); });
        mine = warp_sum(mine);
        if (threadIdx.x % 32) mine = 0.0f;
    }
    float through = scan_block(mine), target = 0.0f;
    if (temperature > 0.0f) target = coin * broadcast(through, SAMPLE_THREADS - 1);
    while (true) {
        const int thread = first_thread(mine > 0.0f && through > target, mine > 0.0f);
        begin += thread * each, end = min(end, begin + span);
        if (span == 1) break;
        target -= broadcast(through - mine, thread);
        span = each = (end - begin + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
        mine = 0.0f;
        const int from = begin + threadIdx.x * each;
        for (int i = from; i < min(end, from + each); i++) {
            const int v = tokens.id(i);
            if (v < V) mine += weight(v, logits[v]);
        }
        through = scan_block(mine);
    }
    if (threadIdx.x > 0) return;
    const int token = tokens.id(begin);
    next_tokens[b] = token;
    randoms[b] = random;
    drawn[step % ring * gridDim.x + b] = token;
    logprobs[step % ring * gridDim.x + b] = logits[token] - largest - log_sum;
    __threadfence();
    if (atomicAdd(&control->arrived, 1) == gridDim.x - 1) {
        control->arrived = 0;
        control->position += 1;
        control->step += 1;
    }
}
