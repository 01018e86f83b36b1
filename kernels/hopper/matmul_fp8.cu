// The matmuls of FP8 operands, E4M3, for Hopper (sm_90a). Both operands have the inner dimension K contiguous, as wgmma
// asks for in 8 bits: kernels/fp8.cu writes the transposed copies that this takes.
//
//     matmul_fp8          out (M,N) = factor * a (M,K) @ b (N,K)^T + bias                             out =
//     matmul_fp8_weight   dweight (M,N) = factor * a (M,K) @ b (N,K)^T, K long                        dweight =
//
// out, bias (N): bfloat16; factor = scale / (*a_scale * *b_scale), the operands' own scales: llmc/gpu/fp8.py.
//
// matmul_fp8 is hopper/matmul.cuh's pipeline. Its accumulators, in the tensor cores, keep about 14 bits: enough for a
// few thousand products, but B*T of them, which matmul_fp8_weight adds up, would be off by percents (DeepSeek-V3 2024,
// https://arxiv.org/abs/2412.19437, section 3.3.2). There, each step's sums are added in float32. As that takes as many
// registers again, the two consumer warpgroups share a tile, 64 rows each, and one adds while the other multiplies.

#define MATMUL_FP8 1
#include "hopper/matmul.cuh"

// Block (384); grid (at most as many blocks as items); shared memory: as in matmul.cu. Boxes of the maps, rows x bytes:
// a 128 x 128, b 192 x 128 (narrow: 160 x 128); rows x columns: out 128 x 64 (narrow: 128 x 32).
template <int BN>
__device__ __forceinline__ void multiply(const TensorMap& out, const TensorMap& a, const TensorMap& b,
                                         const element* bias, const float* a_scale, const float* b_scale, float scale,
                                         const Sizes& z) {
    matmul<BN, 0, 0>(a, b, z, [&](Accumulators<BN>& acc, const Item& item, element* strips) {
        store_tile<BN>(out, acc, item, strips, scale / (*a_scale * *b_scale), bias, z.N);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_fp8(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap a,
           const __grid_constant__ TensorMap b, const element* bias, const float* a_scale, const float* b_scale,
           float scale, int M, int N, int K, int band) {
    multiply<WIDE_BN>(out, a, b, bias, a_scale, b_scale, scale, {M, N, K, band, 1});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_fp8_narrow(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap a,
                  const __grid_constant__ TensorMap b, const element* bias, const float* a_scale, const float* b_scale,
                  float scale, int M, int N, int K, int band) {
    multiply<NARROW_BN>(out, a, b, bias, a_scale, b_scale, scale, {M, N, K, band, 1});
}

// partials, done: see ../matmul.cuh; a half of a tile, 64 rows, stands for a tile there.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_fp8_weight(gradient* dweight, float4* partials, int* done, const __grid_constant__ TensorMap a,
                  const __grid_constant__ TensorMap b, const float* a_scale, const float* b_scale, float scale, int M,
                  int N, int K, int band, int splits) {
    constexpr int BN = WIDE_BN, STAGE = (BM + BN) * BK, STAGES = STAGES_ROOM / STAGE;
    constexpr int SUMS = BN / 2, QUADS = SUMS / 4, IN_FLIGHT = 8;  // of a thread: floats, float4s; loads in flight
    extern __shared__ __align__(1024) element stages[];
    __shared__ Ring<STAGES> step_ring;
    if (threadIdx.x == 0) {
        step_ring.init(1, 4 * CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const Sizes z = {M, N, K, band, splits};
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS<false>>();
        if (threadIdx.x == 0) load_steps<BN, 0, 0, 1>(a, b, z, step_ring, stages);
        return;
    }
    take_registers<COMPUTE_REGISTERS<false>>();
    const int half = warpgroup() - 1, thread = threadIdx.x % WARPGROUP;
    const float factor = scale / (*a_scale * *b_scale);
    Item item;
    for (int w = blockIdx.x, n = 0; pick<BM, BN, STEP>(item, w, z); w += gridDim.x) {
        float sums[SUMS] = {};
        for (int step = item.begin; step < item.end; step++, n++) {
            float products[SUMS];
            const element* const from = stages + n % STAGES * STAGE;
            const unsigned long long a_at = descriptor(from) + half * 512, b_at = descriptor(from + BM * BK);
            step_ring.wait_full(n);
            wgmma_fence();
#pragma unroll
            for (int slice = 0; slice < 4; slice++) {  // 32 of K
                wgmma<0, 0>(products, a_at + slice * 2, b_at + slice * 2, slice > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            fence_operand(products);
            step_ring.release(n);
#pragma unroll
            for (int j = 0; j < SUMS; j++) sums[j] += products[j];
        }

        // Add the sums of the previous splits; all but the last one pass theirs on.
        const int tile = 2 * item.tile + half;
        float4* const tile_partials = partials + int64(tile) * (WARPGROUP * QUADS) + thread;
        if (item.split > 0) {
            if (leads_warpgroup()) wait_for(done + tile, item.split);
            warpgroup_sync();
#pragma unroll
            for (int first = 0; first < QUADS; first += IN_FLIGHT) {
                float4 y[IN_FLIGHT];
#pragma unroll
                for (int j = 0; j < IN_FLIGHT; j++) y[j] = __ldcg(tile_partials + (first + j) * WARPGROUP);
#pragma unroll
                for (int j = 0; j < IN_FLIGHT; j++) {
                    float* const x = sums + 4 * (first + j);
                    x[0] += y[j].x, x[1] += y[j].y, x[2] += y[j].z, x[3] += y[j].w;
                }
            }
        }
        if (item.split < splits - 1) {
#pragma unroll
            for (int j = 0; j < QUADS; j++) {
                const float* const x = sums + 4 * j;
                __stcg(tile_partials + j * WARPGROUP, float4{x[0], x[1], x[2], x[3]});
            }
            warpgroup_sync();  // all have written before the first thread announces it
            if (leads_warpgroup()) announce(done + tile, item.split + 1);
            continue;
        }
        if (splits > 1 && leads_warpgroup()) done[tile] = 0;
        const int row = item.row + 64 * half + thread / 32 * 16 + thread % 32 / 4, column = item.column + thread % 4 * 2;
#pragma unroll
        for (int j = 0; j < SUMS / 2; j++) {  // pairs, of rows `row` and row + 8 in turn
            const int r = row + j % 2 * 8, c = column + j / 2 * 8;
            if (r < M && c < N) put_pair(dweight + int64(r) * N + c, sums[2 * j] * factor, sums[2 * j + 1] * factor);
        }
    }
}
