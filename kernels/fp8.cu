// FP8: bfloat16 tensors rounded to E4M3 or, gradients, to E5M2, as they are and transposed, and their
// scales.
//
//     quantize         plain (rows,columns) = E4M3(inp * scale), or E5M2                         plain =
//                      transposed (columns,pitch) = the same, transposed                         transposed =
//                      largest = max(largest, |inp|)                                             in place
//                      counts += how many are the largest number or NaN, how many are 0          counts +=
//     prepare_scales   scales of the next update, from history and largest; reports = counts     in place
//
// E4M3 has 3 bits of mantissa and numbers from 2^-9 to 448, E5M2 2 bits and numbers from 2^-16 to
// 57344, which gradients need: most are thousands of times smaller than the largest, which changes a
// hundredfold within a few updates. What is beyond the largest number becomes that, NaN stays.
// tests/fp8_reference.py has the rounding, to nearest, in NumPy. Bound by bytes: 2 read and 2 written
// for each number.

#include "fp8.cuh"

constexpr int SIDE = FP8_SIDE;                     // rows and columns of a block's tile
constexpr int THREADS = SIDE / 4 * (SIDE / PACK);  // a thread has 4 rows of 8 columns
constexpr int HISTORY = FP8_HISTORY;
static_assert(THREADS == FP8_THREADS && BFLOAT16, "as launched");

// Block (THREADS); grid (columns / SIDE, rows / SIDE, rounded up, layers). plain, transposed,
// largest: or null. pitch: of a row of transposed, of which numbers from `rows` on become 0.
// role: 0 of an input, 1 of a weight, whose transposed copy has another order of numbers (see
// fp8.cuh), 2 of a gradient. stride: from one layer's scale to the next's; all else is adjacent.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize(unsigned char* plain, unsigned char* transposed, const element* inp, const float* scale,
         int* largest, int64* counts, int rows, int columns, int pitch, int role, int stride) {
    const bool of_weight = role == 1, of_gradient = role == 2;
    const auto round = [&](float a, float b, float c, float d) {
        return of_gradient ? four_bytes<true>(a, b, c, d) : four_bytes(a, b, c, d);
    };
    const int64 l = blockIdx.z;
    inp += l * rows * columns, scale += l * stride;
    if (plain) plain += l * rows * columns;
    if (transposed) transposed += l * columns * pitch;
    if (largest) largest += l * stride;
    __shared__ uint32 tile[SIDE][SIDE / 4 + 1];  // a column's rows, four at a time
    const int row = blockIdx.y * SIDE + threadIdx.x / (SIDE / PACK) * 4,
        within = threadIdx.x % (SIDE / PACK) * PACK;
    const int column = blockIdx.x * SIDE + within;
    const float factor = *scale;
    Floats x[4] = {};
    AmaxStats noted(factor, of_gradient);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (row + r < rows && column < columns)
            x[r] = load(inp + int64(row + r) * columns + column);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const Floats unscaled = x[r];
        float* const y = x[r].x;
#pragma unroll
        for (int k = 0; k < PACK; k++) y[k] *= factor;
        const uint32 bytes[2] = {round(y[0], y[1], y[2], y[3]), round(y[4], y[5], y[6], y[7])};
        const uint2 in_our_order = in_order({bytes[0], bytes[1]});
        if (row + r >= rows || column >= columns) continue;
        noted.add(unscaled.x, bytes);
        if (plain)
            *reinterpret_cast<uint2*>(plain + int64(row + r) * columns + column) = in_our_order;
    }
    noted.publish(largest, counts);
    if (!transposed) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        tile[within + k][threadIdx.x / (SIDE / PACK)] =
            round(x[0].x[k], x[1].x[k], x[2].x[k], x[3].x[k]);
    }
    __syncthreads();
    constexpr int UNITS = SIDE / 16;  // of 16 rows of a column
    const uint32 first = of_weight ? FIRST_COLUMNS : FIRST_ROWS;
    const uint32 last = of_weight ? LAST_COLUMNS : LAST_ROWS;
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * UNITS; i += THREADS) {
        const int c = i / UNITS, unit = i % UNITS, r = blockIdx.y * SIDE + unit * 16;
        const uint32* const from = tile[c] + unit * 4;
        if (blockIdx.x * SIDE + c >= columns || r >= pitch) continue;
        *reinterpret_cast<uint4*>(transposed + int64(blockIdx.x * SIDE + c) * pitch + r) = {
            __byte_perm(from[0], from[2], first), __byte_perm(from[0], from[2], last),
            __byte_perm(from[1], from[3], first), __byte_perm(from[1], from[3], last)};
    }
}

// One block. largest (count): each tensor's in this update, as bits of a float; history
// (HISTORY,count): those of the last updates, a row an update in turn; updates: how many there
// were. A scale is the power of 2 that takes the history's largest to 112 .. 224, half of what E4M3
// has, a 256th of what E5M2 has, because the next update's may be larger. Non-finite values are
// ignored. reports (2,2): pinned memory of the host, the counts of updates with even and odd
// numbers. largest and counts are 0 afterwards.
extern "C" __global__ void prepare_scales(float* scales, float* history, int* largest, int* updates,
                                          int64* counts, int64* reports, int count) {
    const int newest = *updates % HISTORY;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float now = __int_as_float(largest[i]);
        largest[i] = 0;
        history[newest * count + i] = isfinite(now) ? now : 0.0f;
        float most = 0.0f;
        for (int row = 0; row < HISTORY; row++) most = fmaxf(most, history[row * count + i]);
        const float highest = fminf(__fdiv_rn(224.0f, most), 0x1p100f);
        // without its mantissa
        if (most > 0.0f) scales[i] = __int_as_float(__float_as_int(highest) & 0x7f800000);
    }
    __syncthreads();  // all have read *updates
    if (threadIdx.x > 0) return;
    for (int k = 0; k < 2; k++) reports[*updates % 2 * 2 + k] = counts[k], counts[k] = 0;
    *updates += 1;
}
