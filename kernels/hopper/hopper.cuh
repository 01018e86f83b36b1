// Hopper's own instructions (sm_90a), one function for each: wgmma, the asynchronous matmul of a warpgroup; TMA, the
// tensor memory accelerator, which copies boxes of a tensor; and a ring buffer built from TMA and mbarriers. PTX ISA:
// "wgmma.mma_async", "cp.async.bulk.tensor".
//
// A warpgroup is 4 consecutive warps, the first one a multiple of 4. One wgmma computes D (64,n) += A (64,k) @ B (k,n),
// with D in float32 in registers, A in registers or shared memory, and B in shared memory.
//
// Registers: warp w of the warpgroup holds rows 16w .. 16w + 15. Of these, lane 4g + t holds parts of rows g and g + 8:
//     D                    d[4j .. 4j + 3] are (g, 8j + 2t), (g, 8j + 2t + 1), (g + 8, 8j + 2t), (g + 8, 8j + 2t + 1)
//     A, k = 16            a[0..3] are the pairs at (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
//
// Shared memory: a tile has rows of 128 bytes, and starts at a multiple of 1024 bytes (8 rows). The 16-byte units of a
// row are swizzled, as by TMA's 128-byte swizzle: unit u of row r is stored at u ^ r % 8.
//     A or B, bfloat16     rows of 64 elements, contiguous along k (K-major) or, ACROSS, along m or n (MN-major)
//     A or B, FP8          rows of 128 elements, K-major

#pragma once

#include "hopper/mbarrier.cuh"
#include "softmax.cuh"

constexpr int WARPGROUP = 128;  // threads of a warpgroup

// The warpgroup of this thread. The shuffle tells the compiler that it is uniform across the warp.
__device__ inline int warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0); }

// wgmma's descriptor of a K-major tile: its address in units of 16 bytes, a stride of 1024 bytes between groups of 8
// rows, the 128-byte swizzle. (In a cluster, bits 24 and up of an address are the block's number. Shifted, they fall on
// a field that K-major tiles do not use; in descriptor_across, that field is a stride.)
__device__ inline unsigned long long descriptor(const void* tile) {
    return __cvta_generic_to_shared(tile) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The same for an MN-major tile: boxes of 64 k by 64 columns, 8192 bytes each, back to back.
__device__ inline unsigned long long descriptor_across(const void* tile) {
    return __cvta_generic_to_shared(tile) >> 4 | (8192ull >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// wgmma is asynchronous: fence, issue some, commit them as a group, wait for the group. The fence makes the next wgmma
// see what this warpgroup wrote to registers: before the first one, and whenever registers of a or d were accessed.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The compiler does not know that a wgmma in flight writes d: this keeps reads and writes of d where they are.
template <int N, class... More>
__device__ inline void fence_operand(float (&d)[N], More&... more) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
    (fence_operand(more), ...);
}
// Wait until at most PENDING committed groups are still in flight, and fence `results` of the others.
template <int PENDING, class... Results>
__device__ inline void wgmma_wait(Results&... results) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (fence_operand(results), ...);
}

// stmatrix: store four 8 x 8 matrices of 16 bits to shared memory. Lane l passes the address of row l % 8 of matrix
// l / 8; pairs[k] are its elements (g, 2t), (g, 2t + 1) of matrix k.
__device__ inline void store_tiles(const uint32 (&pairs)[4], void* row) {
    const uint32 to = shared_address(row);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
}

// One step of a reduce-scatter over the 8 lanes with the same t: a lane sends one half of its v to the lane 4 *
// DISTANCE away, and adds what it receives from there to the other half, which it keeps.
template <int HALF, int DISTANCE, int N>
__device__ inline void halve(float (&v)[N]) {
    const bool upper = threadIdx.x / (4 * DISTANCE) % 2;
#pragma unroll
    for (int k = 0; k < HALF; k++) {
        const float low = v[k], high = v[k + HALF];  // copies: v indexed by `upper` would be put in local memory
        const float received = __shfl_xor_sync(0xffffffff, upper ? low : high, 4 * DISTANCE);
        v[k] = (upper ? high : low) + received;
    }
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D32 D16(0), D16(16)
#define D64 D32, D16(32), D16(48)
#define D80 D64, D16(64)
#define D96 D80, D16(80)
#define NAMES32                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "  \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                               \
    NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES80 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES96 NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// Begin d = a @ b, or d += a @ b if `accumulate`. d is 64 rows by COLUMNS, half as many floats per thread; a is in
// shared memory or, WGMMA_REGISTERS, in registers. A .. MAJOR are the numbers of the asm operands, which follow d's.
#define WGMMA_ASM(SHAPE, NAMES, A, B, ACCUMULATE, MAJOR, INPUTS, ...)                                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" SHAPE " {" NAMES "}, " A ", " B ", p, 1, 1" MAJOR "; }\n"         \
                 : __VA_ARGS__                                                                                         \
                 : INPUTS##_INPUTS);
#if MATMUL_FP8
// a and b are of E4M3, or one of them of E5M2; k must be contiguous, of an `a` in registers once it is there.
#define SHARED_INPUTS "l"(a), "l"(b), "r"(accumulate)
#define REGISTER_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
#define WGMMA_OF_TYPES(COLUMNS, NAMES, A, B, ACCUMULATE, MAJOR, INPUTS, ...)                                           \
    static_assert(!B_ACROSS, "in 8 bits");                                                                             \
    if (A_E5M2) {                                                                                                      \
        WGMMA_ASM(#COLUMNS "k32.f32.e5m2.e4m3", NAMES, A, B, ACCUMULATE, "", INPUTS, __VA_ARGS__)                      \
    } else if (B_E5M2) {                                                                                               \
        WGMMA_ASM(#COLUMNS "k32.f32.e4m3.e5m2", NAMES, A, B, ACCUMULATE, "", INPUTS, __VA_ARGS__)                      \
    } else {                                                                                                           \
        WGMMA_ASM(#COLUMNS "k32.f32.e4m3.e4m3", NAMES, A, B, ACCUMULATE, "", INPUTS, __VA_ARGS__)                      \
    }
#else
// Each operand is MN-major if its ACROSS is 1.
#define SHARED_INPUTS "l"(a), "l"(b), "r"(accumulate), "n"(A_ACROSS), "n"(B_ACROSS)
#define REGISTER_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(B_ACROSS)
#define WGMMA_OF_TYPES(COLUMNS, NAMES, A, B, ACCUMULATE, MAJOR, INPUTS, ...)                                           \
    WGMMA_ASM(#COLUMNS "k16.f32.bf16.bf16", NAMES, A, B, ACCUMULATE, ", " MAJOR, INPUTS, __VA_ARGS__)
#endif
#define WGMMA(COLUMNS, D, NAMES, A, B, ACCUMULATE, MAJOR)                                                              \
    template <int A_ACROSS, int B_ACROSS, bool A_E5M2 = false, bool B_E5M2 = false>                                    \
    __device__ inline void wgmma(float(&d)[COLUMNS / 2], unsigned long long a, unsigned long long b, int accumulate) { \
        WGMMA_OF_TYPES(COLUMNS, NAMES, A, B, ACCUMULATE, MAJOR, SHARED, D)                                             \
    }
#define WGMMA_REGISTERS(COLUMNS, D, NAMES, A, B, ACCUMULATE, MAJOR)                                                    \
    template <int B_ACROSS, bool A_E5M2 = false, bool B_E5M2 = false>                                                  \
    __device__ inline void wgmma(float(&d)[COLUMNS / 2], const uint32(&a)[4], unsigned long long b, int accumulate) {  \
        WGMMA_OF_TYPES(COLUMNS, NAMES, A, B, ACCUMULATE, MAJOR, REGISTER, D)                                           \
    }
WGMMA(128, D64, NAMES64, "%64", "%65", "%66", "%67, %68")
WGMMA(160, D80, NAMES80, "%80", "%81", "%82", "%83, %84")
WGMMA(192, D96, NAMES96, "%96", "%97", "%98", "%99, %100")
WGMMA_REGISTERS(64, D32, NAMES32, "{%32, %33, %34, %35}", "%36", "%37", "%38")
WGMMA_REGISTERS(128, D64, NAMES64, "{%64, %65, %66, %67}", "%68", "%69", "%70")
WGMMA_REGISTERS(160, D80, NAMES80, "{%80, %81, %82, %83}", "%84", "%85", "")
WGMMA_REGISTERS(192, D96, NAMES96, "{%96, %97, %98, %99}", "%100", "%101", "")

// A ring buffer of STAGES stages in shared memory: a producer fills them, consumer warps empty them. Tile i = 0, 1, 2
// ... is in stage i % STAGES, as number i / STAGES, whose parity its mbarriers, `full` and `empty`, wait for.
//
//     producer    wait_empty(i);  mbarrier_arrive_expect_tx(&full[stage], bytes);  load_box(..., &full[stage], ...)
//     consumers   wait_full(i);   use the tile;  release(i)
//
// LANES lanes of each consumer warp arrive on `empty`. One is enough, after __syncwarp(); but where lanes read the
// stage by ordinary loads, compute-sanitizer's racecheck wants all 32, at some cost in an inner loop.
template <int STAGES, int LANES = 1>
struct Ring {
    Mbarrier full[STAGES], empty[STAGES];

    // Called by one thread. `arrivals` on `full`, with that of TMA's thread; `warps` consumer warps release a stage.
    __device__ void init(int arrivals, int warps) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(&full[s], arrivals);
            mbarrier_init(&empty[s], warps * LANES);
        }
    }
    __device__ void wait_full(int i) { mbarrier_wait(&full[i % STAGES], i / STAGES & 1); }
    __device__ void release(int i) {  // by every consumer warp, even if it did not use the tile
        __syncwarp();
        if (threadIdx.x % 32 < LANES) mbarrier_arrive(&empty[i % STAGES]);
    }
    __device__ void skip(int i) { wait_full(i), release(i); }  // a tile that only other consumers need
    __device__ void wait_empty(int i) {  // the first STAGES tiles find their stage empty
        if (i >= STAGES) mbarrier_wait(&empty[i % STAGES], (i / STAGES & 1) ^ 1);
    }
};

// A tensor's address and shape, and the size and swizzle of the boxes that TMA copies: encoded on the host by
// cuTensorMapEncodeTiled, in llmc/gpu/device.py, and passed as a kernel argument.
struct alignas(64) TensorMap {
    char opaque[128];
};
#define MAP const __grid_constant__ TensorMap  // the type of such an argument

// Start a TMA load: the box at (batch, row, column) of a (B,T,columns) tensor, to shared memory. What lies outside the
// tensor arrives as zeros. The bytes count towards the phase of `full`.
__device__ inline void load_box(void* to, const TensorMap* map, Mbarrier* full, int column, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(full))
        : "memory");
}

// Start to bring the box into the L2 cache.
__device__ inline void prefetch_box(const TensorMap* map, int column, int row, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(column), "r"(row),
                 "r"(batch)
                 : "memory");
}

// Start a TMA store: a box from shared memory to a tensor; what lies outside the tensor is not written. stores_commit()
// makes a group of the thread's stores since the last commit, for stores_wait().
__device__ inline void store_box(const TensorMap* map, const void* from, int column, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(column), "r"(row), "r"(batch)
                 : "memory");
}
__device__ inline void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Start copying contiguous bytes, a multiple of 16, from shared memory, as one committed group.
__device__ inline void store_bytes(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Wait until all but the newest PENDING groups of this thread's stores have read their shared memory.
template <int PENDING>
__device__ inline void stores_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

// Named barriers: a block has 16 in hardware; __syncthreads() is number 0. It opens when `threads` threads are there.
__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Set the number of registers per thread, a multiple of 8: a producer warpgroup gives some up, consumer warpgroups take
// them. The kernel needs __launch_bounds__(threads, 1).
template <int N>
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// Dynamic shared memory, aligned to 1024 bytes as the swizzle requires.
__device__ inline element* tiles_of(float4* shared) {
    return reinterpret_cast<element*>(reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023));
}
