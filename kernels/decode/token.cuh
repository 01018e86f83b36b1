// What decode_token is built from: sums over the GPU, messages within a cluster, and the ring of
// weights.

#pragma once

#include "decode/step.cuh"
#include "hopper/hopper.cuh"

constexpr int CLUSTER = 8;  // blocks of a cluster
constexpr int CLUSTERS = TOKEN_CLUSTERS, BLOCKS = CLUSTER * CLUSTERS;  // all are resident
constexpr int WORKERS = TOKEN_WARPS, WORKER_THREADS = 32 * WORKERS;    // one more warp loads
constexpr int L = TOKEN_LAYERS;

__device__ constexpr int parts_of(int n, int part) { return (n + part - 1) / part; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }

__device__ inline void workers_sync() {
    named_barrier_sync(1, WORKER_THREADS);
}

// -------------------------------------------------------------------------------------------------
// sums over the clusters: of each channel a 64-bit word in the L2 cache, to which each cluster adds
// its part. Integers have the same sum in any order. From the lowest bit on: how many parts are in
// it; how many of these were NaN or 2^16 or more, which makes the sum NaN (training's stream
// saturates below that, the chain's has no limit); their sum, in units of 2^-FRACTION. So a word
// says itself whether it is complete.

constexpr int COUNT_BITS = 5, FLAG_BITS = 2 * COUNT_BITS, FRACTION = 32, MOST_BITS = 16;
static_assert(CLUSTERS < 1 << COUNT_BITS, "the count has room");
static_assert(COUNT_BITS + MOST_BITS + FRACTION + FLAG_BITS < 64, "the sum has room");

// Of each 128 bytes, 4 words are used: all blocks read all words, and so from more slices of the
// cache than if they were dense.
constexpr int SUMS = 4 * C;  // words
__device__ inline int sum_place(int c) { return c / 4 * 16 + c % 4; }

// 0 for all sums of a step, by all worker warps of the GPU.
__device__ inline void zero_sums(uint64* sums) {
#pragma unroll 1
    for (int i = blockIdx.x * WORKER_THREADS + threadIdx.x; i < 2 * L * C;
         i += BLOCKS * WORKER_THREADS)
        sums[sum_place(i)] = 0;
}

__device__ inline void add_to_sum(uint64* sum, float x) {
    uint64 word = 1;
    if (fabsf(x) < float(1 << MOST_BITS)) {
        word += uint64(__float2ll_rn(x * float(1ull << FRACTION))) << FLAG_BITS;
    } else {
        word += 1 << COUNT_BITS;
    }
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sum), "l"(word) : "memory");
}
__device__ inline void load_sums(uint64 (&words)[2], const uint64* sums) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[0]), "=l"(words[1]) : "l"(sums) : "memory");
}
__device__ inline int count_of(uint64 word) { return word % (1 << COUNT_BITS); }
__device__ inline float value_of(uint64 word) {
    const bool is_finite = (word >> COUNT_BITS) % (1 << COUNT_BITS) == 0;
    const float x = __ll2float_rn(int64(word) >> FLAG_BITS) * (1.0f / float(1ull << FRACTION));
    return is_finite ? x : __int_as_float(0x7fffffff);
}

// -------------------------------------------------------------------------------------------------
// messages to the shared memory of a cluster's blocks: bytes that count towards the phase of the
// mbarrier there

__device__ inline uint32 address_in(const void* shared, int rank) {
    uint32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
}
__device__ inline void send(void* to, uint32 word, Mbarrier* full, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     address_in(to, rank)),
                 "r"(word), "r"(address_in(full, rank)) : "memory");
}
__device__ inline void send(void* to, float4 x, Mbarrier* full, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
                 "{%1, %2, %3, %4}, [%5];" ::"r"(address_in(to, rank)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(address_in(full, rank)) : "memory");
}

// A buffer's mbarrier: it gets BYTES for each of its phases.
template <int BYTES>
struct Inbox {
    Mbarrier full;
    __device__ void init() {
        mbarrier_init(&full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(&full, BYTES);
    }
    // Wait for the bytes of phase `turn`, and expect the next ones.
    __device__ void wait(int turn) {
        mbarrier_wait(&full, turn & 1);
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&full, BYTES);
    }
};

// -------------------------------------------------------------------------------------------------
// a block's pieces of weights, keys and values, in the order in which they are needed, in a ring of
// SLOTS. One thread loads them ahead; at most FLIGHT pieces are under way: what the other warps
// read would wait behind them. A piece is 8 rows of a weight (.,C), or 64 columns of the block's
// C_ROWS rows of another one, which are as many bytes; or keys and values.

constexpr int SLOTS = TOKEN_SLOTS, FLIGHT = TOKEN_FLIGHT;
constexpr int PIECE_ROWS = 8, UNIT = 64, C_ROWS = C / CLUSTER;
constexpr int PIECE = PIECE_ROWS * C, PIECE_BYTES = PIECE * int(sizeof(element));
constexpr int POSITIONS = PIECE / (2 * HS);  // of a piece of keys and values
static_assert(C % UNIT == 0 && C_ROWS <= 256 && FLIGHT <= SLOTS);

extern __shared__ __align__(1024) uint4 pieces[];
__shared__ Ring<SLOTS, 32> ring;

__device__ inline element* piece_at(int i) {
    return reinterpret_cast<element*>(pieces) + i % SLOTS * PIECE;
}

// A worker warp's next piece.
struct Next {
    int i = 0;
    __device__ const element* wait() const {
        ring.wait_full(i);
        return piece_at(i);
    }
    __device__ void release() { ring.release(i++); }
};

// The thread that loads.
struct Loader {
    int i = 0;  // the next piece

    __device__ void begin(int bytes) {
        if (i >= FLIGHT) ring.wait_full(i - FLIGHT);
        ring.wait_empty(i);
        mbarrier_arrive_expect_tx(&ring.full[i % SLOTS], bytes);
    }
    __device__ void copy(int at, const element* from, int bytes) {
        load_bytes(piece_at(i) + at, from, &ring.full[i % SLOTS], bytes);
    }
    // `count` rows of a weight (end,C), from row `first` on; in place of those from `end` on, the
    // last ones.
    __device__ void rows(const element* weight, int first, int count, int end) {
#pragma unroll 1
        for (int r = 0; r < count; r += PIECE_ROWS, i++) {
            begin(PIECE_BYTES);
            copy(0, weight + int64(min(first + r, end - PIECE_ROWS)) * C, PIECE_BYTES);
        }
    }
    // Columns of the block's rows of a weight; what lies outside it is 0.
    __device__ void columns(const TensorMap* map, int first, int count, int row, int layer) {
#pragma unroll 1
        for (int c = 0; c < count; c += UNIT, i++) {
            begin(PIECE_BYTES);
            load_box(piece_at(i), map, &ring.full[i % SLOTS], first + c, row, layer);
        }
    }
    // Keys and values of `count` positions.
    __device__ void positions(const element* keys, const element* values, int count) {
#pragma unroll 1
        for (int first = 0; first < count; first += POSITIONS, i++) {
            const int bytes = min(POSITIONS, count - first) * HS * int(sizeof(element));
            begin(2 * bytes);
            copy(0, keys + first * HS, bytes);
            copy(POSITIONS * HS, values + first * HS, bytes);
        }
    }
};
