// The matmul of the forward pass with Hopper's own instructions (sm_90a), bfloat16: the steps from matmul.cu to the
// live kernel, kernels/hopper/matmul.cu. RESULTS.md has what each rung measured.
//
//     out (M,N) = inp (M,K) @ weight^T (K,N) + bias        out =
//
// With wgmma, the four warps of a warpgroup multiply together: 64 rows by 128 to 256 columns and 16 of the inner
// dimension in one instruction, both operands in shared memory. TMA loads these, in steps of 64 of the inner dimension,
// issued by one thread; what lies outside the tensor arrives as zeros. Everything else is about keeping the tensor
// cores busy. Each kernel has one idea more than the one before.
//
// Not every idea makes it faster: the inner dimension of fc is short, 12 steps, and then comes the epilogue, during
// which a block multiplies nothing. With the first two kernels, a second block on the multiprocessor multiplies
// meanwhile. From tiles_128x256 on, there is no shared memory for a second block. Only the live kernel makes up for
// that.
//
// Bound by the tensor cores: 2048 multiply-adds per cycle and multiprocessor.

#include "hopper/hopper.cuh"
#include "matmul.cuh"

#if BFLOAT16 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ON_HOPPER(call) call

constexpr int BK = 64;  // of a step

template <int BN, int HALVES>
using Accumulators = float[HALVES][BN / 2];  // a thread's part of a warpgroup's HALVES * 64 x BN

// Begin acc = a (HALVES * 64,BK) @ b (BK,BN), or += if not `first`.
template <int BN, int HALVES>
__device__ __forceinline__ void begin_matmul(Accumulators<BN, HALVES>& acc, const element* a, const element* b,
                                             bool first) {
    const unsigned long long of_a = descriptor(a), of_b = descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < BK / 16; part++) {  // 16 of the inner dimension: 32 bytes of each row
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            wgmma<0, 0>(acc[half], of_a + half * 512 + part * 2, of_b + part * 2, !first || part > 0);
        }
    }
    wgmma_commit();
}

// The epilogue: out = acc + bias, for the group's rows from `row` on. Each thread stores its own elements.
template <int BN, int HALVES>
__device__ __forceinline__ void store_accumulators(element* out, const Accumulators<BN, HALVES>& acc,
                                                   const element* bias, int row, int column, int M, int N) {
    const int first = row + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        const int c = column + 8 * j + threadIdx.x % 4 * 2;
        if (c >= N) continue;
        const float2 b = as_floats(*reinterpret_cast<const uint32*>(bias + c));
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++) {
            const int r = first + k % 2 * 8 + k / 2 * 64;
            const float* x = &acc[k / 2][4 * j + k % 2 * 2];
            if (r < M) put_pair(out + int64(r) * N + c, x[0] + b.x, x[1] + b.y);
        }
    }
}

// A block computes one tile of GROUPS * HALVES * 64 by BN, each group a part of its rows. STAGES steps are loaded
// ahead; when all groups are done with a stage, the first thread starts loading the next step there.
template <int GROUPS, int HALVES, int BN, int STAGES>
__device__ __forceinline__ void one_tile(element* out, const TensorMap& inp, const TensorMap& weight,
                                         const element* bias, int M, int N, int K) {
    constexpr int ROWS = HALVES * 64, BM = GROUPS * ROWS, STAGE = (BM + BN) * BK;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Mbarrier full[STAGES];
    const int row = blockIdx.y * BM, column = blockIdx.x * BN, steps = (K + BK - 1) / BK, group = warpgroup();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) mbarrier_init(&full[s], 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const auto begin_load = [&](int step) {
        if (threadIdx.x > 0 || step >= steps) return;
        element* stage = stages + step % STAGES * STAGE;
        Mbarrier* stage_full = &full[step % STAGES];
        mbarrier_arrive_expect_tx(stage_full, STAGE * sizeof(element));
        for (int r = 0; r < BM; r += 128) load_box(stage + r * BK, &inp, stage_full, step * BK, row + r, 0);
        load_box(stage + BM * BK, &weight, stage_full, step * BK, column, 0);
    };
    for (int step = 0; step < STAGES; step++) begin_load(step);
    Accumulators<BN, HALVES> acc;  // the first wgmma overwrites them
    for (int step = 0; step < steps; step++) {
        const element* stage = stages + step % STAGES * STAGE;
        mbarrier_wait(&full[step % STAGES], step / STAGES & 1);
        begin_matmul<BN, HALVES>(acc, stage + group * ROWS * BK, stage + BM * BK, step == 0);
        wgmma_wait<0>();
        __syncthreads();
        begin_load(step + STAGES);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) fence_operand(acc[half]);
    store_accumulators<BN, HALVES>(out, acc, bias, row + group * ROWS, column, M, N);
}

// All threads of both blocks of a cluster wait for each other: at the start, until the mbarriers of both are
// initialized; at the end, because a block's shared memory must live as long as the other block may use it.
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// load_box to the same address in the shared memory of both blocks (multicast). In each block, the bytes count towards
// the mbarrier at b's address.
__device__ inline void load_box_for_both(void* to, const TensorMap* map, Mbarrier* b, int column, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(b)), "h"((unsigned short)3)
        : "memory");
}

// Arrive at the mbarrier at b's address in block `rank` of the cluster.
__device__ inline void mbarrier_arrive_in(Mbarrier* b, int rank) {
    asm volatile(
        "{ .reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }\n" ::"r"(shared_address(b)), "r"(rank)
        : "memory");
}

// Tiles of 256 x 192, by two consumer warpgroups and a producer warpgroup, one thread of which issues TMA loads and
// waits only for the consumers to empty a stage. A block takes tiles until there are none left. With BLOCKS = 2, two
// adjacent blocks are a cluster: they need the same rows of inp, and each loads half of these for both.
template <int BLOCKS>
__device__ __forceinline__ void many_tiles(element* out, const TensorMap& inp, const TensorMap& weight,
                                           const element* bias, const Sizes& z) {
    constexpr int GROUPS = 2, ROWS = 128, BM = GROUPS * ROWS, BN = 192, STAGE = (BM + BN) * BK, STAGES = 4;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> step_ring;  // guards `stages`
    const int rank = blockIdx.x % BLOCKS, stride = gridDim.x / BLOCKS;
    if (threadIdx.x == 0) {
        step_ring.init(1, GROUPS * 4 * BLOCKS);
        fence_mbarrier_init();
    }
    BLOCKS > 1 ? cluster_wait() : __syncthreads();
    Item item;

    // ---- producer warpgroup ----------------------------------------------------------------------------------------
    if (warpgroup() == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) {
            for (int w = blockIdx.x / BLOCKS, n = 0; pick<BM, BN * BLOCKS, BK>(item, w, z); w += stride) {
                for (int step = item.begin; step < item.end; step++, n++) {
                    element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                    Mbarrier* full = &step_ring.full[n % STAGES];
                    step_ring.wait_empty(n);  // in both blocks
                    mbarrier_arrive_expect_tx(full, STAGE * sizeof(element));
                    if (BLOCKS > 1) {
                        load_box_for_both(a + rank * ROWS * BK, &inp, full, step * BK, item.row + rank * ROWS, 0);
                    } else {
                        for (int g = 0; g < GROUPS; g++) {
                            load_box(a + g * ROWS * BK, &inp, full, step * BK, item.row + g * ROWS, 0);
                        }
                    }
                    load_box(b, &weight, full, step * BK, item.column + rank * BN, 0);
                }
            }
        }
    // ---- consumer warpgroups ---------------------------------------------------------------------------------------
    } else {
        take_registers<232>();
        const int group = warpgroup() - 1;
        const auto release = [&](int i) {
            if (BLOCKS == 1) return step_ring.release(i);
            __syncwarp();
            if (threadIdx.x % 32 < BLOCKS) mbarrier_arrive_in(&step_ring.empty[i % STAGES], threadIdx.x % 32);
        };
        for (int w = blockIdx.x / BLOCKS, n = 0; pick<BM, BN * BLOCKS, BK>(item, w, z); w += stride) {
            Accumulators<BN, 2> acc;  // the first wgmma overwrites them
            for (int step = item.begin; step < item.end; step++, n++) {
                const element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                step_ring.wait_full(n);
                begin_matmul<BN, 2>(acc, a + group * ROWS * BK, b, step == item.begin);
                if (step > item.begin) {
                    wgmma_wait<1>();
                    release(n - 1);
                }
            }
            wgmma_wait<0>();
            fence_operand(acc[0]);
            fence_operand(acc[1]);
            release(n - 1);
            store_accumulators<BN, 2>(out, acc, bias, item.row + group * ROWS, item.column + rank * BN, z.M, z.N);
        }
    }
    if (BLOCKS > 1) cluster_wait();
}

// This kernel is always launched in clusters of 2 blocks.
extern "C" __cluster_dims__(2, 1, 1) __global__ void
matmul_forward_cluster_multicast(element* out, const __grid_constant__ TensorMap inp,
                                 const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K,
                                 int band);

#else
#define ON_HOPPER(call)  // all builds have these kernels, but they compute only in bfloat16 on Hopper
#endif

// wgmma_tma. The simplest kernel with both: a block is one warpgroup, with a tile of 128 x 128. Only the thread that
// issues TMA loads computes addresses, and no warp loads fragments. While a block waits for a matmul and then for the
// next step, the second block that fits on a multiprocessor multiplies.
// Block (128), grid (N / 128, M / 128). Shared memory: 3 * (128 + 128) * 64 elements. Boxes of the maps: 128 x 64 (rows
// x columns).
extern "C" __global__ void __launch_bounds__(128, 2)
matmul_forward_wgmma_tma(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                         const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<1, 2, 128, 3>(out, inp, weight, bias, M, N, K)));
}

// tiles_128x192. 1.5 times as many columns, the most that fit into the registers of one warpgroup: 128 x 192
// multiply-adds for 128 + 192 numbers loaded, 1.2 times as many per number as before. With two stages in shared memory,
// two blocks still fit on a multiprocessor. No gain: one stage fewer is loaded ahead.
// Block (128), grid (N / 192, M / 128). Shared memory: 2 * (128 + 192) * 64 elements. Boxes: inp 128 x 64, weight 192 x
// 64.
extern "C" __global__ void __launch_bounds__(128, 2)
matmul_forward_tiles_128x192(element* out, const __grid_constant__ TensorMap inp,
                             const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<1, 2, 192, 2>(out, inp, weight, bias, M, N, K)));
}

// tiles_128x256. Two warpgroups of 64 rows and 256 columns each, the widest wgmma: 1.3 times as many multiply-adds per
// number loaded as with 128 x 128. The price is that there is no shared memory for a second block: while these
// warpgroups wait, nothing multiplies. That costs more than the larger tile gains: slower than both above.
// Block (256), grid (N / 256, M / 128). Shared memory: 4 * (128 + 256) * 64 elements. Boxes: inp 128 x 64, weight 256 x
// 64.
extern "C" __global__ void __launch_bounds__(256, 1)
matmul_forward_tiles_128x256(element* out, const __grid_constant__ TensorMap inp,
                             const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<2, 1, 256, 4>(out, inp, weight, bias, M, N, K)));
}

// larger_tiles. Two warpgroups with 128 x 192 each, one below the other, share the columns: 1.7 times as many
// multiply-adds per number loaded as with 128 x 128, and 1.1 times as many per number that the tensor cores read from
// shared memory. Faster than tiles_128x256 but, again without a second block, still slower than wgmma_tma.
// Block (256), grid (N / 192, M / 256). Shared memory: 4 * (256 + 192) * 64 elements. Boxes: inp 128 x 64, weight 192 x
// 64; here and below.
extern "C" __global__ void __launch_bounds__(256, 1)
matmul_forward_larger_tiles(element* out, const __grid_constant__ TensorMap inp,
                            const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<2, 2, 192, 4>(out, inp, weight, bias, M, N, K)));
}

// producer_consumer. Warpgroups no longer wait for all others: a producer warpgroup does nothing but issue TMA loads,
// and gives registers to two consumer warpgroups, which issue a step's matmul before the previous one is done. A stage
// has two mbarriers, `full` and `empty`.
// Block (384), grid (tiles), band 1: the tiles of a row, then the next row.
//
// persistent. The same kernel, launched with one block per multiprocessor: each takes tile after tile, so that the
// loads for the next tile are in flight during the epilogue of the last, and no new block has to start. With bands of
// several rows, the tiles in progress at any time form nearly a square, and what they share is in the L2 cache.
// Block (384), grid (multiprocessors).
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_forward_producer_consumer(element* out, const __grid_constant__ TensorMap inp,
                                 const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K,
                                 int band) {
    ON_HOPPER((many_tiles<1>(out, inp, weight, bias, {M, N, K, band, 1})));
}

// cluster_multicast. Two adjacent blocks take two adjacent tiles, and what they share is read from the L2 cache once:
// 320 rows of a step per block instead of 448. A stage is empty when the consumers of both blocks say so: each block
// waits for the slower one. That costs more than the reads saved, which were not the bottleneck of persistent: it is
// slower.
// Block (384), grid (multiprocessors, an even number).
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_forward_cluster_multicast(element* out, const __grid_constant__ TensorMap inp,
                                 const __grid_constant__ TensorMap weight, const element* bias, int M, int N, int K,
                                 int band) {
    ON_HOPPER((many_tiles<2>(out, inp, weight, bias, {M, N, K, band, 1})));
}

// live: kernels/hopper/matmul.cu. In all of the above, the tensor cores are idle during the epilogue, in which
// each thread writes scattered 4-byte pairs. The live kernel gives each of the two consumer warpgroups its own tiles,
// in turns: one multiplies while the other assembles its tile in shared memory, for TMA to store. Its dweight can split
// the inner dimension among blocks (live_in_4_parts, live_in_11_parts): fc's has 96 tiles, too few for the
// multiprocessors of an H200. Or it takes narrow tiles, of which there are 120 (live_narrow).
