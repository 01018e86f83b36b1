// decode_sample: a block draws a sequence's next token. It reads what decode_logits, or
// decode_token, has left of each tile of logits, and then the logits of one thread's tiles. top_k
// and top_p look at the likeliest few hundred tokens alone, in the tiles that have one of these;
// where that is not enough, all logits are read several times. Latency bounds it, and barriers are
// most of that. All sums have a fixed order or are of integers.

#include "decode/step.cuh"

constexpr int SAMPLE_THREADS = DECODE_SAMPLE_THREADS;
constexpr int KEY_BITS = 60, DIGIT_BITS = 10, ID_BITS = 20;
constexpr uint64 ALL = ~0ull;
constexpr int ROWS = DECODE_ROWS, TILES = Vp / ROWS;
// of a thread: tiles, and tokens
constexpr int EACH = (TILES + SAMPLE_THREADS - 1) / SAMPLE_THREADS, SPAN = EACH * ROWS;
// The most tiles in which top_k looks; and a nucleus, where those that have it are too many.
constexpr int WANTED = 600;
static_assert(SAMPLE_THREADS == 32 * 32 && SAMPLE_THREADS == 1 << DIGIT_BITS,
              "a lane for each warp, a thread a digit");
static_assert(V <= 1 << ID_BITS && KEY_BITS % DIGIT_BITS == 0,
              "a key ends with the id, and has whole digits");
static_assert(SPAN <= SAMPLE_THREADS, "a thread for each token of a thread");
static_assert(Vp % 4 == 0 && ROWS % 4 == 0, "logits are read four at a time");

// -------------------------------------------------------------------------------------------------
// what all threads of the block do together

template <class T>
struct Sums {
    T through, all;  // of this thread and those before it; of all threads
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

// Of the other functions, no two calls are without a barrier in between.
__device__ inline float block_max(float x) {
    __shared__ float warp_maxima[32];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(warp_maxima[threadIdx.x % 32]);
}

// One thread's x, for all.
__device__ inline float broadcast(float x, int thread) {
    __shared__ float shared;
    if (threadIdx.x == thread) shared = x;
    __syncthreads();
    return shared;
}

// The first thread for which `is_it`, else the last one with `else_it`, else 0.
__device__ inline int first_thread(bool is_it, bool else_it) {
    __shared__ uint32 its[32], elses[32];  // a bit for each lane of a warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32 own_its = __ballot_sync(0xffffffff, is_it);
    const uint32 own_elses = __ballot_sync(0xffffffff, else_it);
    if (lane == 0) its[warp] = own_its, elses[warp] = own_elses;
    __syncthreads();
    const uint32 with_its = __ballot_sync(0xffffffff, its[lane]);
    const uint32 with_elses = __ballot_sync(0xffffffff, elses[lane]);
    const int first = __ffs(with_its) - 1, last = 31 - __clz(with_elses);
    if (with_its) return 32 * first + __ffs(its[first]) - 1;
    return with_elses ? 32 * last + 31 - __clz(elses[last]) : 0;
}

// -------------------------------------------------------------------------------------------------
// choosing, as radix sort would, by counting digits; but of a key, the digits that matter alone

// By a digit: how many have it, and the sum of their weights, integers. 0 but where they are used.
__shared__ int digit_counts[SAMPLE_THREADS];
__shared__ uint32 digit_weights[SAMPLE_THREADS];

struct Digit {
    int value, count;
    uint32 before;  // the sum of the lower digits
};

// The digit through which counts, or weights, add up to `target` or more; false if all are less.
__device__ inline bool find_digit(Digit& found, uint32 target, bool counts) {
    __shared__ Digit shared;
    __syncthreads();  // all have added theirs
    const int count = digit_counts[threadIdx.x];
    const uint32 own = counts ? count : digit_weights[threadIdx.x];
    digit_counts[threadIdx.x] = digit_weights[threadIdx.x] = 0;
    const Sums<uint32> sums = scan_block(own);
    if (sums.all < target) return false;
    const uint32 before = sums.through - own;
    if (before < target && target <= sums.through) shared = {int(threadIdx.x), count, before};
    __syncthreads();
    found = shared;
    return true;
}

struct Token {
    int id;
    float logit;
};

// The tokens of which one is drawn: all, or a few, one a thread.
struct Tokens {
    const float* logits;  // (V)
    float key_scale;      // see key
    int count;            // of the few, else 0
    Token own;            // the thread's one

    // f(id, logit) for each of this thread's, in an order that makes reading fast.
    template <class F>
    __device__ void for_each(const F& f) const {
        if (threadIdx.x < count) f(own.id, own.logit);
        if (count == 0) for_all(4 * threadIdx.x, V, 4 * SAMPLE_THREADS, f);
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

// found = the key through which the number of tokens (counts), or their weights, add up to `target`
// or more, lower keys first; false if all are less.
template <class Key, class Weight>
__device__ inline bool find_key(uint64& found, const Tokens& tokens, uint32 target, bool counts,
                                const Key& key, const Weight& weight) {
    uint64 known = 0;  // the digits so far, from the highest on
    int shift = KEY_BITS;
    Digit digit;
    do {
        shift -= DIGIT_BITS;
        tokens.for_each([&](int v, float x) {
            const uint64 digits = key(v, x) >> shift;
            if (digits >> DIGIT_BITS != known) return;
            atomicAdd(digit_counts + digits % SAMPLE_THREADS, 1);
            if (!counts) atomicAdd(digit_weights + digits % SAMPLE_THREADS, weight(v, x));
        });
        if (!find_digit(digit, target, counts)) return false;
        target -= digit.before;
        known = known << DIGIT_BITS | digit.value;
    } while (shift > 0 && digit.count > 1);
    found = ((known + 1) << shift) - 1;
    return true;
}

// -------------------------------------------------------------------------------------------------

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
    const int b = blockIdx.x, step = control->step;
    const float temperature = control->temperature;
    // Without a temperature, only the likeliest token may be drawn, the first of equal ones.
    const int top_k = temperature > 0.0f ? control->top_k : 0;
    const float top_p = temperature > 0.0f ? control->top_p : 1.0f;
    logits += int64(b) * Vp, tiles += int64(b) * TILES;
    uint64 random = randoms[b];
    const float coin = next_coin(random);
    digit_counts[threadIdx.x] = digit_weights[threadIdx.x] = 0;
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
    float weights[EACH] = {}, mine = 0.0f;  // of this thread's tiles; their sum
    float plain = 0.0f;                     // the same without a temperature
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (own[i].sum == 0.0f) continue;  // it has no token
        weights[i] = own[i].sum * expf(own[i].largest - largest);
        plain += weights[i];
        if (temperature == 0.0f) weights[i] = own[i].largest == largest;
        else if (temperature != 1.0f) weights[i] = own[i].weight * exponential(own[i].largest);
        mine += weights[i];
    }
    Sums<float> sums = scan_block(mine);
    // All integer weights add up to 2^31, but for rounding: less than 2^-32 is nothing.
    const float integer_scale = 0x1p31f / sums.all;
    const float log_sum = logf(temperature == 1.0f ? sums.all : scan_block(plain).all);

    // Distances from the largest logit are cut into digits. Beyond those, probabilities are 0.
    const float digits_per_logit = SAMPLE_THREADS / (64.0f * temperature);
    const auto digit_of = [&](float x) { return (largest - x) * digits_per_logit; };
    const auto key_scale = [&](int digits) {
        return 0.999f * (1ull << (KEY_BITS - ID_BITS)) / digits * digits_per_logit;
    };
    const Tokens all = {logits, key_scale(SAMPLE_THREADS), 0, {}};
    Tokens tokens = all;

    // tokens = the few likeliest, in the order of ids: all whose digit is at most that of the
    // `wanted`-th tile. If wanted is 0: of the tile with which the likeliest tiles reach top_p and
    // a quarter of the rest; the quarter is for their tokens that are not likely. If there are more
    // tokens than threads, tokens stays as it is.
    const auto find_few = [&](int wanted) {
        __shared__ int near[SAMPLE_THREADS];    // tiles that have one of them
        __shared__ Token few[SAMPLE_THREADS];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float digit = digit_of(own[i].largest);
            if (!(digit < SAMPLE_THREADS)) continue;  // nor NaN
            if (wanted) atomicAdd(digit_counts + int(digit), 1);
            else atomicAdd(digit_weights + int(digit), __float2uint_rn(weights[i] * integer_scale));
        }
        Digit last;
        const uint32 target = wanted ? wanted : uint32(0x1p31f * (0.75f * top_p + 0.25f));
        const int digits = find_digit(last, target, wanted > 0) ? last.value + 1 : SAMPLE_THREADS;
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) count += digit_of(own[i].largest) < digits;
        const Sums<int> of_tiles = scan_block(count);
        if (of_tiles.all > SAMPLE_THREADS) return;
        int place = of_tiles.through - count;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (digit_of(own[i].largest) < digits) near[place++] = threadIdx.x * EACH + i;
        }
        __syncthreads();
        // a thread for each half of these tiles
        constexpr int HALF = ROWS / 2;
        int found = 0;
#pragma unroll 1
        for (int first = 0; first < 2 * of_tiles.all; first += SAMPLE_THREADS) {
            const int half = first + threadIdx.x;
            const int begin =
                half < 2 * of_tiles.all ? near[half / 2] * ROWS + half % 2 * HALF : V;
            alignas(16) float row[HALF];
#pragma unroll
            for (int i = 0; i < HALF && begin < V; i += 4) {
                *reinterpret_cast<float4*>(row + i) =
                    *reinterpret_cast<const float4*>(logits + begin + i);
            }
            const auto is_near = [&](int i) { return begin + i < V && digit_of(row[i]) < digits; };
            count = 0;
#pragma unroll
            for (int i = 0; i < HALF; i++) count += is_near(i);
            const Sums<int> of_tokens = scan_block(count);
            if (found + of_tokens.all > SAMPLE_THREADS) return;
            place = found + of_tokens.through - count;
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                if (is_near(i)) few[place++] = {begin + i, row[i]};
            }
            found += of_tokens.all;
        }
        __syncthreads();
        tokens.count = found;
        tokens.key_scale = key_scale(digits);
        if (threadIdx.x >= found) return;
        tokens.own = few[threadIdx.x];
    };

    // A token's key is smaller the likelier the token, and of equally likely ones for a lower id.
    uint64 last_kept = ALL;
    const auto key = [&](int v, float x) {
        return uint64(fminf((largest - x) * tokens.key_scale, 0x2p40f)) << ID_BITS | v;
    };
    const auto weight = [&](int v, float x) {
        if (temperature == 0.0f) return x == largest ? 1.0f : 0.0f;
        return last_kept == ALL || key(v, x) <= last_kept ? exponential(x) : 0.0f;
    };
    // Keeps the likeliest top_k of the tokens, and of them the fewest that have top_p of their
    // probability; false if others than the few may belong to these.
    const auto keep = [&] {
        const auto part = [&](int v, float x) {
            return __float2uint_rn(weight(v, x) * integer_scale);
        };
        if (top_k > 0 && !find_key(last_kept, tokens, top_k, true, key, part) && tokens.count > 0)
            return false;
        if (top_p == 1.0f) return true;
        uint32 whole = 1u << 31;
        if (top_k > 0 || tokens.count == 0) {
            uint32 kept = 0;
            tokens.for_each([&](int v, float x) { kept += part(v, x); });
            whole = scan_block(kept).all;
        }
        const uint32 target = max(1u, uint32(double(whole) * top_p));
        return find_key(last_kept, tokens, target, false, key, part);
    };
    if (top_k > 0 || top_p < 1.0f) {
        // fewer where likely tokens are neighbors: their tiles have many of them
        int wanted = top_k > 0 ? top_k : WANTED;
        if (top_k == 0) find_few(0);
        while (tokens.count == 0 && wanted > 0 && wanted <= WANTED) {
            find_few(wanted);
            wanted /= 4;
        }
        if (!keep()) {
            tokens = all;
            keep();
        }
        mine = 0.0f;
        if (threadIdx.x < tokens.count) mine = weight(tokens.own.id, tokens.own.logit);
        if (tokens.count == 0) {
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
    if (tokens.count == 0) {  // it has several tokens: now a thread for each of them
        target -= broadcast(sums.through - mine, thread);
        tokens.own.id = thread * SPAN + threadIdx.x;
        const bool is_one = threadIdx.x < SPAN && tokens.own.id < V;
        if (is_one) tokens.own.logit = logits[tokens.own.id];
        mine = is_one ? weight(tokens.own.id, tokens.own.logit) : 0.0f;
        sums = scan_block(mine);
        thread = find_thread();
    }
    if (threadIdx.x != thread) return;
    next_tokens[b] = tokens.own.id;
    randoms[b] = random;
    drawn[step % ring * gridDim.x + b] = tokens.own.id;
    logprobs[step % ring * gridDim.x + b] = tokens.own.logit - largest - log_sum;
    __threadfence();
    if (atomicAdd(&control->arrived, 1) == gridDim.x - 1) {
        control->arrived = 0;
        control->position += 1, control->step += 1;
    }
}
