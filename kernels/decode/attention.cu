// Attention of each row's query to all positions of its sequence so far, atty = softmax(query @
// keys^T / sqrt(HS)) @ values; query head h reads key and value head h / (NH / NKV). With
// MODEL_QK_SCALE, queries and keys are normalized as they are read, and their product is multiplied
// by that, not by 1 / sqrt(HS). A block has SPLIT positions of a head at a time; of a head's
// blocks, the last to finish merges all parts, in order. Reading keys and values bounds it.

#include "decode/head.cuh"

constexpr int SPLIT = DECODE_SPLIT;
// positions of a group of lanes
constexpr int COUNT = SPLIT / (WARPS * ROWS_AT_ONCE);
// floats: the largest score, the sum of p = exp(score - largest); from 4 on, of p * value
constexpr int PART = HS + 4;

static_assert(ROW_LANES * PACK >= HS && THREADS >= HS,
              "a lane for each 16 bytes, a thread a channel");
static_assert(SPLIT % (WARPS * ROWS_AT_ONCE) == 0, "all warps have equally many positions");

__device__ inline float score_of(const Floats& query, const Floats& key) {
    const float product = dot_product(query, key);
    return QK_NORM ? product * inverse_length(key) : product / sqrtf(float(HS));
}

// Merges `count` parts, each thread for a channel. read(i): float i of the parts.
template <class Read>
__device__ inline void merge_parts(const Read& read, int count, float& largest, float& sum,
                                   float& out) {
    largest = -INFINITE, sum = out = 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; i++) largest = fmaxf(largest, read(i * PART));
#pragma unroll 4
    for (int i = 0; i < count; i++) {
        const float scale = expf(read(i * PART) - largest);
        sum += read(i * PART + 1) * scale;
        out += read(i * PART + 4 + threadIdx.x) * scale;
    }
}

// Block (THREADS); grid (NH, up to maxT / SPLIT, N). parts (N,NH,maxT / SPLIT rounded up,PART):
// scratch; arrived (N,NH) is 0 before and after. Values are copied to shared memory, 16 bytes COUNT
// times for each thread, rather than held in registers, so that a multiprocessor has room for three
// blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
decode_attention(element* atty, float* parts, int* arrived, const element* query,
                 const element* keys, const element* values, const Control* control, int maxT,
                 int T) {
    __shared__ uint4 shared_values[COUNT * THREADS];
    __shared__ alignas(16) float warp_parts[WARPS * PART];
    __shared__ bool is_last;
    const int h = blockIdx.x, n = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
        head = n * NH + h;
    let_next_begin();
    // positions: of earlier passes, all
    const int before = control->position, count = before + n % T + 1;
    // with work to do
    const int splits = (count + SPLIT - 1) / SPLIT, blocks = min(splits, int(gridDim.y));
    if (blockIdx.y >= blocks) return;

    const int c = lane % ROW_LANES * PACK, channel = threadIdx.x;
    const bool has_channels = c < HS;
    const int64 start = int64(n / T * NKV + h / (NH / NKV)) * maxT * HS + c;
    float* const head_parts = parts + int64(head) * ((maxT + SPLIT - 1) / SPLIT) * PART;
    Floats q = {};
    for (int s = blockIdx.y; s < splits; s += blocks) {
        uint4 k[COUNT] = {}, *const mine = shared_values + threadIdx.x;
        const auto position = [&](int i) {
            return s * SPLIT + (i * WARPS + warp) * ROWS_AT_ONCE + lane / ROW_LANES;
        };
        const auto load_positions = [&](int from, int to) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (!has_channels || position(i) < from || position(i) >= to) continue;
                const int64 at = start + int64(position(i)) * HS;
                k[i] = load_bits(keys + at);
                copy_async(mine + i * THREADS, reinterpret_cast<const uint4*>(values + at), true);
            }
        };
        load_positions(0, before);
        if (s == blockIdx.y) {
            wait_for_inputs();
            if (has_channels) q = load(query + int64(n) * Q + h * HS + c);
            const float scale = QK_NORM ? MODEL_QK_SCALE * inverse_length(q) : 1.0f;
#pragma unroll
            for (int e = 0; e < PACK && QK_NORM; e++) q.x[e] *= scale;
        }
        load_positions(before, count);
        copies_commit();
        float scores[COUNT], largest = -INFINITE;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float score = score_of(q, unpack(k[i]));
            scores[i] = position(i) < count ? score : -INFINITE;
            largest = fmaxf(largest, scores[i]);
        }
        largest = warp_max(largest);
        const float finite = largest == -INFINITE ? 0.0f : largest;  // a warp without positions
        Floats o = {};
        float total = 0.0f;
        copies_wait<0>();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float p = expf(scores[i] - finite);
            const Floats value =
                unpack(has_channels && position(i) < count ? mine[i * THREADS] : uint4{});
            total += p;
#pragma unroll
            for (int e = 0; e < PACK; e++) o.x[e] += p * value.x[e];
        }
#pragma unroll
        for (int distance = ROW_LANES; distance < 32; distance *= 2) {
            total += __shfl_xor_sync(0xffffffff, total, distance);
#pragma unroll
            for (int e = 0; e < PACK; e++) o.x[e] += __shfl_xor_sync(0xffffffff, o.x[e], distance);
        }
        float* const warp_part = warp_parts + warp * PART;
        if (lane < ROW_LANES && has_channels) store(warp_part + 4 + c, o);
        if (lane == 0) warp_part[0] = largest, warp_part[1] = total;
        __syncthreads();
        if (channel < HS) {
            float sum, out, *const part = head_parts + s * PART;
            merge_parts([&](int i) { return warp_parts[i]; }, WARPS, largest, sum, out);
            if (splits == 1) from_float(atty[int64(n) * Q + h * HS + channel], out / sum);
            part[4 + channel] = out;
            if (channel == 0) part[0] = largest, part[1] = sum;
        }
        __syncthreads();  // all have read the warps' parts
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived + head, 1) == blocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) arrived[head] = 0;
    if (channel < HS) {
        float largest, sum, out;
        merge_parts([&](int i) { return __ldcg(head_parts + i); }, splits, largest, sum, out);
        from_float(atty[int64(n) * Q + h * HS + channel], out / sum);
    }
}
