// From the losses and gradients of a step to the new weights.
//
//     begin_step      copies words of the batch that the host has left in pinned memory               batch =
//     loss_mean       loss = the mean of losses                                                       loss = (or += if accumulate)
//     global_norm     partials[block] = the sum of squares over a part of the gradients              partials =
//     prepare_update  what all threads of adamw_update need, worked out once; reports to the host     control =, report =
//     adamw_update    m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g^2
//                     params -= rate * m / (sqrt(v) + eps), after params *= 1 - learning_rate * decay     params, master, m, v =
//
// AdamW: Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101. The bias corrections are part of rate and eps, as in
// train_gpt2.py. All that changes from step to step is in device memory, so that one captured graph serves every step.
//
// Bound by bytes: adamw_update reads 16 and writes 12 for each float32 parameter; for a bfloat16 one with a float32 original, 14 and 14.
// H200 (a copy: 4235 GB/s), 124M, in a step: adamw_update float32 0.82 ms, 4256 GB/s; bfloat16 0.836 ms, 4170 GB/s at B=4, 0.845 ms, 4120
// at B=64; with eight numbers a thread 0.88 and 0.93 ms. global_norm, which only clipping and a run's main.log ask for, and which has to be
// done before: float32 0.117 ms, 4255 GB/s; bfloat16 0.062 ms, 3994 GB/s at B=4, 0.065 ms, 3811 at B=64.

#include "common.cuh"

struct Control {
    int64 step;         // updates done
    int64 launches;     // steps begun: its lowest bit says which half of the pinned memory is the current step's
    float rate;         // learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t), t counted from 1
    float eps;          // eps * sqrt(1 - beta2^t)
    float learning_rate;
    float grad_scale;   // what clipping multiplies the gradients by
    int halted;         // a loss was not finite: the weights stay as they are from then on
    int padding;
};

struct Report {  // in pinned memory, one for each half
    float loss, norm;
};

__device__ inline float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// The words from `begin` to `end` - 1. batch: the learning rate's bits, then the words of encoder and classifier. pinned: two halves of
// `words` each.
extern "C" __global__ void begin_step(int* batch, const int* pinned, const Control* control, int words, int begin, int end) {
    const int i = begin + blockIdx.x * blockDim.x + threadIdx.x;
    if (i < end) batch[i] = pinned[control->launches % 2 * words + i];
}

// One block (1024). loss (1) = or += the sum of losses (N), times scale.
extern "C" __global__ void __launch_bounds__(1024) loss_mean(float* loss, const float* losses, float scale, int accumulate, int N) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < N; i += 1024) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss = sum * scale + (accumulate ? *loss : 0.0f);
}

// Block (256); grid (any number of blocks); partials (gridDim.x).
extern "C" __global__ void __launch_bounds__(256) global_norm(float* partials, const gradient* grads, int64 N) {
    float sum = 0.0f;
    const int64 stride = int64(gridDim.x) * 256 * PACK;
#pragma unroll 4
    for (int64 i = (int64(blockIdx.x) * 256 + threadIdx.x) * PACK; i < N; i += stride) {
        const Floats g = load(grads + i);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += g.x[k] * g.x[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One block (256). partials (blocks), or none with blocks = 0, when nobody asks for the norm; grad_clip = 0: no clipping.
extern "C" __global__ void __launch_bounds__(256)
prepare_update(Control* control, Report* reports, const float* loss, const float* partials, const int* batch, double beta1, double beta2,
               double eps, float grad_clip, int blocks) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < blocks; i += 256) squares += partials[i];
    const float norm = sqrtf(block_sum(squares));
    if (threadIdx.x > 0) return;
    const float learning_rate = __int_as_float(batch[0]);
    if (!isfinite(*loss)) control->halted = 1;
    if (!control->halted) control->step += 1;
    const double correction2 = sqrt(1.0 - pow(beta2, double(control->step)));
    control->rate = learning_rate * correction2 / (1.0 - pow(beta1, double(control->step)));
    control->eps = eps * correction2;
    control->learning_rate = learning_rate;
    control->grad_scale = grad_clip > 0.0f && norm > grad_clip ? grad_clip / norm : 1.0f;
    reports[control->launches % 2] = {*loss, norm};
    control->launches += 1;
}

// Four numbers, 16 bytes of float32 or 8 of bfloat16: what a thread of adamw_update works on. Six bytes of seven that it moves in a
// bfloat16 run are float32's: with 8 numbers a thread, each of a warp's accesses would leave every other 16 bytes to the next one.
struct Quad {
    float x[4];
};

__device__ inline Quad load_quad(const float* at) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    return {four.x, four.y, four.z, four.w};
}
__device__ inline void store_quad(float* at, const Quad& values) {
    *reinterpret_cast<float4*>(at) = {values.x[0], values.x[1], values.x[2], values.x[3]};
}
#if BFLOAT16
__device__ inline Quad load_quad(const __nv_bfloat16* at) {
    const uint2 bits = *reinterpret_cast<const uint2*>(at);
    const float2 low = as_floats(bits.x), high = as_floats(bits.y);
    return {low.x, low.y, high.x, high.y};
}
__device__ inline void store_quad(__nv_bfloat16* at, const Quad& values) {
    *reinterpret_cast<uint2*>(at) = {as_pair(values.x[0], values.x[1]), as_pair(values.x[2], values.x[3])};
}
#endif

// 32 random bits that only the three numbers decide. The constants are those of Chris Wellons' hash "lowbias32".
__device__ inline uint32 random_bits(uint32 i, uint32 step, uint32 seed) {
    uint32 x = i * 0x9e3779b9u + step;
    x ^= seed * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// x rounded to one of the two neighbouring bfloat16 numbers, the nearer one more probably, so that the mean is x: 16 random bits below the
// last one that stays, and what remains below is cut off. What is not finite stays so: a carry would make NaN's bits those of -0.
__device__ inline float round_at_random(float x, uint32 random16) {
    return isfinite(x) ? __uint_as_float(__float_as_uint(x) + random16 & 0xffff0000) : x;
}

// Each of four. float32 weights stay as they are.
__device__ inline void round_at_random(Quad& values, uint32 i, uint32 step, uint32 seed) {
#if BFLOAT16
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const uint32 random = random_bits(i + k, step, seed);
        values.x[k] = round_at_random(values.x[k], random & 0xffff);
        values.x[k + 1] = round_at_random(values.x[k + 1], random >> 16);
    }
#endif
}

// One thread four parameters; grid (N / 4 / 256). The parameters before stops[s], and not before stops[s-1], have weight decay decays[s].
// master: the float32 weights that params are a rounded copy of, or null when there are none. seed: of rounding at random, or 0.
extern "C" __global__ void __launch_bounds__(256)
adamw_update(element* params, float* master, float* m, float* v, const gradient* grads, const Control* control, const int64* stops,
             const float* decays, float beta2, float rest1, float rest2, int seed, int64 N) {
    const int64 i = (int64(blockIdx.x) * 256 + threadIdx.x) * 4;
    if (i >= N || control->halted) return;
    const Quad g = load_quad(grads + i);
    Quad p = master ? load_quad(master + i) : load_quad(params + i), mean = load_quad(m + i), square = load_quad(v + i);
    int span = 0;
    while (i >= stops[span]) span++;
    const float keep = 1.0f - control->learning_rate * decays[span];
    const float rate = control->rate, eps = control->eps, grad_scale = control->grad_scale;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float gradient = g.x[k] * grad_scale;
        mean.x[k] += rest1 * (gradient - mean.x[k]);
        square.x[k] = beta2 * square.x[k] + rest2 * gradient * gradient;
        p.x[k] = p.x[k] * keep - rate * mean.x[k] / (sqrtf(square.x[k]) + eps);
    }
    if (master) store_quad(master + i, p);
    store_quad(m + i, mean);
    store_quad(v + i, square);
    if (seed) round_at_random(p, uint32(i), uint32(control->step), seed);
    store_quad(params + i, p);
}

// params = exact, rounded to nearest. One thread a pack; grid (N / PACK / 256).
extern "C" __global__ void __launch_bounds__(256) round_weights(element* params, const float* exact, int64 N) {
    const int64 i = (int64(blockIdx.x) * 256 + threadIdx.x) * PACK;
    if (i < N) store(params + i, load(exact + i));
}

// Keeps the stream busy for a while, so that what is launched meanwhile can be timed without the launching. One thread.
extern "C" __global__ void hold(int microseconds) {
    int64 begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < 1000ll * microseconds);
}

// out[i] = a number in [-1, 1) that only i decides: inputs for timing, which zeros would make too fast. One thread an element.
extern "C" __global__ void fill_random(element* out, int64 N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= N) return;
    uint32 x = uint32(i) * 2654435761u + uint32(i >> 32) + 1;  // a xorshift of a multiplicative hash
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    from_float(out[i], int(x) * 4.6566129e-10f);
}
