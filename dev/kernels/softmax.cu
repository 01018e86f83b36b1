// Softmax and cross entropy over long rows, the logits of the whole vocabulary: probabilities, the
// loss of each row, its gradient, and both of these at once. RESULTS.md has what each rung
// measured.
//
//     probs[n,v] = exp(logits[n,v] - the row's maximum) / their sum over the row, 0 for v >= V        probs =
//     losses[n] = log(the sum over v of exp(logits[n,v])) - logits[n,targets[n]]                      losses =
//     dlogits[n,v] = (probs[n,v] - (v is the target)) * dloss, 0 for v >= V                           dlogits =
//
// logits, probs, dlogits (N,Vp); losses (N) float32; targets (N) int32. Bound by bytes. The live
// rung is kernels/classifier.cu, which computes a row's loss and gradient while it has the row, and
// stores no probabilities. On Hopper, a row that fits into shared memory is read once and waits
// there for its gradient; otherwise it is read twice, the second time from the L2 cache.

#include "softmax.cuh"

// The maximum and sum of a row from those of the block's threads, a multiple of 32; every thread
// gets them.
__device__ inline MaxAndSum block_merge(MaxAndSum x) {
    __shared__ MaxAndSum parts[32];
    x = warp_merge(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_merge(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32]
                      : MaxAndSum{-INFINITE, 0.0f});
}

// PACK logits from column v on, -inf from V on, whatever is stored there.
__device__ inline Floats load_logits(const element* row, int v) {
    Floats x = load(row + v);
    for (int k = 0; k < PACK; k++) {
        if (v + k >= V) x.x[k] = -INFINITE;
    }
    return x;
}

// This thread's part of a row of logits: packs `first`, first + step, ..., 16 bytes each, each read
// once.
__device__ inline MaxAndSum online_part(const element* row, int first, int step) {
    MaxAndSum part = {-INFINITE, 0.0f};
    for (int v = first * PACK; v < V; v += step * PACK) {
        const Floats x = load_logits(row, v);
        float largest = part.largest;
        for (int k = 0; k < PACK; k++) largest = fmaxf(largest, x.x[k]);
        if (largest == -INFINITE) continue;
        float sum = part.sum * expf(part.largest - largest);
        for (int k = 0; k < PACK; k++) sum += expf(x.x[k] - largest);
        part = {largest, sum};
    }
    return part;
}

// A block's row: to = exp(row - largest) * scale, less dloss at column `target`; backwards, because
// the end of the row was read last and is likeliest to be in the cache.
__device__ inline void store_row(element* to, const element* row, float largest, float scale,
                                 int target, float dloss) {
    const int step = blockDim.x * PACK, steps = (Vp + step - 1) / step;
    for (int s = steps - 1; s >= 0; s--) {
        const int v = s * step + threadIdx.x * PACK;
        if (v >= Vp) continue;
        Floats x = load_logits(row, v);
        for (int k = 0; k < PACK; k++)
            x.x[k] = expf(x.x[k] - largest) * scale - (v + k == target ? dloss : 0.0f);
        store(to + v, x);
    }
}

// -------------------------------------------------------------------------------------------------
// probabilities

// thread_a_row. One thread loops over a row three times: for the maximum, the sum, the result.
// Neighboring threads are a row apart, 100 KB, so that each element costs a 32-byte sector, and the
// row is read three times. The sum is made of partial sums: added one by one, small numbers would
// be lost in the rounding of a large sum, 2e-5 of it for a row of 50257.
extern "C" __global__ void __launch_bounds__(1024) softmax_thread_a_row(element* probs, const element* logits, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const int64 start = int64(n) * Vp;
    float largest = -INFINITE, sum = 0.0f;
    for (int v = 0; v < V; v++) largest = fmaxf(largest, to_float(logits[start + v]));
    for (int first = 0; first < V; first += 256) {
        float part = 0.0f;
        for (int v = first; v < min(first + 256, V); v++)
            part += expf(to_float(logits[start + v]) - largest);
        sum += part;
    }
    const float scale = 1.0f / sum;
    for (int v = 0; v < Vp; v++) from_float(probs[start + v],
                                            v < V ? expf(to_float(logits[start + v]) - largest)
                                                * scale : 0.0f);
}

// warp_a_row. One warp per row: coalesced reads, reductions by shuffles. Many rows are in flight at
// once, more than the L2 cache holds: the second and third read come from memory again.
extern "C" __global__ void __launch_bounds__(1024) softmax_warp_a_row(element* probs,
                                                                      const element* logits, int N) {
    const int n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const int64 start = int64(n) * Vp;
    float largest = -INFINITE, sum = 0.0f;
    for (int v = lane; v < V; v += 32) largest = fmaxf(largest, to_float(logits[start + v]));
    largest = warp_max(largest);
    for (int v = lane; v < V; v += 32) sum += expf(to_float(logits[start + v]) - largest);
    const float scale = 1.0f / warp_sum(sum);
    for (int v = lane; v < Vp; v += 32) from_float(probs[start + v],
                                                   v < V ? expf(to_float(logits[start + v])
                                                                - largest) * scale : 0.0f);
}

// online. One block per row, and maximum and sum in one read: when a larger value turns up, the sum
// so far is scaled down. Two reads instead of three, 16 bytes per thread.
extern "C" __global__ void __launch_bounds__(1024) softmax_online(element* probs,
                                                                  const element* logits, int N) {
    const element* row = logits + int64(blockIdx.x) * Vp;
    const MaxAndSum whole = block_merge(online_part(row, threadIdx.x, blockDim.x));
    store_row(probs + int64(blockIdx.x) * Vp, row, whole.largest, 1.0f / whole.sum, -1, 0.0f);
}

// -------------------------------------------------------------------------------------------------
// loss and gradient

// apart. Three kernels, each at its best: softmax (online, above), the loss and the gradient, 16
// bytes per thread. The probabilities are written to memory and read back, and the logits are read
// again for the loss.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_forward(float* losses, const element* logits, const int* targets, int N) {
    const int n = blockIdx.x;
    const element* row = logits + int64(n) * Vp;
    const MaxAndSum whole = block_merge(online_part(row, threadIdx.x, blockDim.x));
    if (threadIdx.x == 0) losses[n] = logf(whole.sum) + (whole.largest - to_float(row[targets[n]]));
}

extern "C" __global__ void __launch_bounds__(1024)
crossentropy_softmax_backward(element* dlogits, const element* probs, const int* targets,
                              float dloss, int N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(N) * Vp) return;
    const int n = i / Vp, v = i % Vp, target = targets[n];
    Floats x = load(probs + i);
    for (int k = 0; k < PACK; k++)
        x.x[k] = v + k < V ? (x.x[k] - (v + k == target ? 1.0f : 0.0f)) * dloss : 0.0f;
    store(dlogits + i, x);
}

// fused. Loss and gradient in one kernel, the gradient in place of the logits: online, then over
// the row again. Three separate kernels move a row six times, this one two or three times: half the
// time.
extern "C" __global__ void __launch_bounds__(1024)
classifier_fused(float* losses, element* logits, const int* targets, float dloss, int N) {
    const int n = blockIdx.x, target = targets[n];
    element* row = logits + int64(n) * Vp;
    const MaxAndSum part = online_part(row, threadIdx.x, blockDim.x);
    // read before block_merge's barriers, after which it may be overwritten
    const float target_logit = to_float(row[target]);
    const MaxAndSum whole = block_merge(part);
    if (threadIdx.x == 0) losses[n] = logf(whole.sum) + (whole.largest - target_logit);
    store_row(row, row, whole.largest, dloss / whole.sum, target, dloss);
}
