// What decode_token is built from: sums over the GPU, messages within a cluster, and the ring of
// weights.

#pragma once

#include "decode/step.cuh"
#include "hopper/hopper.cuh"

constexpr int CLUSTER = 8;  // blocks of a cluster
constexpr int CLUSTERS = TOKEN_CLUSTERS, BLOCKS = CLUSTER * CLUSTERS;  // all are resident
constexpr int WORKERS = TOKEN_WARPS, WORKER_THREADS = 32 * WORKERS;    // one more warp loads

__device__ inline int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void workers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(WORKER_THREADS) : "memory");
}

// Waits end after 2 seconds: where a block has failed, the others fail, too.
__device__ inline uint32 cycles() {
    uint32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    return now;
}
__device__ inline void trap_if_late(uint32 begun) {
    if (cycles() - begun > 3500000000u) asm volatile("trap;");
}
__device__ inline void wait_for(Mbarrier* b, int parity) {
    const uint32 begun = cycles();
    for (int done = false; !done; trap_if_late(begun)) {
        asm volatile(
            "{ .reg .pred done;\n"
            "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
            "selp.b32 %0, 1, 0, done; }\n" : "=r"(done) : "r"(shared_address(b)), "r"(parity)
            : "memory");
    }
}

// -------------------------------------------------------------------------------------------------
// sums over the clusters: of each channel a 64-bit word in the L2 cache, to which each cluster adds
// its part. Integers have the same sum in any order. From the lowest bit on: how many have added
// theirs; how many of these were too large, or NaN; the sum, in units of 2^-FRACTION. Who reads a
// word knows from itself whether it is complete.

constexpr int COUNT_BITS = 5, FLAG_BITS = 2 * COUNT_BITS, FRACTION = 32;
static_assert(CLUSTERS < 1 << COUNT_BITS, "the count has room");

// So many words are together, of each 128 bytes: all blocks read all words, from more slices of the
// cache than if these were dense.
constexpr int TOGETHER = TOKEN_TOGETHER, SUMS = C / TOGETHER * 16;  // words
__device__ inline int sum_place(int c) { return c / TOGETHER * 16 + c % TOGETHER; }

__device__ inline void add_to_sum(uint64* sum, float x) {
    uint64 word = 1;
    if (fabsf(x) < 65536.0f) {
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
        wait_for(&full, turn & 1);
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&full, BYTES);
    }
};

// -------------------------------------------------------------------------------------------------
// the ring: a block's pieces of weights, keys and values, in the order in which they are needed.
// One thread loads them as far ahead as there are slots. At most FLIGHT pieces are under way: what
// the other warps read would wait behind them. A piece is 8 rows of a weight (.,C), or 64 columns
// of the block's C_ROWS rows of another one, which are as many bytes; or keys and values.

constexpr int SLOTS = TOKEN_SLOTS, FLIGHT = TOKEN_FLIGHT;
constexpr int PIECE_ROWS = 8, UNIT = 64, C_ROWS = C / CLUSTER;
constexpr int SLOT = PIECE_ROWS * C, SLOT_BYTES = SLOT * int(sizeof(element));
constexpr int POSITIONS = SLOT / (2 * HS);  // of a piece of keys and values
static_assert(C % UNIT == 0 && C_ROWS <= 256 && FLIGHT <= SLOTS);

extern __shared__ __align__(1024) uint4 ring_slots[];
__shared__ Mbarrier ring_full[SLOTS], ring_empty[SLOTS];

struct Cursor {
    int slot = 0, parity = 0;
    __device__ void advance(int pieces) {  // at most SLOTS
        slot += pieces;
        if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
    }
    __device__ Cursor after(int pieces) const {
        Cursor c = *this;
        c.advance(pieces);
        return c;
    }
    __device__ element* data() const {
        return reinterpret_cast<element*>(ring_slots) + slot * SLOT;
    }
    // These two by all worker warps, for the next `count` pieces; each lane asks for one.
    __device__ void wait_full(int count) const {
        const Cursor own = after(min(int(threadIdx.x % 32), count - 1));
        wait_for(&ring_full[own.slot], own.parity);
        __syncwarp();
    }
    __device__ void release(int count) {
        const int lane = threadIdx.x % 32;
        __syncwarp();
        if (lane < count) mbarrier_arrive(&ring_empty[after(lane).slot]);
        advance(count);
    }
};

// The thread that loads.
struct Loader {
    Cursor next, arriving;
    int begun = 0;

    // The next slot is going to have so many bytes.
    __device__ void begin(int bytes) {
        if (begun++ >= FLIGHT) {
            wait_for(&ring_full[arriving.slot], arriving.parity);
            arriving.advance(1);
        }
        wait_for(&ring_empty[next.slot], next.parity ^ 1);
        mbarrier_arrive_expect_tx(&ring_full[next.slot], bytes);
    }
    __device__ void copy(int at, const element* from, int bytes) {
        load_bytes(next.data() + at, from, &ring_full[next.slot], bytes);
    }
    // `count` rows of a weight (end,C), from row `first` on; in place of those from `end` on, the
    // last ones.
    __device__ void rows(const element* weight, int first, int count, int end) {
#pragma unroll 1
        for (int i = 0; i < count; i += PIECE_ROWS) {
            begin(SLOT_BYTES);
            copy(0, weight + int64(min(first + i, end - PIECE_ROWS)) * C, SLOT_BYTES);
            next.advance(1);
        }
    }
    // Columns of the block's rows of a weight; what lies outside it is 0.
    __device__ void columns(const TensorMap* map, int first, int count, int row, int layer) {
#pragma unroll 1
        for (int i = 0; i < count; i += UNIT) {
            begin(SLOT_BYTES);
            load_box(next.data(), map, &ring_full[next.slot], first + i, row, layer);
            next.advance(1);
        }
    }
    // Keys and values of `count` positions.
    __device__ void positions(const element* keys, const element* values, int count) {
#pragma unroll 1
        for (int first = 0; first < count; first += POSITIONS) {
            const int bytes = min(POSITIONS, count - first) * HS * int(sizeof(element));
            begin(2 * bytes);
            copy(0, keys + first * HS, bytes);
            copy(POSITIONS * HS, values + first * HS, bytes);
            next.advance(1);
        }
    }
};
