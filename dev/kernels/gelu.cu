// GELU, its tanh form. RESULTS.md has what each rung measured.
//
//     forward   out = x/2 * (1 + tanh(u)),  u = sqrt(2/pi) * (x + 0.044715 x^3)                       out =
//     backward  dinp = dout * (1/2 * (1 + tanh(u)) + x/2 * (1 - tanh(u)^2) * u')                      dinp =
//
// All N elements. Bound by bytes: forward moves two elements, backward three. The live rungs are
// those of kernels/gelu.cu; the backward one also writes column sums of dinp, the gradient of a
// bias, which would be an extra pass.

#include "common.cuh"

constexpr float SCALE = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float CUBE = 0.044715f;

__device__ inline float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(SCALE * (x + CUBE * x * x * x)));
}

__device__ inline float gelu_slope(float x) {
    const float t = tanhf(SCALE * (x + CUBE * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * SCALE * (1.0f + 3.0f * CUBE * x * x);
}

// thread_an_element. The formula, one thread per element, coalesced. But each instruction moves
// only 2 or 4 bytes per thread: in bfloat16, half the bytes of float32 take nearly as long.
extern "C" __global__ void __launch_bounds__(1024)
gelu_forward_thread_an_element(element* out, const element* inp, int64 N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < N) from_float(out[i], gelu(to_float(inp[i])));
}

// pack_a_thread. 16 bytes per thread: fewer instructions for the same bytes, and more bytes in
// flight.
extern "C" __global__ void __launch_bounds__(1024)
gelu_forward_pack_a_thread(element* out, const element* inp, int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    Floats x = load(inp + i);
    for (int k = 0; k < PACK; k++) x.x[k] = gelu(x.x[k]);
    store(out + i, x);
}

// sigmoid. (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)): an exp and a division, where tanhf branches for
// small and large arguments. In bfloat16, with eight per thread, the arithmetic shows: it is a
// little faster. In float32, only bytes count.
extern "C" __global__ void __launch_bounds__(1024) gelu_forward_sigmoid(element* out, const element* inp, int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    Floats x = load(inp + i);
    for (int k = 0; k < PACK; k++) {
        const float u = SCALE * (x.x[k] + CUBE * x.x[k] * x.x[k] * x.x[k]);
        // exp may be infinite: then the result is 0, as it should be
        x.x[k] /= 1.0f + expf(-2.0f * u);
    }
    store(out + i, x);
}

// pack_a_thread. 16 bytes per thread; an element per thread is as slow as in forward. The slope
// costs one tanhf, hidden by the three accesses: the speed of a copy. It takes less time than the
// live rung, which also writes the column sums.
extern "C" __global__ void __launch_bounds__(1024)
gelu_backward_pack_a_thread(element* dinp, const element* inp, const element* dout, int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    const Floats x = load(inp + i);
    Floats d = load(dout + i);
    for (int k = 0; k < PACK; k++) d.x[k] *= gelu_slope(x.x[k]);
    store(dinp + i, d);
}
