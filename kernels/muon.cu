// Muon's passes over a stack of matrices, between the matmuls of its Newton-Schulz steps, which
// cuBLASLt does.
//
//     muon_momentum   m += (1 - momentum) * (g - m);  u = (1 - momentum) * g + momentum * m        m =, u =
//     muon_squares    partials[matrix] = sums of x^2                                               partials =
//     muon_normalize  x /= (its norm + 1e-7)                                                       x = (in place)
//     muon_update     params = params * (1 - learning_rate * decay) - learning_rate * scale * u    params =, master =
//
// https://kellerjordan.github.io/posts/muon/. The first and the last work on the chunks of a rank's
// share, as adamw_update: u has these one after the other, from number `first` of the share on. The
// others work on whole matrices, `size` elements each, one after the other in x. Bound by bytes.

#include "update.cuh"

// Grid (BLOCKS for each chunk). sums, gradients: see Gradients.
extern "C" __global__ void __launch_bounds__(THREADS)
muon_momentum(float* m, element* u, const float* sums, const gradient* gradients,
              const Chunk* chunks,
              int rank_count, const Control* control, float momentum, int64 first) {
    const Chunk chunk = chunks[blockIdx.x / BLOCKS];
    const int within = within_chunk();
    if (within >= chunk.count || control->halted || control->skipped) return;
    const int64 local = chunk.local + within;
    Quad g = Gradients{sums, gradients, rank_count}(chunk, within), mean = load_quad(m + local);
#pragma unroll
    for (int k = 0; k < NUMBERS; k++) {
        const float gradient = g.x[k] * control->grad_scale;
        mean.x[k] += (1.0f - momentum) * (gradient - mean.x[k]);
        // Nesterov's: the gradient once more
        g.x[k] = (1.0f - momentum) * gradient + momentum * mean.x[k];
    }
    store_quad(m + local, mean);
    store_quad(u + local - first, g);
}

// A thread's numbers: grid (blocks of a matrix, matrices), which go over the matrix together.
struct Numbers {
    int64 begin;  // of the matrix, in the stack
    int first, step;
    __device__ Numbers(int size)
        : begin(int64(blockIdx.y) * size), first((blockIdx.x * THREADS + threadIdx.x) * NUMBERS),
          step(gridDim.x * THREADS * NUMBERS) {}
};

// partials (matrices, gridDim.x).
extern "C" __global__ void __launch_bounds__(THREADS) muon_squares(float* partials,
                                                                   const element* x, int size) {
    const Numbers of(size);
    float squares = 0.0f;
    for (int i = of.first; i < size; i += of.step) {
        const Quad y = load_quad(x + of.begin + i);
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) squares += y.x[k] * y.x[k];
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) partials[blockIdx.y * gridDim.x + blockIdx.x] = squares;
}

// Grid as muon_squares'.
extern "C" __global__ void __launch_bounds__(THREADS) muon_normalize(element* x,
                                                                     const float* partials, int size) {
    const Numbers of(size);
    float squares = 0.0f;
    for (int i = 0; i < gridDim.x; i++) squares += partials[blockIdx.y * gridDim.x + i];
    const float factor = 1.0f / (sqrtf(squares) + 1e-7f);
    for (int i = of.first; i < size; i += of.step) {
        Quad y = load_quad(x + of.begin + i);
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) y.x[k] *= factor;
        store_quad(x + of.begin + i, y);
    }
}

// Grid as muon_momentum's. master, seed: as adamw_update's, but that seed 0 rounds all to nearest.
extern "C" __global__ void __launch_bounds__(THREADS)
muon_update(element* params, float* master, const element* u, const Chunk* chunks,
            const Control* control, float scale,
            float decay, int seed, int64 first) {
    const Chunk chunk = chunks[blockIdx.x / BLOCKS];
    const int within = within_chunk();
    if (within >= chunk.count || control->halted || control->skipped) return;
    const int64 i = chunk.flat + within, local = chunk.local + within;
    const float keep = 1.0f - control->learning_rate * decay, rate = control->learning_rate * scale;
    Quad p = master ? load_quad(master + local) : load_quad(params + i);
    const Quad y = load_quad(u + local - first);
#pragma unroll
    for (int k = 0; k < NUMBERS; k++) p.x[k] = p.x[k] * keep - rate * y.x[k];
    if (master) store_quad(master + local, p);
    if (seed) round_stochastically(p, uint32(i), uint32(control->step), seed);
    store_quad(params + i, p);
}
