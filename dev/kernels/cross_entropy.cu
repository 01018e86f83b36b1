// Cross entropy: the loss of each row of logits, its gradient, and both at once. RESULTS.md has what each rung
// measured.
//
//     losses[n] = log(the sum over v of exp(logits[n,v])) - logits[n,targets[n]]                      losses =
//     dlogits[n,v] = (probs[n,v] - (v is the target)) * dloss, 0 for v >= V                           dlogits =
//
// logits, probs, dlogits (N,Vp); losses (N) float32; targets (N) int32. Bound by bytes. The live rung is
// kernels/classifier.cu, which does it all: it reads a row of logits and writes its loss and its gradient. On Hopper, a
// row that fits into shared memory is read once and waits there for its gradient; otherwise it is read twice, the
// second time from the L2 cache.

#include "common.cuh"
#include "block.cuh"

// thread_a_row. One thread loops over a row twice, without storing probabilities: the loss only needs the row's maximum
// and sum. Neighbouring threads are a row apart, 100 KB in bfloat16, so that each access of a warp touches 32 cache
// lines.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_forward_thread_a_row(float* losses, const element* logits, const int* targets, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const element* row = logits + int64(n) * Vp;
    float largest = -INFINITE, sum = 0.0f;
    for (int v = 0; v < V; v++) largest = fmaxf(largest, to_float(row[v]));
    for (int v = 0; v < V; v++) sum += expf(to_float(row[v]) - largest);
    losses[n] = logf(sum) + (largest - to_float(row[targets[n]]));
}

// warp_a_row. Online softmax, 16 bytes per lane: each row is read once, coalesced.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_forward_warp_a_row(float* losses, const element* logits, const int* targets, int N) {
    const int n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const element* row = logits + int64(n) * Vp;
    const MaxAndSum whole = warp_merge(online_part(row, lane, 32));
    if (lane == 0) losses[n] = logf(whole.sum) + (whole.largest - to_float(row[targets[n]]));
}

// block_a_row. The same with one block per row: for GPT-2's vocabulary in bfloat16, 32 lanes take 200 iterations, 1024
// threads seven. A little faster with 64 to 256 threads in bfloat16, and no faster in float32, where warp_a_row already
// runs at the speed of a copy.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_forward_block_a_row(float* losses, const element* logits, const int* targets, int N) {
    const int n = blockIdx.x;
    const element* row = logits + int64(n) * Vp;
    const MaxAndSum whole = block_merge(online_part(row, threadIdx.x, blockDim.x));
    if (threadIdx.x == 0) losses[n] = logf(whole.sum) + (whole.largest - to_float(row[targets[n]]));
}

// thread_an_element. The formula, from stored probabilities, one thread each: 2 or 4 bytes per instruction, and each
// element takes a division, to find the row, and a load of its target.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_softmax_backward_thread_an_element(element* dlogits, const element* probs, const int* targets,
                                                float dloss, int N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64(N) * Vp) return;
    const int n = i / Vp, v = i % Vp;
    from_float(dlogits[i], v < V ? (to_float(probs[i]) - (v == targets[n] ? 1.0f : 0.0f)) * dloss : 0.0f);
}

// pack_a_thread. 16 bytes per thread: one division and one load of the target for all elements of a pack. The speed of
// a copy, so only moving fewer bytes can help.
extern "C" __global__ void __launch_bounds__(1024)
crossentropy_softmax_backward_pack_a_thread(element* dlogits, const element* probs, const int* targets, float dloss,
                                            int N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(N) * Vp) return;
    const int n = i / Vp, v = i % Vp, target = targets[n];
    Floats x = load(probs + i);
    for (int k = 0; k < PACK; k++) x.x[k] = v + k < V ? (x.x[k] - (v + k == target ? 1.0f : 0.0f)) * dloss : 0.0f;
    store(dlogits + i, x);
}

// apart: softmax.cu's online, then the loss (block_a_row) and the gradient (pack_a_thread), each kernel at its best:
// the probabilities are written to memory and read back, and the logits are read again for the loss.

// fused. Loss and gradient in one kernel, the gradient in place of the logits: online, then over the row again,
// backwards from its end, which the cache still has. Three separate kernels move a row six times, this one two or three
// times: half the time.
extern "C" __global__ void __launch_bounds__(1024)
classifier_fused(float* losses, element* logits, const int* targets, float dloss, int N) {
    const int n = blockIdx.x, target = targets[n];
    element* row = logits + int64(n) * Vp;
    const MaxAndSum part = online_part(row, threadIdx.x, blockDim.x);
    // read before block_merge's barriers, after which it may be overwritten
    const float target_logit = to_float(row[target]);
    const MaxAndSum whole = block_merge(part);
    if (threadIdx.x == 0) losses[n] = logf(whole.sum) + (whole.largest - target_logit);
    const float scale = dloss / whole.sum;
    const int step = blockDim.x * PACK, steps = (Vp + step - 1) / step;
    for (int s = steps - 1; s >= 0; s--) {
        const int v = s * step + threadIdx.x * PACK;
        if (v >= Vp) continue;
        Floats x = load_logits(row, v);
        for (int k = 0; k < PACK; k++) x.x[k] = expf(x.x[k] - whole.largest) * scale - (v + k == target ? dloss : 0.0f);
        store(row + v, x);
    }
}
