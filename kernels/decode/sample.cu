// decode_sample: a block draws a sequence's next token. Reading the logits from the L2 cache bounds
// it: twice, and for top_k and top_p a few times more each. All sums have a fixed order or are of
// integers.

#include "decode/step.cuh"

constexpr int SAMPLE_THREADS = DECODE_SAMPLE_THREADS;
constexpr int KEY_BITS = 60, DIGIT_BITS = 10, ID_BITS = 20;
constexpr uint64 ALL = ~0ull;
constexpr int SPAN = (V + SAMPLE_THREADS - 1) / SAMPLE_THREADS * 32;  // of tokens, for a warp
static_assert(SAMPLE_THREADS == 32 * 32 && SAMPLE_THREADS == 1 << DIGIT_BITS,
              "a lane for each warp, a thread a digit");
static_assert(V <= 1 << ID_BITS && KEY_BITS % DIGIT_BITS == 0,
              "a key ends with the id, and has whole digits");

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

// f(id, its logit) for the tokens of this warp's span, each lane for some. Several loads are in
// flight at once.
template <class F>
__device__ inline void for_tokens(const float* logits, const F& f) {
    const int begin = threadIdx.x / 32 * SPAN, end = min(V, begin + SPAN);
    for (int first = begin + threadIdx.x % 32; first < end; first += 8 * 32) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = first + i * 32 < end ? logits[first + i * 32] : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (first + i * 32 < end) f(first + i * 32, x[i]);
        }
    }
}

// The key up to which the weights add up to `target` (1 .. their sum) or more, lower keys first:
// radix sort's first half, from the highest digit on. Weights are integers: the order of additions
// does not matter.
template <class Key, class Weight>
__device__ inline uint64 find_key(const float* logits, uint64 target, const Key& key,
                                  const Weight& weight) {
    __shared__ uint64 weights[SAMPLE_THREADS];  // by a digit of the key
    __shared__ int counts[SAMPLE_THREADS];
    uint64 known = 0;  // the digits so far
    int shift = KEY_BITS, digit;
    do {
        shift -= DIGIT_BITS;
        __syncthreads();  // all have read the counts of the digit before
        weights[threadIdx.x] = counts[threadIdx.x] = 0;
        __syncthreads();
        for_tokens(logits, [&](int v, float x) {
            const uint64 digits = key(v, x) >> shift;
            if (digits >> DIGIT_BITS != known) return;
            atomicAdd(weights + digits % SAMPLE_THREADS, weight(v, x));
            atomicAdd(counts + digits % SAMPLE_THREADS, 1);
        });
        __syncthreads();
        const uint64 mine = weights[threadIdx.x], through = scan_block(mine);
        digit = first_thread(through >= target, false);
        target -= broadcast(through - mine, digit);
        known = known << DIGIT_BITS | digit;
    } while (shift > 0 && counts[digit] > 1);
    return ((known + 1) << shift) - 1;
}

// xorshift64*: the next 24 random bits as a float in [0, 1).
__device__ inline float next_coin(uint64& state) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return float(uint32(state * 0x2545F4914F6CDD1Dull >> 32) >> 8) / 16777216.0f;
}

// Block (SAMPLE_THREADS); grid (B). drawn, logprobs (ring,B): pinned, a row a step in turn; the
// latter under the model.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
decode_sample(int* next_tokens, uint64* randoms, Control* control, int* drawn, float* logprobs,
              const float* logits,
              int ring) {
    constexpr uint64 ONE = 1ull << 40;  // of the integers that stand for probabilities
    let_next_begin();
    wait_for_inputs();
    const int b = blockIdx.x, step = control->step;
    const float temperature = control->temperature;
    logits += int64(b) * Vp;
    uint64 random = randoms[b];
    const float coin = next_coin(random);

    float largest = -INFINITE, smallest = INFINITE;
    for_tokens(logits,
               [&](int, float x) { largest = fmaxf(largest, x), smallest = fminf(smallest, x); });
    largest = block_max(largest), smallest = -block_max(-smallest);

    // A token's key is smaller the likelier the token, and of equally likely ones for a lower id.
    // It is proportional to the distance from the largest logit: no digit has most of the tokens.
    const float scale = 0.999f * (1ull << (KEY_BITS - ID_BITS)) / fmaxf(largest - smallest, 1e-20f);
    const auto key = [&](int v, float x) { return uint64((largest - x) * scale) << ID_BITS | v; };
    const auto exponential = [&](float x) { return expf((x - largest) / temperature); };

    // Without a temperature, only the likeliest token may be drawn, the first of equal ones.
    // Otherwise, those with keys up to `last`: of all tokens the likeliest top_k, and of these the
    // fewest that have top_p of their probability.
    uint64 last = ALL;
    if (temperature > 0.0f && control->top_k > 0) {
        last = find_key(logits, control->top_k, key, [](int, float) { return uint64(1); });
    }
    if (temperature > 0.0f && control->top_p < 1.0f) {
        const auto part =
            [&, last](int v, float x) { return key(v, x) <= last ? uint64(exponential(x) * ONE) : 0;
                                       };
        uint64 sum = 0;
        for_tokens(logits, [&](int v, float x) { sum += part(v, x); });
        sum = broadcast(scan_block(sum), SAMPLE_THREADS - 1);
        last = find_key(logits, max(uint64(1), uint64(double(sum) * control->top_p)), key, part);
    }
    const auto weight = [&](int v, float x) {
        if (temperature == 0.0f) return x == largest ? 1.0f : 0.0f;
        return last == ALL || key(v, x) <= last ? exponential(x) : 0.0f;
    };

    // The first token at which the running sum of the weights exceeds the coin's part of the whole:
    // first the warp's span that has it, then a thread's part of that, down to one token.
    float mine = 0.0f, plain = 0.0f;  // the latter: for log-probabilities, of all tokens
    for_tokens(logits, [&](int v, float x) {
        const float p = expf(x - largest);
        plain += p;
        mine += temperature == 1.0f && last == ALL ? p : weight(v, x);
    });
    const float log_sum = logf(broadcast(scan_block(plain), SAMPLE_THREADS - 1));
    mine = warp_sum(mine);
    if (threadIdx.x % 32) mine = 0.0f;
    float through = scan_block(mine), target = 0.0f;
    if (temperature > 0.0f) target = coin * broadcast(through, SAMPLE_THREADS - 1);
    int begin = 0, end = V, span = SPAN, each = SPAN / 32;
    while (true) {
        const int thread = first_thread(mine > 0.0f && through > target, mine > 0.0f);
        begin += thread * each, end = min(end, begin + span);
        if (span == 1) break;
        target -= broadcast(through - mine, thread);
        span = each = (end - begin + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
        mine = 0.0f;
        const int from = begin + threadIdx.x * each;
        for (int v = from; v < min(end, from + each); v++) mine += weight(v, logits[v]);
        through = scan_block(mine);
    }
    if (threadIdx.x > 0) return;
    next_tokens[b] = begin, randoms[b] = random;
    drawn[step % ring * gridDim.x + b] = begin;
    logprobs[step % ring * gridDim.x + b] = logits[begin] - largest - log_sum;
    __threadfence();
    if (atomicAdd(&control->arrived, 1) == gridDim.x - 1) {
        control->arrived = 0;
        control->position += 1, control->step += 1;
    }
}
