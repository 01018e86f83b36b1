// decode_sample: a block draws a sequence's next token. It reads what decode_logits has left of
// each tile of logits, and then the logits of one thread's tiles. top_k and top_p look at the
// likeliest few hundred tokens alone, in the tiles that have one of these; where they are too many,
// or not enough, all logits are read several times. Latency bounds it. All sums have a fixed order
// or are of integers.

#include "decode/step.cuh"

constexpr int SAMPLE_THREADS = DECODE_SAMPLE_THREADS;
constexpr int KEY_BITS = 60, DIGIT_BITS = 10, ID_BITS = 20;
constexpr uint64 ALL = ~0ull;
constexpr int FEW = SAMPLE_THREADS / 2;
// a thread has this many tiles, SPAN tokens
constexpr int ROWS = DECODE_ROWS, TILES = Vp / ROWS;
constexpr int EACH = (TILES + SAMPLE_THREADS - 1) / SAMPLE_THREADS, SPAN = EACH * ROWS;
static_assert(SAMPLE_THREADS == 32 * 32 && SAMPLE_THREADS == 1 << DIGIT_BITS,
              "a lane for each warp, a thread a digit");
static_assert(V <= 1 << ID_BITS && KEY_BITS % DIGIT_BITS == 0,
              "a key ends with the id, and has whole digits");
static_assert(SPAN <= SAMPLE_THREADS, "a thread for each token of a thread");
static_assert(Vp % 4 == 0 && ROWS % 4 == 0, "logits are read four at a time");

// In a template, there would be one for each of its types.
__shared__ uint64 sorted[2][SAMPLE_THREADS];  // in turn
__shared__ uint64 digit_weights[SAMPLE_THREADS];  // by a digit of the key
__shared__ int digit_counts[SAMPLE_THREADS];

// The sum of x over this thread and those before it, in a fixed order.
template <class T>
__device__ inline T scan_block(T x) {
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
    const T before = __shfl_sync(0xffffffff, scan_warp(warp_sums[lane]), max(warp - 1, 0));
    return warp ? before + x : x;
}

__device__ inline float block_max(float x) {
    __shared__ float warp_maxima[32];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(warp_maxima[threadIdx.x % 32]);
}

// One thread's x, for all.
template <class T>
__device__ inline T broadcast(T x, int thread) {
    __shared__ T shared;
    __syncthreads();
    if (threadIdx.x == thread) shared = x;
    __syncthreads();
    return shared;
}

// The first `count` threads' x, in ascending order: Batcher's bitonic network, of as many warps as
// that needs. The other threads' are not smaller.
template <class T>
__device__ inline T sort_block(T x, int count) {
    int among = 32;
    while (among < count) among *= 2;
    const bool sorts = threadIdx.x < among;
    int turn = 0;
    __syncthreads();  // all have read what the call before wrote
    for (int size = 2; size <= among; size *= 2) {
        for (int distance = size / 2; distance > 0; distance /= 2) {
            T* const all = reinterpret_cast<T*>(sorted[turn]);
            if (distance >= 32) {
                if (sorts) all[threadIdx.x] = x;
                __syncthreads();
                turn ^= 1;
            }
            if (!sorts) continue;
            const T other = distance >= 32 ? all[threadIdx.x ^ distance]
                                           : __shfl_xor_sync(0xffffffff, x, distance);
            const bool ascends = !(threadIdx.x & size), is_lower = !(threadIdx.x & distance);
            if ((ascends == is_lower) == (other < x)) x = other;
        }
    }
    return x;
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

// f(id, its logit) for four tokens at `begin`, four at begin + step, and so on up to `end`; begin
// and step are multiples of 4.
template <class F>
__device__ inline void for_tokens(const float* logits, int begin, int end, int step, const F& f) {
    for (int first = begin; first < min(V, end); first += step) {
        const float4 quad = *reinterpret_cast<const float4*>(logits + first);
        const float x[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i < V) f(first + i, x[i]);
        }
    }
}
// The block's threads share all tokens, in an order that makes reading fast.
template <class F>
__device__ inline void share_tokens(const float* logits, const F& f) {
    for_tokens(logits, 4 * threadIdx.x, V, 4 * SAMPLE_THREADS, f);
}

// The key up to which the weights add up to `target` (1 .. their sum) or more, lower keys first:
// radix sort's first half, from the highest digit on. Weights are integers: the order of additions
// does not matter.
template <class Key, class Weight>
__device__ inline uint64 find_key(const float* logits, uint64 target, const Key& key,
                                  const Weight& weight) {
    uint64 known = 0;  // the digits so far
    int shift = KEY_BITS, digit;
    do {
        shift -= DIGIT_BITS;
        __syncthreads();  // all have read the counts of the digit before
        digit_weights[threadIdx.x] = digit_counts[threadIdx.x] = 0;
        __syncthreads();
        share_tokens(logits, [&](int v, float x) {
            const uint64 digits = key(v, x) >> shift;
            if (digits >> DIGIT_BITS != known) return;
            atomicAdd(digit_weights + digits % SAMPLE_THREADS, weight(v, x));
            atomicAdd(digit_counts + digits % SAMPLE_THREADS, 1);
        });
        __syncthreads();
        const uint64 mine = digit_weights[threadIdx.x], through = scan_block(mine);
        digit = first_thread(through >= target, false);
        target -= broadcast(through - mine, digit);
        known = known << DIGIT_BITS | digit;
    } while (shift > 0 && digit_counts[digit] > 1);
    return ((known + 1) << shift) - 1;
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
    wait_for_inputs();
    const int b = blockIdx.x, step = control->step;
    const float temperature = control->temperature;
    // Without a temperature, only the likeliest token may be drawn, the first of equal ones.
    const int top_k = temperature > 0.0f ? control->top_k : 0;
    const float top_p = temperature > 0.0f ? control->top_p : 1.0f;
    logits += int64(b) * Vp, tiles += int64(b) * TILES;
    uint64 random = randoms[b];
    const float coin = next_coin(random);

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
    const float log_sum = logf(broadcast(scan_block(plain), SAMPLE_THREADS - 1));
    const float all = broadcast(scan_block(mine), SAMPLE_THREADS - 1);

    const auto in_integers = [&](float weight) { return uint64(weight * ONE); };
    // how far in the order of likelihood their sum is top_p of `sum`
    const auto part_of = [&](uint64 sum) { return max(uint64(1), uint64(double(sum) * top_p)); };

    // The few likeliest tokens: those not further than `reach` from the largest logit. These are at
    // least as many as groups of threads whose best token is as near.
    __shared__ uint64 few[SAMPLE_THREADS];  // their distance and id
    __shared__ int found;
    const auto find_few = [&](int wanted) {
        __shared__ int near[SAMPLE_THREADS], near_count;  // tiles that have one of them
        int groups = SAMPLE_THREADS;                      // thread i is in group i % groups
        while (groups / 4 >= wanted) groups /= 2;
        float* const distances = reinterpret_cast<float*>(few);
        __syncthreads();
        distances[threadIdx.x] = largest - best;
        if (threadIdx.x == 0) found = near_count = 0;
        __syncthreads();
        float nearest = INFINITE;
        for (int i = threadIdx.x; i < SAMPLE_THREADS && threadIdx.x < groups; i += groups)
            nearest = fminf(nearest, distances[i]);
        nearest = sort_block(nearest, groups);
        const float reach = broadcast(nearest, wanted - 1);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (largest - own[i].largest > reach) continue;
            const int place = atomicAdd(&near_count, 1);
            if (place < SAMPLE_THREADS) near[place] = threadIdx.x * EACH + i;
        }
        __syncthreads();
        // a thread for each token of these tiles: one reading of all
        for (int i = threadIdx.x; i < min(near_count, SAMPLE_THREADS) * ROWS; i += SAMPLE_THREADS) {
            const int v = near[i / ROWS] * ROWS + i % ROWS;
            const float distance = v < V ? largest - logits[v] : INFINITE;
            if (v >= V || distance > reach) continue;
            const int place = atomicAdd(&found, 1);
            if (place < SAMPLE_THREADS)
                few[place] = uint64(__float_as_uint(distance)) << ID_BITS | v;
        }
        __syncthreads();
        return found <= SAMPLE_THREADS && near_count <= SAMPLE_THREADS;
    };

    // Of all tokens the likeliest top_k, and of these the fewest that have top_p of their
    // probability; of a token among them, in the order of ids, a thread has the weight.
    const auto draw_of_few = [&] {
        const uint64 place = sort_block(threadIdx.x < found ? few[threadIdx.x] : ALL, found);
        const int id = place % (1 << ID_BITS);
        bool is_kept = threadIdx.x < (top_k > 0 ? min(top_k, found) : found);
        const float distance = __uint_as_float(place >> ID_BITS);
        const float w = is_kept ? expf(-distance / temperature) : 0.0f;
        if (top_p < 1.0f) {
            const uint64 part = in_integers(w), through = scan_block(part);
            const uint64 of_few = broadcast(through, SAMPLE_THREADS - 1);
            const uint64 target = part_of(top_k > 0 ? of_few : in_integers(all));
            if (of_few < target) return -1;
            is_kept = is_kept && through - part < target;
        }
        const int count = __syncthreads_count(is_kept);
        const uint64 kept =
            sort_block(is_kept ? uint64(id) << 32 | __float_as_uint(w) : ALL, count);
        const float weight = kept == ALL ? 0.0f : __uint_as_float(uint32(kept));
        const float through = scan_block(weight);
        const float target = coin * broadcast(through, SAMPLE_THREADS - 1);
        const int thread = first_thread(weight > 0.0f && through > target, weight > 0.0f);
        return broadcast(int(kept >> 32), thread);
    };
    // The same of any number of tokens: the first at which the running sum of the weights exceeds
    // the coin's part of the whole. First the thread that has it, then one of its tokens.
    const auto draw_of_all = [&] {
        uint64 last = ALL;  // key of those that are kept
        // A token's key is smaller the likelier the token, and of equally likely ones for a lower
        // id. It is proportional to the distance from the largest logit: no digit has most of the
        // tokens.
        float scale = 0.0f;
        const auto key = [&](int v, float x) {
            return uint64((largest - x) * scale) << ID_BITS | v;
        };
        const auto weight = [&](int v, float x) {
            if (temperature == 0.0f) return x == largest ? 1.0f : 0.0f;
            return last == ALL || key(v, x) <= last ? exponential(x) : 0.0f;
        };
        if (top_k > 0 || top_p < 1.0f) {
            float farthest = 0.0f;
            share_tokens(logits, [&](int, float x) { farthest = fmaxf(farthest, largest - x); });
            scale = 0.999f * (1ull << (KEY_BITS - ID_BITS)) / fmaxf(block_max(farthest), 1e-20f);
            if (top_k > 0)
                last = find_key(logits, top_k, key, [](int, float) { return uint64(1); });
            if (top_p < 1.0f) {
                const auto part = [&, last](int v, float x) {
                    return key(v, x) <= last ? in_integers(exponential(x)) : 0;
                };
                uint64 sum = 0;
                share_tokens(logits, [&](int v, float x) { sum += part(v, x); });
                sum = broadcast(scan_block(sum), SAMPLE_THREADS - 1);
                last = find_key(logits, part_of(sum), key, part);
            }
            mine = 0.0f;
            for_tokens(logits, threadIdx.x * SPAN, (threadIdx.x + 1) * SPAN, 4,
                       [&](int v, float x) { mine += weight(v, x); });
        }
        float through = scan_block(mine), target = 0.0f;
        if (temperature > 0.0f) target = coin * broadcast(through, SAMPLE_THREADS - 1);
        const int thread = first_thread(mine > 0.0f && through > target, mine > 0.0f);
        target -= broadcast(through - mine, thread);
        const int token = thread * SPAN + threadIdx.x;
        mine = threadIdx.x < SPAN && token < V ? weight(token, logits[token]) : 0.0f;
        through = scan_block(mine);
        return thread * SPAN + first_thread(mine > 0.0f && through > target, mine > 0.0f);
    };
    int token = -1;
    if (top_k > 0 || top_p < 1.0f) {
        // of a nucleus, nobody knows how large it is
        for (int wanted = top_k > 0 ? top_k : FEW / 4; token < 0 && wanted <= FEW;
             wanted = top_k > 0 ? FEW + 1 : wanted * 4) {
            if (find_few(wanted)) token = draw_of_few();
        }
    }
    if (token < 0) token = draw_of_all();

    if (threadIdx.x > 0) return;
    next_tokens[b] = token, randoms[b] = random;
    drawn[step % ring * gridDim.x + b] = token;
    logprobs[step % ring * gridDim.x + b] = logits[token] - largest - log_sum;
    __threadfence();
    if (atomicAdd(&control->arrived, 1) == gridDim.x - 1) {
        control->arrived = 0;
        control->position += 1, control->step += 1;
    }
}
