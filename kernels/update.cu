// From the losses and gradients of a step to the new weights.
//
//     copy_batch      copies 4-byte words of the batch from the host's pinned memory       batch =
//     loss_mean       loss = the sum of weights * losses, times scale                      loss =
//     add_gradients   sums += the gradients of a micro-batch of each rank                  sums = (+= if not first)
//     global_norm     partials[chunk] = the sum of squares of the gradients of a chunk     partials =
//     prepare_update  computes what all threads of adamw_update need; reports to the host  control =, reports =,
//                                                                                          recent
//                                                                                          +=
//     adamw_update    m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g^2
//                     params *= 1 - learning_rate * decay
//                     params -= rate * m / (sqrt(v) + eps)                                 params, master, m, v =
//     round_weights   params = float32 weights, rounded to nearest                         params =
//
// AdamW: Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101, with the bias corrections in
// rate and eps, as in train_gpt2.py. What changes from step to step is in the GPU's memory: one
// captured CUDA graph serves every step.
//
// The parameters are cut into chunks (llmc/gpu/shares.py). A rank owns some of them (on one GPU,
// all), and stores their master, m, v and gradient sums, one chunk after the other. The gradients
// of an update are those of the last micro-batch of each rank and, with several micro-batches, the
// sums of the earlier ones; added as they are read.
//
// Bound by bytes: on one GPU, with one micro-batch, adamw_update reads 16 bytes and writes 12 per
// float32 parameter; for bfloat16 parameters with a float32 master copy, 14 and 14.

#include "update.cuh"

struct Report {  // in pinned memory, one per half
    float loss, norm, loss_z, norm_z;
};

constexpr int WINDOW = 128;

struct Recent {  // RECENT of llmc/outliers.py
    int count;
    float values[WINDOW];  // value n is at n % WINDOW
};

// Copy the words from `begin` to `end` - 1. batch: as batch_table of llmc/gpu/batch.py; pinned: two
// halves.
extern "C" __global__ void copy_batch(int* batch, const int* pinned, const Control* control,
                                      int words, int begin,
                                      int end) {
    const int i = begin + blockIdx.x * blockDim.x + threadIdx.x;
    if (i < end) batch[i] = pinned[control->steps_begun % 2 * words + i];
}

// One block (UPDATE_LOSS_THREADS). loss (1), losses, weights (N). scale: in an update, 1 / (N *
// micro-batches), with or without weights, which prepare_update makes up for.
extern "C" __global__ void __launch_bounds__(UPDATE_LOSS_THREADS)
loss_mean(float* loss, const float* losses, const float* weights, float scale, int N) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < N; i += UPDATE_LOSS_THREADS) sum += weights[i] * losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss = sum * scale;
}

// Block (THREADS); grid (chunks). sums (elements of the chunks); gradients: see Chunk.
extern "C" __global__ void __launch_bounds__(THREADS)
add_gradients(float* sums, const gradient* gradients, const Chunk* chunks, int rank_count,
              int first) {
    const Chunk chunk = chunks[blockIdx.x];
    const Gradients all = {first ? nullptr : sums, gradients, rank_count};
#pragma unroll 2
    for (int i = threadIdx.x * NUMBERS; i < chunk.count; i += THREADS * NUMBERS) {
        store_quad(sums + chunk.local + i, all(chunk, i));
    }
}

// Block (THREADS); grid (chunks). sums, gradients: see Gradients; partials (chunks of all ranks).
extern "C" __global__ void __launch_bounds__(THREADS)
global_norm(float* partials, const float* sums, const gradient* gradients, const Chunk* chunks,
            int rank_count) {
    const Chunk chunk = chunks[blockIdx.x];
    const Gradients all = {sums, gradients, rank_count};
    float sum = 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x * NUMBERS; i < chunk.count; i += THREADS * NUMBERS) {
        const Quad g = all(chunk, i);
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) sum += g.x[k] * g.x[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[chunk.index] = sum;
}

// As in llmc/outliers.py. One thread.
__device__ inline float z_score(Recent* recent, float x) {
    if (!isfinite(x)) return INFINITE;
    recent->values[recent->count++ % WINDOW] = x;
    if (recent->count <= WINDOW) return 0.0f;
    double mean = 0.0, variance = 0.0;
    for (int i = 0; i < WINDOW; i++) mean += recent->values[i] / double(WINDOW);
    for (int i = 0; i < WINDOW; i++) {
        const double difference = recent->values[i] - mean;
        variance += difference * difference / WINDOW;
    }
    return variance > 0.0 ? (x - mean) / sqrt(variance) : 0.0;
}

// One block (THREADS). losses (micro_steps): of the micro-batches, each divided by their number.
// partials (chunks); chunks = 0: the norm is not computed. rate_and_scale (2): the learning rate;
// what losses and gradients are multiplied by, 0 if no target has a weight: then the update is
// skipped. grad_clip = 0: no clipping. skip_loss, skip_norm: z-scores, among the `recent` losses
// and norms, above which an update is an outlier and is skipped, too (0: none is).
extern "C" __global__ void __launch_bounds__(THREADS)
prepare_update(Control* control, Report* reports, const float* losses, const float* partials,
               const float* rate_and_scale, double beta1, double beta2, double eps,
               float grad_clip, int micro_steps, int chunks, Recent* recent, float skip_loss,
               float skip_norm) {
    const float learning_rate = rate_and_scale[0], scale = rate_and_scale[1];
    float squares = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < chunks; i += THREADS) squares += partials[i];
    const float norm = sqrtf(block_sum(squares)) * fabsf(scale);
    if (threadIdx.x > 0) return;
    float loss = losses[0];
    for (int i = 1; i < micro_steps; i++) loss += losses[i];
    loss *= scale;
    Report report = {loss, norm, 0.0f, 0.0f};
    if (scale && (skip_loss || skip_norm)) {
        report.loss_z = z_score(&recent[0], loss);
        report.norm_z = z_score(&recent[1], norm);
    }
    control->skipped = !scale || skip_loss && report.loss_z > skip_loss
        || skip_norm && report.norm_z > skip_norm;
    if (!isfinite(loss) || !isfinite(norm) && !control->skipped) control->halted = 1;
    if (!control->halted) control->step += 1;
    const double correction2 = sqrt(1.0 - pow(beta2, double(control->step)));
    control->rate = learning_rate * correction2 / (1.0 - pow(beta1, double(control->step)));
    control->eps = eps * correction2;
    control->learning_rate = learning_rate;
    control->grad_scale = scale * (grad_clip > 0.0f && norm > grad_clip ? grad_clip / norm : 1.0f);
    reports[control->steps_begun % 2] = report;
    control->steps_begun += 1;
}

// A thread updates NUMBERS parameters; block (THREADS); grid (BLOCKS for each chunk). params
// (parameters); master, m, v (elements of the chunks); sums, gradients: see Gradients. master: the
// float32 weights of which params are a rounded copy, or null. seed: for stochastic rounding; 0:
// round to nearest, except the weights of layernorms. They begin at 1, where bfloat16's steps are
// 1/256 and 1/128: to nearest, they would stay there: doc/long_run.md.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw_update(element* params, float* master, float* m, float* v, const float* sums,
             const gradient* gradients,
             const Chunk* chunks, int rank_count, const Control* control, float beta2,
                 float one_minus_beta1,
             float one_minus_beta2, int seed) {
    const Chunk chunk = chunks[blockIdx.x / BLOCKS];
    const int within = within_chunk();
    if (within >= chunk.count || control->halted || control->skipped) return;
    const int64 i = chunk.flat + within, local = chunk.local + within;
    Quad p = master ? load_quad(master + local) : load_quad(params + i);
    Quad mean = load_quad(m + local), square = load_quad(v + local);
    const Quad g = Gradients{sums, gradients, rank_count}(chunk, within);
    const float keep = 1.0f - control->learning_rate * chunk.rate * chunk.decay;
    const float rate = control->rate * chunk.rate, eps = control->eps,
        grad_scale = control->grad_scale;
#pragma unroll
    for (int k = 0; k < NUMBERS; k++) {
        const float gradient = g.x[k] * grad_scale;
        mean.x[k] += one_minus_beta1 * (gradient - mean.x[k]);
        square.x[k] = beta2 * square.x[k] + one_minus_beta2 * gradient * gradient;
        p.x[k] = p.x[k] * keep - rate * mean.x[k] / (sqrtf(square.x[k]) + eps);
    }
    if (master) store_quad(master + local, p);
    store_quad(m + local, mean);
    store_quad(v + local, square);
    if (seed || chunk.at_random) round_stochastically(p, uint32(i), uint32(control->step), seed);
    store_quad(params + i, p);
}

// params = exact, rounded to nearest. One thread per pack; grid (N / PACK / THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) round_weights(element* params,
                                                                    const float* exact, int64 N) {
    const int64 i = (int64(blockIdx.x) * THREADS + threadIdx.x) * PACK;
    if (i < N) store(params + i, load(exact + i));
}
