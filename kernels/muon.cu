// Muon's passes over a stack of matrices, between the matmuls of its Newton-Schulz steps, which cuBLASLt does.
//
//     muon_momentum   m += (1 - momentum) * (g - m);  x = (1 - momentum) * g + momentum * m
//                     partials[matrix] = sums of x^2                                       m =, x =, partials =
//     muon_normalize  x /= (its norm + 1e-7)                                               x = (in place)
//     muon_polynomial out = a * 1 + b * square + c * fourth, of square matrices            out =
//     muon_update     params = params * (1 - learning_rate * decay) - learning_rate * scale * x
//                                                                                          params =, master =
//
// https://kellerjordan.github.io/posts/muon/. Matrices lie one after the other, `size` elements each, in params, master,
// m, sums and gradients, which are at the stack's first. Bound by bytes.

#include "update.cuh"

// A thread's numbers: grid (blocks of a matrix, matrices), which go over the matrix together.
struct Numbers {
    int64 begin;  // of the matrix, in the stack
    int first, step;
    __device__ Numbers(int size)
        : begin(int64(blockIdx.y) * size), first((blockIdx.x * THREADS + threadIdx.x) * NUMBERS),
          step(gridDim.x * THREADS * NUMBERS) {}
};

// partials (matrices, gridDim.x). sums: of earlier micro-batches, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
muon_momentum(float* m, element* x, float* partials, const float* sums, const gradient* gradients,
              const Control* control, float momentum, int size) {
    const Numbers of(size);
    float squares = 0.0f;
    if (control->halted || control->skipped) return;
    for (int i = of.first; i < size; i += of.step) {
        Quad g = load_quad(gradients + of.begin + i), mean = load_quad(m + of.begin + i), sum = {};
        if (sums) sum = load_quad(sums + of.begin + i);
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) {
            const float gradient = (sum.x[k] + g.x[k]) * control->grad_scale;
            mean.x[k] += (1.0f - momentum) * (gradient - mean.x[k]);
            g.x[k] = (1.0f - momentum) * gradient + momentum * mean.x[k];  // Nesterov's: the gradient once more
            squares += g.x[k] * g.x[k];
        }
        store_quad(m + of.begin + i, mean);
        store_quad(x + of.begin + i, g);
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) partials[blockIdx.y * gridDim.x + blockIdx.x] = squares;
}

// Grid as muon_momentum's.
extern "C" __global__ void __launch_bounds__(THREADS) muon_normalize(element* x, const float* partials, int size) {
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

// out, square, fourth (matrices, side, side); grid (blocks of a matrix, matrices).
extern "C" __global__ void __launch_bounds__(THREADS)
muon_polynomial(element* out, const element* square, const element* fourth, float a, float b, float c, int side) {
    const Numbers of(side * side);
    for (int i = of.first; i < side * side; i += of.step) {
        const Quad two = load_quad(square + of.begin + i), four = load_quad(fourth + of.begin + i);
        Quad y;
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) {
            y.x[k] = b * two.x[k] + c * four.x[k] + ((i + k) % side == (i + k) / side ? a : 0.0f);
        }
        store_quad(out + of.begin + i, y);
    }
}

// master: the float32 weights of which params are a rounded copy, or null; first: number of params' first element, for
// stochastic rounding with a seed.
extern "C" __global__ void __launch_bounds__(THREADS)
muon_update(element* params, float* master, const element* x, const Control* control, float scale, float decay,
            int64 first, int seed, int size) {
    const Numbers of(size);
    if (control->halted || control->skipped) return;
    const float keep = 1.0f - control->learning_rate * decay, rate = control->learning_rate * scale;
    for (int i = of.first; i < size; i += of.step) {
        const int64 at = of.begin + i;
        Quad p = master ? load_quad(master + at) : load_quad(params + at);
        const Quad y = load_quad(x + at);
#pragma unroll
        for (int k = 0; k < NUMBERS; k++) p.x[k] = p.x[k] * keep - rate * y.x[k];
        if (master) store_quad(master + at, p);
        if (seed) round_stochastically(p, uint32(first + at), uint32(control->step), seed);
        store_quad(params + at, p);
    }
}
