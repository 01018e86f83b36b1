// Hopper's asynchronous tensor cores (wgmma), tensor memory accelerator (TMA) and barriers, sm_90a. PTX ISA, "Asynchronous
// Warpgroup Level Matrix Multiply-Accumulate Instructions", "cp.async.bulk.tensor", "mbarrier". A warpgroup is 4 consecutive
// warps, the first a multiple of 4.
//
// D (64,n) += A (64,k) @ B (k,n), D in float32. A and D are in registers, warp w of the group has rows 16w .. 16w + 15; of those,
// lane 4g + t has rows g and g + 8:  d[4j], d[4j+1] are (g, 8j + 2t), (g, 8j + 2t + 1), and d[4j+2], d[4j+3] the same of row g + 8.
// Tiles in shared memory have rows of 128 bytes, whose 16-byte units are permuted: unit u of row r is at u ^ r % 8; every 8 rows
// are 1024 bytes, and a tile starts at a multiple of that. This is how TMA writes with its 128-byte swizzle.
//
// TF32, k = 8: of A, a[4] are (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4). B must have k contiguous in shared memory: a tile
// of 64 rows (n) by 64 floats (8 times k), as two halves of 32 floats.
// bfloat16, k = 16: of A, a[4] are pairs: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8). B is a tile of rows of 64 elements and
// may have k contiguous (each row one n) or n contiguous (each row one k): `across`.

#pragma once

#include "common.cuh"

constexpr int GROUP = 128;        // threads of a warpgroup
constexpr int TILE = 64 * 64;     // elements of 64 rows of a tile

__device__ inline uint32 shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// Which warpgroup of the block this thread is in; from one lane's register, so that the compiler knows it is one for all lanes.
__device__ inline int warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0); }

// Where float c of row r is in a tile.
__device__ inline int place(int r, int c) { return c / 32 * (TILE / 2) + r * 32 + ((c % 32 / 4 ^ r % 8) * 4 | c % 4); }

// What the tensor core is told of a tile: its address in units of 16 bytes, 1024 bytes from one 8 rows to the next, and the
// permutation. That of its k-th 8 floats is `part(k)` units on. (In a cluster of blocks, bits 24 and up of an address are the block's
// number. They come to lie where this kind of tile says nothing, but describe_across its stride.)
__device__ inline unsigned long long describe(const void* tile) {
    return __cvta_generic_to_shared(tile) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The same of a tile of 64 k with rows contiguous: several parts of 64 rows (64 rows of 128 bytes each), one after the other.
__device__ inline unsigned long long describe_across(const void* tile) {
    return __cvta_generic_to_shared(tile) >> 4 | (8192ull >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
__device__ constexpr int part(int k) { return k / 4 * (TILE / 2 * 4 / 16) + k % 4 * 2; }

// Orders this group's registers and earlier wgmma before the next ones; before the first, and after registers were touched.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the newest `PENDING` committed batches are done.
template <int PENDING>
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Keeps the compiler from moving reads or writes of d across this place.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Four matrices of 8 x 8 elements to shared memory: lane l says where row l % 8 of number l / 8 goes; pairs[k] are (g, 2t) and the next of
// number k.
__device__ inline void store_tiles(const uint32 (&pairs)[4], element* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
}

// One step of sums over the 8 lanes that share t: a lane hands one half of its v to the lane 4 * DISTANCE away, and adds up the other
// half.
template <int HALF, int DISTANCE, int N>
__device__ inline void halve(float (&v)[N]) {
    const bool upper = threadIdx.x / (4 * DISTANCE) % 2;
#pragma unroll
    for (int k = 0; k < HALF; k++) {
        const float low = v[k], high = v[k + HALF];  // copies, or the compiler picks one by its address, in local memory
        const float handed = __shfl_xor_sync(0xffffffff, upper ? low : high, 4 * DISTANCE);
        v[k] = (upper ? high : low) + handed;
    }
}

// Online softmax: s, the scores of a thread's rows `row` and `row` + 8 with the keys from `start` on (before scaling; to_log2 is
// the scale, in units of log2), becomes exp(s - largest), later keys 0 if the tile is on the diagonal. largest and sum are those
// of all tiles so far; where largest has grown, what was summed up before is to shrink. Milakov and Gimelshein 2018,
// https://arxiv.org/abs/1805.02867
template <int N>
__device__ inline void softmax_of_tile(float (&s)[N], float (&largest)[2], float (&sum)[2], float (&shrink)[2], float to_log2,
                                       bool diagonal, int start, int row) {
    const int t = threadIdx.x % 4;
    if (diagonal) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = -INFINITE;
        }
    }
    float biggest[2] = {largest[0], largest[1]};
#pragma unroll
    for (int j = 0; j < N; j++) biggest[j % 4 / 2] = fmaxf(biggest[j % 4 / 2], s[j]);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        biggest[k] = quad_max(biggest[k]);  // not -inf: key 0 is in the first tile, and never later
        shrink[k] = power_of_2((largest[k] - biggest[k]) * to_log2);
        largest[k] = biggest[k];
        sum[k] *= shrink[k];
    }
    const float shift[2] = {largest[0] * to_log2, largest[1] * to_log2};
#pragma unroll
    for (int j = 0; j < N; j++) {
        s[j] = power_of_2(s[j] * to_log2 - shift[j % 4 / 2]);
        sum[j % 4 / 2] += s[j];
    }
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D32 D16(0), D16(16)
#define D64 D32, D16(32), D16(48)
#define D80 D64, D16(64)
#define D96 D80, D16(80)
#define D128 D96, D16(96), D16(112)
#define NAMES32                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "  \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                               \
    NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES80 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES96 NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES128                                                                                     \
    NAMES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
    "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#if !BFLOAT16

// d = a @ b, or d += a @ b if `accumulate`.
__device__ inline void wgmma(float (&d)[32], const uint32 (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " "{" NAMES32 "}, {%32, %33, %34, %35}, %36, p, 1, 1; }\n"
        : D32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same with a in shared memory too, as a tile like b's.
__device__ inline void wgmma(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " "{" NAMES32 "}, %32, %33, p, 1, 1; }\n"
        : D32
        : "l"(a), "l"(b), "r"(accumulate));
}

#else

// d = a @ b, or d += a @ b if `accumulate`; ACROSS: b has n contiguous.
template <int ACROSS>
__device__ inline void wgmma(float (&d)[32], const uint32 (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }\n"
        : D32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));
}
template <int ACROSS>
__device__ inline void wgmma(float (&d)[64], const uint32 (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }\n"
        : D64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(ACROSS));
}

// d += a @ b with both in shared memory; A_ACROSS: a has its rows contiguous (each row of the tile one k), too. d is 64 rows by COLUMNS, of
// which a thread has half as many numbers as there are columns; A .. TB: the operands' numbers, after d's.
#define WGMMA(COLUMNS, D, NAMES, A, B, ACCUMULATE, TA, TB)                                                             \
    template <int A_ACROSS, int B_ACROSS>                                                                              \
    __device__ inline void wgmma(float(&d)[COLUMNS / 2], unsigned long long a, unsigned long long b, int accumulate) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 "                                 \
                     "{" NAMES "}, " A ", " B ", p, 1, 1, " TA ", " TB "; }\n"                                         \
                     : D                                                                                               \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(A_ACROSS), "n"(B_ACROSS));                                 \
    }
WGMMA(128, D64, NAMES64, "%64", "%65", "%66", "%67", "%68")
WGMMA(160, D80, NAMES80, "%80", "%81", "%82", "%83", "%84")
WGMMA(192, D96, NAMES96, "%96", "%97", "%98", "%99", "%100")
WGMMA(256, D128, NAMES128, "%128", "%129", "%130", "%131", "%132")

#endif

// A barrier in shared memory. Its phase ends when all arrivals that it was made for have come, and all bytes announced to it.
typedef unsigned long long Barrier;

// What the CPU made with cuTensorMapEncodeTiled: where a tensor lies and how tiles are cut out of it. A kernel's argument.
struct alignas(64) TensorMap {
    char opaque[128];
};

// By one thread; the others may use the barriers after fence_barriers() by that thread and a barrier of theirs, like __syncthreads().
__device__ inline void barrier_make(Barrier* b, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(Barrier* b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrive, and announce that so many bytes are on their way.
__device__ inline void barrier_expect(Barrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// Wait for the end of a phase; `parity` is 0 for the first one, 1 for the second, 0 for the third ...
__device__ inline void barrier_wait(Barrier* b, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }\n" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// A ring of STAGES places in shared memory that a thread fills and warps empty; used for tiles number 0, 1, 2 ... LANES of each warp
// give a place back: one will do, but compute-sanitizer's racecheck takes what the other lanes read by ordinary loads for unordered;
// where all do, which in a loop's body costs (attention_backward_dkv, H200: 1 percent), it does not.
template <int STAGES, int LANES = 1>
struct Ring {
    Barrier full[STAGES], empty[STAGES];

    // By one thread; `arrivals` for full, beside the announced bytes; `warps` give a place back.
    __device__ void make(int arrivals, int warps) {
        for (int s = 0; s < STAGES; s++) {
            barrier_make(&full[s], arrivals);
            barrier_make(&empty[s], warps * LANES);
        }
    }
    // Tile i: wait until it is here; give its place back (each warp, after it was here); wait until its place is free.
    __device__ void wait(int i) { barrier_wait(&full[i % STAGES], i / STAGES & 1); }
    __device__ void release(int i) {
        __syncwarp();
        if (threadIdx.x % 32 < LANES) barrier_arrive(&empty[i % STAGES]);
    }
    __device__ void wait_for_room(int i) {
        if (i >= STAGES) barrier_wait(&empty[i % STAGES], (i / STAGES & 1) ^ 1);
    }
};

// Begin to copy a box of a (B,T,columns) tensor, from (b, row, column) on, to shared memory; beyond the tensor there are zeros. `b`
// is told of the bytes that have landed.
__device__ inline void load_box(void* to, const TensorMap* map, Barrier* b, int column, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(b))
                 : "memory");
}

// Begin to copy a box from shared memory into a tensor; what is beyond the tensor is left out. stores_commit: once after those that
// stores_wait counts as one.
__device__ inline void store_box(const TensorMap* map, const void* from, int column, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(column), "r"(row), "r"(batch)
                 : "memory");
}
__device__ inline void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Begin to copy a row of so many bytes, a multiple of 16, to shared memory; `b` is told of the bytes that have landed.
__device__ inline void load_bytes(void* to, const void* from, Barrier* b, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}
// Begin to copy bytes back. stores_wait: until shared memory of all but the newest PENDING of this thread's copies may be written again.
__device__ inline void store_bytes(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
template <int PENDING>
__device__ inline void stores_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

// Shared memory written by ordinary stores is about to be read by wgmma or TMA: in each writing thread, before the barrier.
__device__ inline void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 .. 15) for `threads` threads, some of which only arrive.
__device__ inline void barrier_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Hand registers from one warpgroup to the others; N a multiple of 8. Needs __launch_bounds__(threads, 1).
template <int N>
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// Dynamic shared memory from the first multiple of 1024 bytes on.
__device__ inline element* tiles_of(float4* shared) {
    return reinterpret_cast<element*>(reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023));
}
