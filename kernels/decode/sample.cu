// decode_sample: a block draws a sequence's next token. It reads what decode_logits has left of
// each tile of logits, and then the logits of one thread's tiles. top_k and top_p look at the
// likeliest few hundred tokens alone, in the tiles that have one of these; where they are too many,
// or not enough, all logits are read several times. Latency bounds it, and barriers are most of
// that. All sums have a fixed order or are of integers.

#include "decode/step.cuh"

constexpr int SAMPLE_THREADS = DECODE_SAMPLE_THREADS;
constexpr int KEY_BITS = 60, DIGIT_BITS = 10, ID_BITS = 20;
constexpr uint64 ALL = ~0ull;
// a thread has this many tiles, SPAN tokens
constexpr int ROWS = DECODE_ROWS, TILES = Vp / ROWS;
constexpr int EACH = (TILES + SAMPLE_THREADS - 1) / SAMPLE_THREADS, SPAN = EACH * ROWS;
// So many threads' likeliest tokens are among the few: half of the threads, or two thirds of those
// that have tiles. Of tokens in random order, the few are then hardly ever more than threads.
constexpr int TWO_THIRDS = TILES / EACH * 2 / 3;
constexpr int FEW = V <= SAMPLE_THREADS ? SAMPLE_THREADS  // all are
                    : TWO_THIRDS < SAMPLE_THREADS / 2 ? TWO_THIRDS : SAMPLE_THREADS / 2;
static_assert(SAMPLE_THREADS == 32 * 32 && SAMPLE_THREADS == 1 << DIGIT_BITS,
              "a lane for each warp, a thread a digit");
static_assert(V <= 1 << ID_BITS && KEY_BITS % DIGIT_BITS == 0,
              "a key ends with the id, and has whole digits");
static_assert(SPAN <= SAMPLE_THREADS, "a thread for each token of a thread");
static_assert(Vp % 4 == 0 && ROWS % 4 == 0, "logits are read four at a time");

// Of the x of this thread and those before it, and of all threads.
template <class T>
struct Sums {
    T through, all;
};

// In a fixed order.
template <class T>
__device__ inline Sums<T> scan_block(T x) {
    __shared__ T warp_sums[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto scan_warp = [&](T x) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const T below = __shfl_up_sync(0xffffffff, x, distance);
            if (lane >= distance) x += below;
        }
        return x;
    };
    x = scan_warp(x);
    __syncthreads();  // all have read the sums of the call before
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    const T through_warp = scan_warp(warp_sums[lane]);
    const T before = __shfl_sync(0xffffffff, through_warp, max(warp - 1, 0));
    return {warp ? before + x : x, __shfl_sync(0xffffffff, through_warp, 31)};
}

__device__ inline float block_max(float x) {
    __shared__ int warp_maxima[32];
    // as integers of the same order, of which a warp finds the largest by one instruction
    const auto ordered = [](int bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; };
    const int of_warp = __reduce_max_sync(0xffffffff, ordered(__float_as_int(x)));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return __int_as_float(ordered(__reduce_max_sync(0xffffffff, warp_maxima[threadIdx.x % 32])));
}

// One thread's x, for all.
__device__ inline float broadcast(float x, int thread) {
    __shared__ float shared;
    __syncthreads();
    if (threadIdx.x == thread) shared = x;
    __syncthreads();
    return shared;
}

// The first thread for which `is_it`, else the last one with `else_it`, else 0.
__device__ inline int first_thread(bool is_it, bool else_it) {
    __shared__ int firsts[32], lasts[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32 its = __ballot_sync(0xffffffff, is_it);
    const uint32 elses = __ballot_sync(0xffffffff, else_it);
    __syncthreads();  // all have read what the call before wrote
    if (lane == 0) {
        firsts[warp] = its ? 32 * warp + __ffs(its) - 1 : SAMPLE_THREADS;
        lasts[warp] = elses ? 32 * warp + 31 - __clz(elses) : 0;
    }
    __syncthreads();
    const int first = __reduce_min_sync(0xffffffff, firsts[lane]);
    return first < SAMPLE_THREADS ? first : __reduce_max_sync(0xffffffff, lasts[lane]);
}

// At least `wanted` threads' x (0 or more) are not above it: the smallest such number, or up to
// 2 percent more.
__device__ inline float reach_of(float x, int wanted) {
    constexpr int EXACT_BITS = 14;
    uint32 bits = 0;  // positive floats are ordered as their bits are
    for (int bit = 30; bit > 30 - EXACT_BITS; bit--) {
        const uint32 higher = bits | 1u << bit;
        if (__syncthreads_count(__float_as_uint(x) < higher) < wanted) bits = higher;
    }
    return __uint_as_float(bits | ((1u << (31 - EXACT_BITS)) - 1));
}

// The tokens of which one is drawn: all, or a few, one a thread.
struct Tokens {
    const float* logits;  // (V)
    int few;              // how many, else 0
    float reach;          // of these: none is further from the largest logit
    int id;               // these two: of the thread's one
    float logit;

    // f(id, logit) for each of this thread's, in an order that makes reading fast.
    template <class F>
    __device__ void for_each(const F& f) const {
        if (threadIdx.x < few) f(id, logit);
        if (few == 0) for_all(4 * threadIdx.x, V, 4 * SAMPLE_THREADS, f);
    }
    // Of all, for four at `begin`, four at begin + step, and so on up to `end`; begin and step are
    // multiples of 4.
    template <class F>
    __device__ void for_all(int begin, int end, int step, const F& f) const {
#pragma unroll 1
        for (int first = begin; first < min(V, end); first += step) {
            const float4 quad = *reinterpret_cast<const float4*>(logits + first);
            const float x[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (first + i < V) f(first + i, x[i]);
            }
        }
    }
};

// By a digit of the key; 0 outside find_key. In a template, there would be one for each of its
// types.
__shared__ uint64 digit_weights[SAMPLE_THREADS];
__shared__ int digit_counts[SAMPLE_THREADS];

// found = the key up to which the weights add up to `target` or more, lower keys first: radix sort's
// first half, from the highest digit on. False if all weights are less. They are integers: the order
// of additions does not matter.
template <class Key, class Weight>
__device__ inline bool find_key(uint64& found, const Tokens& tokens, uint64 target, const Key& key,
                                const Weight& weight) {
    __shared__ struct { int digit, count; uint64 before; } at;
    uint64 known = 0;  // the digits so far
    int shift = KEY_BITS;
    do {
        shift -= DIGIT_BITS;
        tokens.for_each([&](int v, float x) {
            const uint64 digits = key(v, x) >> shift;
            if (digits >> DIGIT_BITS != known) return;
            atomicAdd(digit_weights + digits % SAMPLE_THREADS, weight(v, x));
            atomicAdd(digit_counts + digits % SAMPLE_THREADS, 1);
        });
        __syncthreads();
        const uint64 mine = digit_weights[threadIdx.x];
        const int count = digit_counts[threadIdx.x];
        digit_weights[threadIdx.x] = digit_counts[threadIdx.x] = 0;  // for the next digit
        const Sums<uint64> sums = scan_block(mine);
        if (sums.all < target) return false;
        if (sums.through >= target && sums.through - mine < target)
            at = {int(threadIdx.x), count, sums.through - mine};
        __syncthreads();
        target -= at.before;
        known = known << DIGIT_BITS | at.digit;
    } while (shift > 0 && at.count > 1);
    found = ((known + 1) << shift) - 1;
    return true;
}

// xorshift64*: the next 24 random bits as a float in [0, 1).
__device__ inline float next_coin(uint64& state) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return float(uint32(state * 0x2545F4914F6CDD1Dull >> 32) >> 8) / 16777216.0f;
}

// Block (SAMPLE_THREADS); grid (B). tiles (B,TILES): of logits (B,Vp). drawn, logprobs (ring,B):
// pinned, a row a step in turn; the latter under the model.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
decode_sample(int* next_tokens, uint64* randoms, Control* control, int* drawn, float* logprobs,
              const float* logits, const TileOfLogits* tiles, int ring) {
    constexpr uint64 ONE = 1ull << 40;  // of the integers that stand for probabilities
    let_next_begin();
    const int b = blockIdx.x, step = control->step;
    const float temperature = control->temperature;
    // Without a temperature, only the likeliest token may be drawn, the first of equal ones.
    const int top_k = temperature > 0.0f ? control->top_k : 0;
    const float top_p = temperature > 0.0f ? control->top_p : 1.0f;
    logits += int64(b) * Vp, tiles += int64(b) * TILES;
    uint64 random = randoms[b];
    const float coin = next_coin(random);
    digit_weights[threadIdx.x] = digit_counts[threadIdx.x] = 0;
    wait_for_inputs();

    TileOfLogits own[EACH];
    float best = -INFINITE;  // of this thread's tokens
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int tile = threadIdx.x * EACH + i;
        own[i] = tile < TILES ? tiles[tile] : TileOfLogits{-INFINITE, 0.0f, 0.0f, 0.0f};
        best = fmaxf(best, own[i].largest);
    }
    const float largest = block_max(best);
    const auto exponential = [&](float x) { return expf((x - largest) / temperature); };
    float mine = 0.0f, plain = 0.0f;  // the latter: for log-probabilities
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        plain += own[i].sum * expf(own[i].largest - largest);
        if (temperature == 0.0f) mine += own[i].largest == largest;
        else mine += own[i].weight * exponential(own[i].largest);
    }
    const float log_sum = logf(scan_block(plain).all);
    Sums<float> sums = scan_block(mine);

    // The few likeliest tokens: those not further than `reach` from the largest logit, in the order
    // of ids. None if they are more than threads.
    Tokens tokens = {logits, 0, 0.0f, 0, 0.0f};
    const auto find_few = [&](int wanted) {
        __shared__ int near[SAMPLE_THREADS];  // tiles that have one of them
        __shared__ int ids[SAMPLE_THREADS];
        __shared__ float few[SAMPLE_THREADS];
        const float reach = V <= SAMPLE_THREADS ? INFINITE : reach_of(largest - best, wanted);
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) count += largest - own[i].largest <= reach;
        const Sums<int> of_tiles = scan_block(count);
        if (of_tiles.all > SAMPLE_THREADS) return;
        int place = of_tiles.through - count;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (largest - own[i].largest <= reach) near[place++] = threadIdx.x * EACH + i;
        }
        __syncthreads();
        // a thread for each of these tiles
        const int begin = threadIdx.x < of_tiles.all ? near[threadIdx.x] * ROWS : V;
        float row[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS && begin < V; i += 4) {
            const float4 quad = *reinterpret_cast<const float4*>(logits + begin + i);
            row[i] = quad.x, row[i + 1] = quad.y, row[i + 2] = quad.z, row[i + 3] = quad.w;
        }
        const auto is_near = [&](int i) { return begin + i < V && largest - row[i] <= reach; };
        count = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) count += is_near(i);
        const Sums<int> of_tokens = scan_block(count);
        if (of_tokens.all > SAMPLE_THREADS) return;
        place = of_tokens.through - count;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!is_near(i)) continue;
            ids[place] = begin + i;
            few[place++] = row[i];
        }
        __syncthreads();
        tokens.few = of_tokens.all, tokens.reach = reach;
        if (threadIdx.x < tokens.few) tokens.id = ids[threadIdx.x], tokens.logit = few[threadIdx.x];
    };

    // A token's key is smaller the likelier the token, and of equally likely ones for a lower id.
    // It is proportional to the distance from the largest logit: no digit has most of the tokens.
    float scale;
    uint64 last = ALL;  // key of those that are kept
    const auto key = [&](int v, float x) { return uint64((largest - x) * scale) << ID_BITS | v; };
    const auto weight = [&](int v, float x) {
        if (temperature == 0.0f) return x == largest ? 1.0f : 0.0f;
        return last == ALL || key(v, x) <= last ? exponential(x) : 0.0f;
    };
    // Keeps the likeliest top_k of the tokens, and of them the fewest that have top_p of their
    // probability; false if others than the few may belong to these.
    const auto keep = [&] {
        const auto in_integers = [&](float weight) { return uint64(weight * ONE); };
        const auto part = [&](int v, float x) { return in_integers(weight(v, x)); };
        float farthest = tokens.reach;
        if (tokens.few == 0 || farthest == INFINITE) {
            farthest = 0.0f;
            tokens.for_each([&](int, float x) { farthest = fmaxf(farthest, largest - x); });
            farthest = block_max(farthest);
        }
        scale = 0.999f * (1ull << (KEY_BITS - ID_BITS)) / fmaxf(farthest, 1e-20f);
        if (top_k > 0) find_key(last, tokens, top_k, key, [](int, float) { return uint64(1); });
        if (top_p == 1.0f) return true;
        uint64 whole = in_integers(sums.all);
        if (top_k > 0 || tokens.few == 0) {
            uint64 mine = 0;
            tokens.for_each([&](int v, float x) { mine += part(v, x); });
            whole = scan_block(mine).all;
        }
        const uint64 target = max(uint64(1), uint64(double(whole) * top_p));
        return find_key(last, tokens, target, key, part);
    };
    if (top_k > 0 || top_p < 1.0f) {
        const int wanted = top_k > 0 ? top_k : FEW;  // of a nucleus, nobody knows how large it is
        if (wanted <= FEW) find_few(wanted);
        if (!keep()) {
            tokens.few = 0;
            keep();
        }
        mine = 0.0f;
        if (threadIdx.x < tokens.few) mine = weight(tokens.id, tokens.logit);
        if (tokens.few == 0) {
            tokens.for_all(threadIdx.x * SPAN, (threadIdx.x + 1) * SPAN, 4,
                           [&](int v, float x) { mine += weight(v, x); });
        }
        sums = scan_block(mine);
    }

    // The token at which the running sum of the weights, in the order of ids, first exceeds the
    // coin's part of the whole. Its thread finishes the step.
    float target = temperature > 0.0f ? coin * sums.all : 0.0f;
    const auto find_thread = [&] {
        return first_thread(mine > 0.0f && sums.through > target, mine > 0.0f);
    };
    int thread = find_thread();
    if (tokens.few == 0) {  // it has several tokens: now a thread for each of them
        target -= broadcast(sums.through - mine, thread);
        tokens.id = thread * SPAN + threadIdx.x;
        const bool is_one = threadIdx.x < SPAN && tokens.id < V;
        if (is_one) tokens.logit = logits[tokens.id];
        mine = is_one ? weight(tokens.id, tokens.logit) : 0.0f;
        sums = scan_block(mine);
        thread = find_thread();
    }
    if (threadIdx.x != thread) return;
    next_tokens[b] = tokens.id, randoms[b] = random;
    drawn[step % ring * gridDim.x + b] = tokens.id;
    logprobs[step % ring * gridDim.x + b] = tokens.logit - largest - log_sum;
    __threadfence();
    if (atomicAdd(&control->arrived, 1) == gridDim.x - 1) {
        control->arrived = 0;
        control->position += 1, control->step += 1;
    }
}
