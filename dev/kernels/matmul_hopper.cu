// The matmul of the forward pass with Hopper's own instructions (sm_90a), bfloat16: the steps from
// matmul.cu to the live kernel, kernels/hopper/matmul.cu. RESULTS.md has what each rung measured.
//
//     out (M,N) = inp (M,K) @ weight^T (K,N) + bias        out =
//
// With wgmma, the four warps of a warpgroup multiply together: 64 rows by 128 to 256 columns and 16
// of the inner dimension in one instruction, both operands in shared memory. TMA loads these, in
// steps of 64 of the inner dimension, issued by one thread; elements outside the tensor arrive as
// zeros. Everything else is about keeping the tensor cores busy.
//
// Not every idea makes it faster: the inner dimension of fc is short, 12 steps, and then comes the
// epilogue, during which a block multiplies nothing. With wgmma_tma, a second block on the
// multiprocessor multiplies meanwhile. From producer_consumer on, there is no shared memory for a
// second block. Only the live kernel makes up for that.
//
// Bound by the tensor cores: 2048 multiply-adds per cycle and multiprocessor.

#include "hopper/hopper.cuh"
#include "hopper/items.cuh"

#if BFLOAT16 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ON_HOPPER(call) call

constexpr int BK = 64;      // of a step
constexpr int HALVES = 2;   // of 64 rows each: a warpgroup's part of a tile

template <int BN>
using Accumulators = float[HALVES][BN / 2];  // a thread's part of a warpgroup's HALVES * 64 x BN

// Begin acc = a (HALVES * 64,BK) @ b (BK,BN), or += if not `first`.
template <int BN>
__device__ __forceinline__ void begin_matmul(Accumulators<BN>& acc, const element* a,
                                             const element* b,
                                             bool first) {
    const unsigned long long of_a = descriptor(a), of_b = descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < BK / 16; part++) {  // 16 of the inner dimension: 32 bytes of each row
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            wgmma<0, 0>(acc[half], of_a + half * 512 + part * 2, of_b + part * 2,
                        !first || part > 0);
        }
    }
    wgmma_commit();
}

// The epilogue: out = acc + bias, for the group's rows from `row` on. Each thread stores its own
// elements.
template <int BN>
__device__ __forceinline__ void store_accumulators(element* out, const Accumulators<BN>& acc,
                                                   const element* bias, int row, int column, int M,
                                                       int N) {
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

// A block computes one tile of 128 x 128. STAGES steps are loaded ahead; when all warps are done
// with a stage, the first thread starts loading the next step there.
__device__ __forceinline__ void one_tile(element* out, const TensorMap& inp,
                                         const TensorMap& weight,
                                         const element* bias, int M, int N, int K) {
    constexpr int SIDE = 128, STAGE = 2 * SIDE * BK, STAGES = 3;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Mbarrier full[STAGES];
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE, steps = (K + BK - 1) / BK;
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
        load_box(stage, &inp, stage_full, step * BK, row, 0);
        load_box(stage + SIDE * BK, &weight, stage_full, step * BK, column, 0);
    };
    for (int step = 0; step < STAGES; step++) begin_load(step);
    Accumulators<SIDE> acc;  // the first wgmma overwrites them
    for (int step = 0; step < steps; step++) {
        const element* stage = stages + step % STAGES * STAGE;
        mbarrier_wait(&full[step % STAGES], step / STAGES & 1);
        begin_matmul<SIDE>(acc, stage, stage + SIDE * BK, step == 0);
        wgmma_wait<0>();
        __syncthreads();
        begin_load(step + STAGES);
    }
    fence_operand(acc[0]);
    fence_operand(acc[1]);
    store_accumulators<SIDE>(out, acc, bias, row, column, M, N);
}

// Tiles of 256 x 192, by two consumer warpgroups and a producer warpgroup, one thread of which
// issues TMA loads and waits only for the consumers to empty a stage. A block computes tiles until
// there are none left.
__device__ __forceinline__ void many_tiles(element* out, const TensorMap& inp,
                                           const TensorMap& weight,
                                           const element* bias, const Sizes& z) {
    constexpr int GROUPS = 2, ROWS = 128, BM = GROUPS * ROWS, BN = 192, STAGE = (BM + BN) * BK,
        STAGES = 4;
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> step_ring;  // guards `stages`
    if (threadIdx.x == 0) {
        step_ring.init(1, GROUPS * 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    Item item;

    // ---- producer warpgroup
    // ----------------------------------------------------------------------------------------
    if (warpgroup() == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) {
            for (int w = blockIdx.x, n = 0; pick<BM, BN, BK>(item, w, z); w += gridDim.x) {
                for (int step = item.begin; step < item.end; step++, n++) {
                    element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                    Mbarrier* full = &step_ring.full[n % STAGES];
                    step_ring.wait_empty(n);
                    mbarrier_arrive_expect_tx(full, STAGE * sizeof(element));
                    for (int g = 0; g < GROUPS; g++) {
                        load_box(a + g * ROWS * BK, &inp, full, step * BK, item.row + g * ROWS, 0);
                    }
                    load_box(b, &weight, full, step * BK, item.column, 0);
                }
            }
        }
    // ---- consumer warpgroups
    // ---------------------------------------------------------------------------------------
    } else {
        take_registers<232>();
        const int group = warpgroup() - 1;
        for (int w = blockIdx.x, n = 0; pick<BM, BN, BK>(item, w, z); w += gridDim.x) {
            Accumulators<BN> acc;  // the first wgmma overwrites them
            for (int step = item.begin; step < item.end; step++, n++) {
                const element *a = stages + n % STAGES * STAGE, *b = a + BM * BK;
                step_ring.wait_full(n);
                begin_matmul<BN>(acc, a + group * ROWS * BK, b, step == item.begin);
                if (step > item.begin) {
                    wgmma_wait<1>();
                    step_ring.release(n - 1);
                }
            }
            wgmma_wait<0>();
            fence_operand(acc[0]);
            fence_operand(acc[1]);
            step_ring.release(n - 1);
            store_accumulators<BN>(out, acc, bias, item.row + group * ROWS, item.column, z.M, z.N);
        }
    }
}

#else
#define ON_HOPPER(call)  // all builds have these kernels, but they compute only in bfloat16 on Hopper
#endif

// wgmma_tma. The simplest kernel with both: a block is one warpgroup, with a tile of 128 x 128.
// Only the thread that issues TMA loads computes addresses, and no warp loads fragments. While a
// block waits for a matmul and then for the next step, the second block that fits on a
// multiprocessor multiplies. Block (128), grid (N / 128, M / 128). Shared memory: 3 * (128 + 128) *
// 64 elements. Boxes of the maps: 128 x 64 (rows x columns).
extern "C" __global__ void __launch_bounds__(128, 2)
matmul_forward_wgmma_tma(element* out, const __grid_constant__ TensorMap inp,
                         const __grid_constant__ TensorMap weight,
                         const element* bias, int M, int N, int K) {
    ON_HOPPER(one_tile(out, inp, weight, bias, M, N, K));
}

// producer_consumer. Two warpgroups with 128 x 192 each, one below the other, share the columns:
// 1.7 times as many multiply-adds per number loaded as with 128 x 128. The price is that there is
// no shared memory for a second block, which would multiply while this one waits: that costs more
// than the tile gains. So warpgroups no longer wait for all others: a producer warpgroup does
// nothing but issue TMA loads, and gives registers to the two consumer warpgroups, which issue a
// step's matmul before the previous one is done. A stage has two mbarriers, `full` and `empty`.
// Block (384), grid (tiles), band 1: the tiles of a row, then the next row. Shared memory: 4 * (256
// + 192) * 64 elements. Boxes: inp 128 x 64, weight 192 x 64.
//
// persistent. The same kernel, launched with one block per multiprocessor: each takes tile after
// tile, so that the loads for the next tile are in flight during the epilogue of the last, and no
// new block has to start. With bands of several rows, the tiles in progress at any time form nearly
// a square, and what they share is in the L2 cache. Block (384), grid (multiprocessors).
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_forward_producer_consumer(element* out, const __grid_constant__ TensorMap inp,
                                 const __grid_constant__ TensorMap weight, const element* bias,
                                     int M, int N, int K,
                                 int band) {
    ON_HOPPER((many_tiles(out, inp, weight, bias, {M, N, K, band, 1})));
}

// live: kernels/hopper/matmul.cu. In all of the above, the tensor cores are idle during the
// epilogue, in which each thread writes scattered 4-byte pairs. The live kernel gives each of the
// two consumer warpgroups its own tiles, in turns: one multiplies while the other assembles its
// tile in shared memory, for TMA to store. Where there are too few tiles for the multiprocessors,
// as in fc's dweight, it splits the inner dimension among blocks: python dev/bench.py matmul times
// that.
