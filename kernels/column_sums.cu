// The second stage of every sum over rows: adds up the partial sums of other kernels' blocks, in a
// fixed order.
//
//     out[c] = the sum over r of partials[r,c]                                             out =
//
// partials (rows, columns) float32. The columns belong to up to three tensors of `width` columns
// each: out[0], out[1] and out[2] (null: not wanted). One launch does all sums of a backward pass,
// one job each, because every launch costs microseconds of latency whatever its size. A block adds
// up 32 columns of one job, each of its 16 warps every 16th row, of which 16 are loaded at a time.
// Bound by bytes.

#include "common.cuh"

constexpr int WARPS = COLUMN_SUMS_THREADS / 32, COLUMNS = COLUMN_SUMS_COLUMNS;  // per block

static_assert(COLUMNS == 32, "each lane of a warp has a column");

struct Job {
    const float* partials;
    gradient* out[3];
    int width, rows, columns, padding;
};

// Block (COLUMN_SUMS_THREADS); grid (columns of the widest job / 32 rounded up, jobs).
extern "C" __global__ void __launch_bounds__(COLUMN_SUMS_THREADS, 3) column_sums(const Job* jobs) {
    const Job job = jobs[blockIdx.y];
    if (blockIdx.x * COLUMNS >= job.columns) return;
    __shared__ float sums[WARPS][COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int c = blockIdx.x * COLUMNS + lane;
    float sum = 0.0f;
    if (c < job.columns) {
#pragma unroll 16
        for (int r = warp; r < job.rows; r += WARPS)
            sum += job.partials[int64(r) * job.columns + c];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= job.columns) return;
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][lane];
    gradient* out = c < job.width ? job.out[0] : c < 2 * job.width ? job.out[1] : job.out[2];
    if (out) from_float(out[c % job.width], sum);
}
