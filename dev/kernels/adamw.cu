// AdamW. RESULTS.md has what each rung measured.
//
//     m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g^2,  g = grads * grad_scale           m =, v =
//     p = p * (1 - learning_rate * weight_decay)
//         - learning_rate * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)              params =, master =
//
// All N elements; m, v float32. In bfloat16, p is master, float32, and params its rounded copy; in
// float32, master is null and p is params. Bound by bytes: 28 per parameter. The live rung is
// adamw_update of kernels/update.cu: what changes from step to step is in device memory, so that
// one captured graph serves every step, and parts of the parameters have their own weight decay.

#include "common.cuh"

// thread_an_element. The formula. Each thread recomputes the bias corrections, with two powf, and
// waits for four loads of 2 or 4 bytes: more instructions per byte than memory leaves time for.
extern "C" __global__ void __launch_bounds__(1024)
adamw_update_thread_an_element(element* params, float* master, float* m, float* v,
                               const gradient* grads,
                               float learning_rate, float beta1, float beta2, float eps,
                                   float weight_decay,
                               float grad_scale, int step, int64 N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const float g = to_float(grads[i]) * grad_scale;
    m[i] = beta1 * m[i] + (1.0f - beta1) * g;
    v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
    const float mean = m[i] / (1.0f - powf(beta1, step)),
        square = v[i] / (1.0f - powf(beta2, step));
    float p = master ? master[i] : to_float(params[i]);
    p -= learning_rate * (mean / (sqrtf(square) + eps) + weight_decay * p);
    if (master) master[i] = p;
    from_float(params[i], p);
}

// pack_a_thread. PACK elements per thread, in 16-byte accesses; the corrections are folded into
// rate = learning_rate * sqrt(1 - beta2^step) / (1 - beta1^step) and eps * sqrt(1 - beta2^step),
// which the host computes once. keep = 1 - learning_rate * weight_decay. In float32, the live rung
// gains nothing over this one and has more to look up. In bfloat16 it is 3.5 percent faster: with
// four numbers per thread instead of eight, a warp's accesses to m, v and master are contiguous.
extern "C" __global__ void __launch_bounds__(1024)
adamw_update_pack_a_thread(element* params, float* master, float* m, float* v,
                           const gradient* grads, float rate,
                           float beta1, float beta2, float eps, float keep, float grad_scale,
                               int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    const Floats g = load(grads + i);
    Floats p = master ? load(master + i) : load(params + i), mean = load(m + i),
        square = load(v + i);
    for (int k = 0; k < PACK; k++) {
        const float d = g.x[k] * grad_scale;
        mean.x[k] = beta1 * mean.x[k] + (1.0f - beta1) * d;
        square.x[k] = beta2 * square.x[k] + (1.0f - beta2) * d * d;
        p.x[k] = p.x[k] * keep - rate * mean.x[k] / (sqrtf(square.x[k]) + eps);
    }
    if (master) store(master + i, p);
    store(m + i, mean);
    store(v + i, square);
    store(params + i, p);
}
