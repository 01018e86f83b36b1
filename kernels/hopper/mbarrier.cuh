// mbarriers (sm_90 and later), at which threads wait for bytes that TMA delivers and for each
// other, and copies of contiguous bytes. One function for each PTX instruction. PTX ISA:
// "mbarrier", "cp.async.bulk".

#pragma once

#include "common.cuh"

__device__ inline uint32 shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// An mbarrier, in shared memory. It counts phases: a phase ends when as many arrivals as it was
// initialized for have come, and all bytes that were announced to it. A waiting thread names the
// phase by its parity.
typedef unsigned long long Mbarrier;

// Called by one thread, which then calls fence_mbarrier_init(); the other threads may use the
// mbarrier after the next __syncthreads().
__device__ inline void mbarrier_init(Mbarrier* b, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)),
                 "r"(arrivals) : "memory");
}
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive(Mbarrier* b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrive, and announce bytes that TMA will deliver.
__device__ inline void mbarrier_arrive_expect_tx(Mbarrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes) : "memory");
}
// Wait for the end of the phase of this parity: 0 for the first phase, 1 for the second, 0 for the
// third ... Parity only tells the current phase from the previous one, so a thread must not fall
// two phases behind.
__device__ inline void mbarrier_wait(Mbarrier* b, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }\n" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// Start copying contiguous bytes, a multiple of 16, to shared memory. They count towards the phase
// of `full`.
__device__ inline void load_bytes(void* to, const void* from, Mbarrier* full, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

// Make this thread's ordinary writes to shared memory visible to wgmma and TMA, the "async proxy".
// Call it before the barrier after which these read them; and, where only __syncwarp() is between
// ordinary loads and TMA that overwrites what they read, before that. A ring's `empty` needs none.
__device__ inline void fence_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -------------------------------------------------------------------------------------------------
// clusters of blocks, whose shared memory all of them reach

__device__ inline int block_of_cluster() {
    int block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    return block;
}
// All threads of the cluster wait for each other.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
