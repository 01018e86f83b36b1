// The matrix product of the forward pass on Hopper's own instructions (sm_90a), bfloat16, from the first that multiplies to those that
// share what they load: the steps between matmul.cu and the live kernel, kernels/matmul_hopper_bf16.cu. Each head ends with what its
// version measured.
//
//     out (M,N) = inp (M,K) @ weight^T (K,N) + bias        out =
//
// The four warps of a group (a warpgroup) multiply together: 64 rows by 128 to 256 columns and 16 of the inner dimension in one
// instruction, of which both operands are in shared memory. TMA brings these, in steps of 64 of the inner dimension, as one thread tells
// it; what is beyond a tensor's end is zeros. All that follows is about keeping the tensor cores busy: each of these kernels has one idea
// more than the one before.
//
// Not each is faster: fc's inner dimension is short, 12 steps, and then a tile is to be written, while which its block multiplies nothing.
// The first two have a second block on the multiprocessor that multiplies meanwhile; from tiles_128x256 on there is no room for one. What
// that costs, only the live kernel gets back.
//
// Bound by the tensor cores: 2048 multiply-adds a cycle and multiprocessor.

#include "hopper.cuh"
#include "matmul.cuh"

#if BFLOAT16 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ON_HOPPER(call) call

constexpr int BK = 64;  // of a step

template <int BN, int HALVES>
using Sums = float[HALVES][BN / 2];  // a thread's share of a group's HALVES * 64 x BN

// sums = a (HALVES * 64,BK) @ b (BK,BN), or += if not `first`. Only begun: wgmma_wait tells when it is done.
template <int BN, int HALVES>
__device__ __forceinline__ void begin_product(Sums<BN, HALVES>& sums, const element* a, const element* b, bool first) {
    const unsigned long long of_a = describe(a), of_b = describe(b);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < BK / 16; part++) {  // 16 of the inner dimension: 32 bytes of each row
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            wgmma<0, 0>(sums[half], of_a + half * 512 + part * 2, of_b + part * 2, !first || part > 0);
        }
    }
    wgmma_commit();
}

// out = sums + bias, for the group's rows from `row` on: each thread writes what it has.
template <int BN, int HALVES>
__device__ __forceinline__ void write_sums(element* out, const Sums<BN, HALVES>& sums, const element* bias, int row, int column, int M,
                                           int N) {
    const int first = row + threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        const int c = column + 8 * j + threadIdx.x % 4 * 2;
        if (c >= N) continue;
        const float2 b = as_floats(*reinterpret_cast<const uint32*>(bias + c));
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++) {
            const int r = first + k % 2 * 8 + k / 2 * 64;
            const float* x = &sums[k / 2][4 * j + k % 2 * 2];
            if (r < M) put_pair(out + int64(r) * N + c, x[0] + b.x, x[1] + b.y, 0);
        }
    }
}

// A tile of GROUPS * HALVES * 64 by BN for each block, a part of its rows for each group. Some steps are on their way or being multiplied;
// when all groups are done with one, the first thread has the next step brought to its place.
template <int GROUPS, int HALVES, int BN, int STAGES>
__device__ __forceinline__ void one_tile(element* out, const TensorMap& inp, const TensorMap& weight, const element* bias, int M, int N,
                                         int K) {
    constexpr int ROWS = HALVES * 64, BM = GROUPS * ROWS, STAGE = (BM + BN) * BK;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Barrier full[STAGES];
    const int row = blockIdx.y * BM, column = blockIdx.x * BN, steps = (K + BK - 1) / BK, group = warpgroup();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_make(&full[s], 1);
        fence_barriers();
    }
    __syncthreads();
    const auto begin_load = [&](int step) {
        if (threadIdx.x > 0 || step >= steps) return;
        element* here = stages + step % STAGES * STAGE;
        Barrier* arrived = &full[step % STAGES];
        barrier_expect(arrived, STAGE * sizeof(element));
        for (int r = 0; r < BM; r += 128) load_box(here + r * BK, &inp, arrived, step * BK, row + r, 0);
        load_box(here + BM * BK, &weight, arrived, step * BK, column, 0);
    };
    for (int step = 0; step < STAGES; step++) begin_load(step);
    Sums<BN, HALVES> sums;  // the first product overwrites them
    for (int step = 0; step < steps; step++) {
        const element* here = stages + step % STAGES * STAGE;
        barrier_wait(&full[step % STAGES], step / STAGES & 1);
        begin_product<BN, HALVES>(sums, here + group * ROWS * BK, here + BM * BK, step == 0);
        wgmma_wait<0>();
        __syncthreads();
        begin_load(step + STAGES);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) pin(sums[half]);
    write_sums<BN, HALVES>(out, sums, bias, row + group * ROWS, column, M, N);
}

// Two blocks as one cluster: where they begin and end together. A block's shared memory is there for the other one until both have come.
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }

// load_box to the same place of both blocks' shared memory; each block's own barrier, at b's place, is told of the bytes.
__device__ inline void load_box_for_both(void* to, const TensorMap* map, Barrier* b, int column, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], "
        "%6;" ::"r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(b)), "h"((unsigned short)3)
        : "memory");
}

// Arrive at the barrier at b's place in block `rank` of the cluster.
__device__ inline void barrier_arrive_in(Barrier* b, int rank) {
    asm volatile(
        "{ .reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }\n" ::"r"(shared_address(b)), "r"(rank)
        : "memory");
}

// Tiles of 256 x 192, two groups for each, and a warpgroup more, of which one thread tells TMA what to bring: it waits for nobody but the
// groups that empty a place. A block takes tiles until there are none left. With BLOCKS = 2, two blocks side by side are a cluster: they
// need the same rows of inp, and each brings half of these to both.
template <int BLOCKS>
__device__ __forceinline__ void many_tiles(element* out, const TensorMap& inp, const TensorMap& weight, const element* bias,
                                           const Sizes& z) {
    constexpr int GROUPS = 2, ROWS = 128, BM = GROUPS * ROWS, BN = 192, STAGE = (BM + BN) * BK, STAGES = 4;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> ring;
    const int rank = blockIdx.x % BLOCKS, stride = gridDim.x / BLOCKS;
    if (threadIdx.x == 0) {
        ring.make(1, GROUPS * 4 * BLOCKS);
        fence_barriers();
    }
    BLOCKS > 1 ? cluster_wait() : __syncthreads();
    Item item;

    if (warpgroup() == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) {
            for (int w = blockIdx.x / BLOCKS, n = 0; pick<BM, BN * BLOCKS, BK>(item, w, z); w += stride) {
                for (int step = item.begin; step < item.end; step++, n++) {
                    element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                    Barrier* full = &ring.full[n % STAGES];
                    ring.wait_for_room(n);  // in both blocks
                    barrier_expect(full, STAGE * sizeof(element));
                    if (BLOCKS > 1) {
                        load_box_for_both(a + rank * ROWS * BK, &inp, full, step * BK, item.row + rank * ROWS, 0);
                    } else {
                        for (int g = 0; g < GROUPS; g++) load_box(a + g * ROWS * BK, &inp, full, step * BK, item.row + g * ROWS, 0);
                    }
                    load_box(b, &weight, full, step * BK, item.column + rank * BN, 0);
                }
            }
        }
    } else {
        take_registers<232>();
        const int group = warpgroup() - 1;
        const auto release = [&](int i) {
            if (BLOCKS == 1) return ring.release(i);
            __syncwarp();
            if (threadIdx.x % 32 < BLOCKS) barrier_arrive_in(&ring.empty[i % STAGES], threadIdx.x % 32);
        };
        for (int w = blockIdx.x / BLOCKS, n = 0; pick<BM, BN * BLOCKS, BK>(item, w, z); w += stride) {
            Sums<BN, 2> sums;  // the first product overwrites them
            for (int step = item.begin; step < item.end; step++, n++) {
                const element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                ring.wait(n);
                begin_product<BN, 2>(sums, a + group * ROWS * BK, b, step == item.begin);
                if (step > item.begin) {
                    wgmma_wait<1>();
                    release(n - 1);
                }
            }
            wgmma_wait<0>();
            pin(sums[0]);
            pin(sums[1]);
            release(n - 1);
            write_sums<BN, 2>(out, sums, bias, item.row + group * ROWS, item.column + rank * BN, z.M, z.N);
        }
    }
    if (BLOCKS > 1) cluster_wait();
}

// Every launch of this one is in clusters of 2 blocks.
extern "C" __cluster_dims__(2, 1, 1) __global__ void
matmul_forward_cluster_multicast(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                                 const element* bias, int M, int N, int K, int band);

#else
#define ON_HOPPER(call)  // all builds have these kernels, and only that for Hopper in bfloat16 has any use for them
#endif

// wgmma_tma. The simplest kernel with both: a block is one group, with a tile of 128 x 128. No thread computes addresses but the one that
// tells TMA which box to bring, and no warp reads fragments. While a block waits, for its product to be done and then for the next step,
// the second one that a multiprocessor has room for multiplies.
// Block (128), grid (N / 128, M / 128). Shared memory: 3 * (128 + 128) * 64 elements. Boxes of the maps: 128 x 64 (rows x columns).
// H200, B=32, T=1024: bfloat16 0.3315 ms, 466.4 TFLOP/s at 128 threads.
extern "C" __global__ void __launch_bounds__(128, 2)
matmul_forward_wgmma_tma(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight, const element* bias,
                         int M, int N, int K) {
    ON_HOPPER((one_tile<1, 2, 128, 3>(out, inp, weight, bias, M, N, K)));
}

// tiles_128x192. Half as many columns more, which is as far as the registers of one group go: 128 x 192 products for each 128 + 192 numbers
// that are loaded, 1.2 times as many as before. With two steps of shared memory, there are still two blocks on a multiprocessor. No gain,
// with a step less on its way while another is multiplied.
// Block (128), grid (N / 192, M / 128). Shared memory: 2 * (128 + 192) * 64 elements. Boxes: inp 128 x 64, weight 192 x 64.
// H200, B=32, T=1024: bfloat16 0.3356 ms, 460.8 TFLOP/s at 128 threads.
extern "C" __global__ void __launch_bounds__(128, 2)
matmul_forward_tiles_128x192(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                             const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<1, 2, 192, 2>(out, inp, weight, bias, M, N, K)));
}

// tiles_128x256. Two groups of 64 rows and 256 columns each, the widest that the instruction takes: 1.3 times as many products for each
// number loaded as with 128 x 128. The price is that there is no room for a second block: while these groups wait, nobody multiplies. It is
// more than the larger tile brings: slower than both above.
// Block (256), grid (N / 256, M / 128). Shared memory: 4 * (128 + 256) * 64 elements. Boxes: inp 128 x 64, weight 256 x 64.
// H200, B=32, T=1024: bfloat16 0.4161 ms, 371.6 TFLOP/s at 256 threads.
extern "C" __global__ void __launch_bounds__(256, 1)
matmul_forward_tiles_128x256(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                             const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<2, 1, 256, 4>(out, inp, weight, bias, M, N, K)));
}

// larger_tiles. Two groups with 128 x 192 each, one below the other, share the columns: 1.7 times as many products for each number loaded
// as with 128 x 128, and 1.1 times as many for each that the tensor cores read from shared memory. Faster than tiles_128x256, and for
// the same price still slower than wgmma_tma.
// Block (256), grid (N / 192, M / 256). Shared memory: 4 * (256 + 192) * 64 elements. Boxes: inp 128 x 64, weight 192 x 64; here and below.
// H200, B=32, T=1024: bfloat16 0.3990 ms, 387.5 TFLOP/s at 256 threads.
extern "C" __global__ void __launch_bounds__(256, 1)
matmul_forward_larger_tiles(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                            const element* bias, int M, int N, int K) {
    ON_HOPPER((one_tile<2, 2, 192, 4>(out, inp, weight, bias, M, N, K)));
}

// producer_consumer. Nobody waits for all others any more: a warpgroup that does nothing else keeps TMA busy, and hands its registers to
// the two that compute; these begin a step's product before the one before it is done. A place in shared memory has two barriers, one for
// "it is full" and one for "it is empty".
// Block (384), grid (tiles), band 1: the tiles of a row, then the next row.
// H200, B=32, T=1024: bfloat16 0.3804 ms, 406.5 TFLOP/s at 384 threads.
//
// persistent. The same kernel, launched with as many blocks as there are multiprocessors: each takes tile after tile, so that the loads for
// the next one are under way while the last one is written, and no block has to be set up. With bands of several rows, the tiles that are
// worked on at the same time are close to a square, and what they share is in the L2 cache.
// Block (384), grid (multiprocessors).
// H200, B=32, T=1024: bfloat16 0.3708 ms, 417.0 TFLOP/s at 384 threads.
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_forward_producer_consumer(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                                 const element* bias, int M, int N, int K, int band) {
    ON_HOPPER((many_tiles<1>(out, inp, weight, bias, {M, N, K, band, 1})));
}

// cluster_multicast. Two neighbouring multiprocessors take two tiles side by side, and what they share is read from the L2 cache once: for
// each block 320 rows of a step instead of 448. A place is empty when the groups of both blocks say so: each block waits for the slower
// one, which costs more than the reading that is saved, since that was not what persistent waited for. It is slower than persistent.
// Block (384), grid (multiprocessors, an even number).
// H200, B=32, T=1024: bfloat16 0.3994 ms, 387.2 TFLOP/s at 384 threads.
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_forward_cluster_multicast(element* out, const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                                 const element* bias, int M, int N, int K, int band) {
    ON_HOPPER((many_tiles<2>(out, inp, weight, bias, {M, N, K, band, 1})));
}

// live: kernels/matmul_hopper_bf16.cu. In all of the above, the tensor cores stand still while a tile is written, and each thread writes
// 4 bytes here and there. The live kernel gives each of the two groups tiles of its own, in turns: one multiplies while the other one puts
// its tile together in shared memory, for TMA to write. Its dweight can split the inner dimension among blocks (live_in_4_parts,
// live_in_11_parts): fc's has 96 tiles, which do not even give each multiprocessor of an H200 one. Or it takes narrow tiles, of which
// there are 120 (live_narrow).
// H200, B=32, T=1024: bfloat16 0.2012 ms, 768.4 TFLOP/s at 384 threads.
