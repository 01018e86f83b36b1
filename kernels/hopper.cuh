// Hopper's asynchronous tensor cores (wgmma) and warpgroup barriers, sm_90a. PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions". A warpgroup is 4 consecutive warps, the first a multiple of 4.
//
// D (64,64) += A (64,8) @ B (8,64) in TF32. A and D are in registers, warp w of the group has rows 16w .. 16w + 15, laid out as
// in mma.cuh: a[4] as its TileA, d[32] as 8 of its TileD side by side. B is read from shared memory and must have its inner
// dimension contiguous there: a tile of 64 rows (the columns of B) by 64 floats (8 instructions' worth of its rows), as two
// halves of 32 floats; a row of a half is 128 bytes, and its 16-byte units are permuted: unit u of row r is at u ^ r % 8.

#pragma once

#include "common.cuh"

constexpr int GROUP = 128;        // threads of a warpgroup
constexpr int TILE = 64 * 64;     // floats of one tile; it must start at a multiple of 1024 bytes

// Which warpgroup of the block this thread is in; from one lane's register, so that the compiler knows it is one for all lanes.
__device__ inline int warpgroup() { return __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0); }

// Where float c of row r is in a tile.
__device__ inline int place(int r, int c) { return c / 32 * (TILE / 2) + r * 32 + ((c % 32 / 4 ^ r % 8) * 4 | c % 4); }

// What the tensor core is told of a tile: its address in units of 16 bytes, 1024 bytes from one 8 rows to the next, and the
// permutation. That of its k-th 8 floats is `part(k)` units on.
__device__ inline unsigned long long describe(const float* tile) {
    return __cvta_generic_to_shared(tile) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ constexpr int part(int k) { return k / 4 * (TILE / 2 * 4 / 16) + k % 4 * 2; }

// Orders this group's registers and earlier wgmma before the next ones; before the first, and after registers were touched.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the newest `PENDING` committed batches are done.
template <int PENDING>
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Keeps the compiler from moving reads or writes of d across this place.
__device__ inline void pin(float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define WGMMA_D                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define WGMMA_D_REGISTERS                                                                                                        \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),        \
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),       \
        "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),       \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

// d = a @ b, or d += a @ b if `accumulate`.
__device__ inline void wgmma(float (&d)[32], const uint32 (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " WGMMA_D "{%32, %33, %34, %35}, %36, p, 1, 1; }\n"
        : WGMMA_D_REGISTERS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same with a in shared memory too, as a tile like b's.
__device__ inline void wgmma(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " WGMMA_D "%32, %33, p, 1, 1; }\n"
        : WGMMA_D_REGISTERS
        : "l"(a), "l"(b), "r"(accumulate));
}

// Shared memory written by ordinary stores is about to be read by wgmma: in each writing thread, before the barrier.
__device__ inline void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 .. 15) for `threads` threads, some of which only arrive.
__device__ inline void barrier_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Hand registers from one warpgroup to the others; N a multiple of 8. Needs __launch_bounds__(threads, 1).
template <int N>
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
