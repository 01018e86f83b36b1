// FP8: bfloat16 tensors rounded to E4M3, as they are and transposed, and their scales.
//
//     quantise         plain (rows,columns) = E4M3(inp * scale), transposed (columns,pitch) the same     plain =, transposed =
//                      largest = max(largest, |inp|), counts += what saturates, what becomes 0
//     prepare_scales   history, scales = those of the next update, reports = counts                      in place
//
// E4M3 has 3 bits of mantissa, numbers from 2^-9 to 448, NaN and no infinities: what is beyond 448 becomes 448, NaN
// stays. llmc/gpu/fp8.py has its rounding in NumPy. Bound by bytes: 2 read and 2 written for each number.

#include "common.cuh"
#include <cuda_fp8.h>

constexpr int SIDE = FP8_SIDE;                       // rows and columns of a block's tile
constexpr int THREADS = SIDE / 4 * (SIDE / PACK);    // a thread has 4 rows of 8 columns
constexpr int HISTORY = FP8_HISTORY;
static_assert(THREADS == FP8_THREADS && BFLOAT16, "as launched");

__device__ inline uint32 four(float a, float b, float c, float d) {
    const uint32 low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
    return low | uint32(__nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// Block (THREADS); grid (columns / SIDE, rows / SIDE, rounded up). plain, transposed, largest: or null. counts: [what
// saturates, what becomes 0 and is not]. pitch: a row of transposed, of which numbers from `rows` on become 0.
extern "C" __global__ void __launch_bounds__(THREADS)
quantise(unsigned char* plain, unsigned char* transposed, const element* inp, const float* scale, int* largest,
         int* counts, int rows, int columns, int pitch) {
    __shared__ uint32 tile[SIDE][SIDE / 4 + 1];  // a column's rows, four at a time
    __shared__ int block_counts[2], block_largest;
    const int row = blockIdx.y * SIDE + threadIdx.x / (SIDE / PACK) * 4, within = threadIdx.x % (SIDE / PACK) * PACK;
    const int column = blockIdx.x * SIDE + within;
    const float factor = *scale;
    if (threadIdx.x == 0) block_counts[0] = block_counts[1] = block_largest = 0;
    Floats x[4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (row + r < rows && column < columns) x[r] = load(inp + int64(row + r) * columns + column);
    }
    __syncthreads();
    float most = 0.0f;
    int saturated = 0, vanished = 0;
    bool is_nan = false;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            const float size = fabsf(x[r].x[k]);
            most = fmaxf(most, size), is_nan |= size != size;
            x[r].x[k] *= factor;
            saturated += size * factor > 448.0f;
            vanished += size > 0.0f && size * factor <= 0x1p-10f;  // half of the smallest: a tie, to even
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float* const y = x[r].x;
        if (plain && row + r < rows && column < columns) {
            *reinterpret_cast<uint2*>(plain + int64(row + r) * columns + column) = {four(y[0], y[1], y[2], y[3]),
                                                                                     four(y[4], y[5], y[6], y[7])};
        }
    }
    if (largest) {
        if (is_nan) most = __int_as_float(0x7fffffff);
        atomicMax(&block_largest, __reduce_max_sync(0xffffffff, __float_as_int(most)));
        saturated = __reduce_add_sync(0xffffffff, saturated), vanished = __reduce_add_sync(0xffffffff, vanished);
        if (threadIdx.x % 32 == 0 && saturated) atomicAdd(&block_counts[0], saturated);
        if (threadIdx.x % 32 == 0 && vanished) atomicAdd(&block_counts[1], vanished);
    }
    if (transposed) {
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            tile[within + k][threadIdx.x / (SIDE / PACK)] = four(x[0].x[k], x[1].x[k], x[2].x[k], x[3].x[k]);
        }
    }
    __syncthreads();
    if (largest && threadIdx.x == 0) {
        if (block_largest > *largest) atomicMax(largest, block_largest);  // most blocks do not raise it
        if (block_counts[0]) atomicAdd(counts, block_counts[0]);
        if (block_counts[1]) atomicAdd(counts + 1, block_counts[1]);
    }
    if (!transposed) return;
    constexpr int UNITS = SIDE / 16;  // of 16 rows of a column
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * UNITS; i += THREADS) {
        const int c = i / UNITS, unit = i % UNITS, r = blockIdx.y * SIDE + unit * 16;
        const uint32* const from = tile[c] + unit * 4;
        if (blockIdx.x * SIDE + c >= columns || r >= pitch) continue;
        *reinterpret_cast<uint4*>(transposed + int64(blockIdx.x * SIDE + c) * pitch + r) = {from[0], from[1], from[2],
                                                                                            from[3]};
    }
}

// One block. largest (count): each tensor's in this update, as bits of a float; history (HISTORY,count): those of the
// last updates, a row an update in turn; updates: how many there were. A scale is the power of 2 that takes the
// history's largest to 112 .. 224, half of what E4M3 has, because the next update's may be larger. What is not finite
// leaves no trace. reports (2,2): pinned memory of the host, the counts of updates with even and odd numbers. largest
// and counts are 0 afterwards.
extern "C" __global__ void prepare_scales(float* scales, float* history, int* largest, int* updates, int* counts,
                                          int* reports, int count) {
    const int newest = *updates % HISTORY;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float now = __int_as_float(largest[i]);
        largest[i] = 0;
        history[newest * count + i] = isfinite(now) ? now : 0.0f;
        float most = 0.0f;
        for (int row = 0; row < HISTORY; row++) most = fmaxf(most, history[row * count + i]);
        const float highest = fminf(__fdiv_rn(224.0f, most), 0x1p100f);
        if (most > 0.0f) scales[i] = __int_as_float(__float_as_int(highest) & 0x7f800000);  // without its mantissa
    }
    __syncthreads();  // all have read *updates
    if (threadIdx.x > 0) return;
    for (int k = 0; k < 2; k++) reports[*updates % 2 * 2 + k] = counts[k], counts[k] = 0;
    *updates += 1;
}
