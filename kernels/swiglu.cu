// SwiGLU (swiglu.cuh has the formulas).
//
//     forward   out = SwiGLU(up, gate)                                                     out =
//     backward  dup, dgate, from dout                                                      dinp =
//               out = the forward value, recomputed unless `out` is null                   out =
//
// inp, dinp (N,2F): up, then gate; out, dout (N,F).
//
// Bound by bytes: forward moves 3 elements for each of out, backward 5 (6 with `out`). On Hopper,
// matmuls do both passes in their epilogues: hopper/matmul_swiglu.cu.

#include "swiglu.cuh"

// For both kernels: one thread per pack of out; grid (N*F / PACK / 256).
struct Place {
    int64 i, up;  // the pack's index in out, and that of its up's in inp
    __device__ Place() : i((int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK),
        up(i / F * 2 * F + i % F) {}
};

extern "C" __global__ void swiglu_forward(element* out, const element* inp, int N) {
    const Place at;
    if (at.i >= int64(N) * F) return;
    const Floats up = load(inp + at.up), gate = load(inp + at.up + F);
    Floats y;
#pragma unroll
    for (int k = 0; k < PACK; k++) y.x[k] = swiglu(up.x[k], gate.x[k]);
    store(out + at.i, y);
}

extern "C" __global__ void swiglu_backward(element* dinp, element* out, const element* inp,
                                           const element* dout,
                                           int N) {
    const Place at;
    if (at.i >= int64(N) * F) return;
    const Floats up = load(inp + at.up), gate = load(inp + at.up + F), d = load(dout + at.i);
    Floats dup, dgate, y;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
        const float s = sigmoid(gate.x[k]);
        const float2 gradient = swiglu_gradient(d.x[k], up.x[k], gate.x[k], s);
        dup.x[k] = gradient.x, dgate.x[k] = gradient.y;
        y.x[k] = swiglu(up.x[k], gate.x[k], s);
    }
    store(dinp + at.up, dup);
    store(dinp + at.up + F, dgate);
    if (out) store(out + at.i, y);
}
