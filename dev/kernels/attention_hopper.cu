// The step between mma_sync and the live kernel with Hopper's own instructions (sm_90a), heads of
// 64, bfloat16: what kernels/hopper/attention.cu does, one thing at a time. Formulas and shapes are
// those of attention.cu.
//
// warpgroup. The four warps of a block multiply together: wgmma takes 64 rows as A, 16 from each
// warp's registers, and B from shared memory, which the tensor core reads by a descriptor; no
// thread loads it. One thread issues TMA loads of key and value, tiles of 64 rows. Every step waits
// for the one before: load, S = query @ key^T, softmax, out += P @ value, the next load. Other
// blocks on the multiprocessor use the idle time. The live kernel has a warpgroup that loads ahead,
// and issues the next S before it waits for P @ value. Block (128); grid (NH, T / 64, B), blocks
// with the most keys first. Boxes of the map: 64 x 64.

#include "hopper/hopper.cuh"
#include "mma.cuh"

#if BFLOAT16 && MODEL_C == 64 * MODEL_NH && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ON_HOPPER(call) call

constexpr int KEYS = 64;                  // per tile
constexpr float TO_LOG2 = LOG2E / 8.0f;   // 8 = sqrt(HS)

__device__ __forceinline__ void warpgroup_forward(element* out, float* lse, const element* inp,
                                                  int T,
                                                  const TensorMap& map) {
    __shared__ __align__(1024) element key[KEYS * HS], value[KEYS * HS];
    __shared__ Mbarrier tile_full;
    const int h = blockIdx.x, b = blockIdx.z, first = (gridDim.y - 1 - blockIdx.y) * 64;
    const int warp_row = first + threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4,
        t = threadIdx.x % 4;
    if (threadIdx.x == 0) {
        mbarrier_init(&tile_full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    Rows q;
    load_rows(q, inp + int64(b) * T * 3 * C + h * HS, warp_row, T, 3 * C);
    float s[KEYS / 2], o[HS / 2] = {};  // of rows g and g + 8 of the warp's 16
    float row_max[2] = {-INFINITE, -INFINITE}, row_sum[2] = {0.0f, 0.0f}, rescale[2];
    for (int start = 0, i = 0; start <= first; start += KEYS, i++) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(&tile_full, 2 * KEYS * HS * sizeof(element));
            load_box(key, &map, &tile_full, C + h * HS, start, b);
            load_box(value, &map, &tile_full, 2 * C + h * HS, start, b);
        }
        mbarrier_wait(&tile_full, i & 1);

        // S = query @ key^T: the columns of key are the inner dimension, 16 of them (32 bytes) per
        // instruction.
        fence_operand(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < HS / 16; k++) wgmma<0>(s, q[k], descriptor(key) + k * 2, k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(s);

        softmax_of_tile(s, row_max, row_sum, rescale, TO_LOG2, start == first, start, warp_row + g);
        uint32 p[KEYS / 16][4];  // s now holds P, which, rounded to pairs, is the next A
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) p[k][j] = as_pair(s[8 * k + 2 * j], s[8 * k + 2 * j + 1]);
        }
#pragma unroll
        for (int j = 0; j < HS / 2; j++) o[j] *= rescale[j % 4 / 2];

        // out += P @ value: the rows of value are the inner dimension, 16 of them (2048 bytes) per
        // instruction.
        fence_operand(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) wgmma<1>(o, p[k], descriptor(value) + k * 128, 1);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(o);
        __syncthreads();  // all warps are done with the tile, which the next load overwrites
    }

#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int row = warp_row + g + 8 * k;
        const float total = quad_sum(row_sum[k]), inverse = 1.0f / total;
        if (row >= T) continue;
        if (t == 0) lse[(int64(b) * NH + h) * T + row] = row_max[k] / 8.0f + log2f(total) * LN2;
        element* to = out + (int64(b) * T + row) * C + h * HS + 2 * t;
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            const float* x = o + 4 * n + 2 * k;
            *reinterpret_cast<uint32*>(to + 8 * n) = as_pair(x[0] * inverse, x[1] * inverse);
        }
    }
}

#else
#define ON_HOPPER(call)
#endif

extern "C" __global__ void __launch_bounds__(128)
attention_forward_warpgroup(element* out, float* lse, const element* inp, int T,
                            const __grid_constant__ TensorMap map) {
    ON_HOPPER(warpgroup_forward(out, lse, inp, T, map));
}
