// Softmax over long rows: the logits of the whole vocabulary. RESULTS.md has what each rung measured.
//
//     probs[n,v] = exp(logits[n,v] - the row's maximum) / their sum over the row, 0 for v >= V        probs =
//
// logits, probs (N,Vp). Bound by bytes: a row is written once and, if it can be kept or the L2 cache still has it, read
// from memory once. There is no live rung: kernels/classifier.cu computes a row's loss and gradient while it has the
// row, and probabilities are never stored.

#include "common.cuh"
#include "block.cuh"

// thread_a_row. One thread loops over a row three times: for the maximum, the sum, the result. Neighbouring threads are
// a row apart, 100 KB, so that each element costs a 32-byte sector, and the row is read three times. The sum is made of
// partial sums: added one by one, small numbers would be lost in the rounding of a large sum, 2e-5 of it for a row of
// 50257.
extern "C" __global__ void __launch_bounds__(1024) softmax_thread_a_row(element* probs, const element* logits, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const int64 start = int64(n) * Vp;
    float largest = -INFINITE, sum = 0.0f;
    for (int v = 0; v < V; v++) largest = fmaxf(largest, to_float(logits[start + v]));
    for (int first = 0; first < V; first += 256) {
        float part = 0.0f;
        for (int v = first; v < min(first + 256, V); v++) part += expf(to_float(logits[start + v]) - largest);
        sum += part;
    }
    const float scale = 1.0f / sum;
    for (int v = 0; v < Vp; v++) from_float(probs[start + v],
                                            v < V ? expf(to_float(logits[start + v]) - largest) * scale : 0.0f);
}

// warp_a_row. One warp per row: coalesced reads, reductions by shuffles. Many rows are in flight at once, more than the
// L2 cache holds: the second and third read come from memory again.
extern "C" __global__ void __launch_bounds__(1024) softmax_warp_a_row(element* probs, const element* logits, int N) {
    const int n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const int64 start = int64(n) * Vp;
    float largest = -INFINITE, sum = 0.0f;
    for (int v = lane; v < V; v += 32) largest = fmaxf(largest, to_float(logits[start + v]));
    largest = warp_max(largest);
    for (int v = lane; v < V; v += 32) sum += expf(to_float(logits[start + v]) - largest);
    const float scale = 1.0f / warp_sum(sum);
    for (int v = lane; v < Vp; v += 32) from_float(probs[start + v],
                                                   v < V ? expf(to_float(logits[start + v]) - largest) * scale : 0.0f);
}

// block_a_row. One block per row: the larger the blocks, the fewer rows are in flight. With 1024 threads, there are two
// blocks per multiprocessor, 264 rows or 27 MB in bfloat16, which the L2 cache can hold until the third read: as fast
// as warp_a_row, not faster. With 256 threads, 1056 rows or 106 MB are in flight, and it is slower, as it is with all
// blocks in float32, where 264 rows are 53 MB. The machine code shows why: the compiler does not know the step of the
// loops and leaves one load per iteration, where warp_a_row has up to 16.
extern "C" __global__ void __launch_bounds__(1024) softmax_block_a_row(element* probs, const element* logits, int N) {
    const int64 start = int64(blockIdx.x) * Vp;
    float largest = -INFINITE, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) largest = fmaxf(largest, to_float(logits[start + v]));
    largest = block_max(largest);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(to_float(logits[start + v]) - largest);
    const float scale = 1.0f / block_sum(sum);
    for (int v = threadIdx.x; v < Vp; v += blockDim.x) {
        from_float(probs[start + v], v < V ? expf(to_float(logits[start + v]) - largest) * scale : 0.0f);
    }
}

// online. Maximum and sum in one read: when a larger value turns up, the sum so far is scaled down. Two reads instead
// of three, 16 bytes per thread, and the second one begins at the end of the row, which was read last and is likeliest
// to be in the cache.
extern "C" __global__ void __launch_bounds__(1024) softmax_online(element* probs, const element* logits, int N) {
    const element* row = logits + int64(blockIdx.x) * Vp;
    const MaxAndSum whole = block_merge(online_part(row, threadIdx.x, blockDim.x));
    const float scale = 1.0f / whole.sum;
    const int step = blockDim.x * PACK, steps = (Vp + step - 1) / step;
    for (int s = steps - 1; s >= 0; s--) {
        const int v = s * step + threadIdx.x * PACK;
        if (v >= Vp) continue;
        Floats x = load_logits(row, v);
        for (int k = 0; k < PACK; k++) x.x[k] = expf(x.x[k] - whole.largest) * scale;
        store(probs + int64(blockIdx.x) * Vp + v, x);
    }
}
