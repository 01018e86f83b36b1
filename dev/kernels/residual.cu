// The addition to the residual stream, and the layernorm after it. RESULTS.md has what each rung measured.
//
//     residual = inp1 + inp2;  out = the layernorm of residual                  residual =, out =, mean =, rstd =
//
// N elements; inp1 and residual of the residual stream's type. Bound by bytes: two elements read, two written, next to
// nothing to compute.

#include "common.cuh"

// apart. Two kernels, this addition, 16 bytes per thread, and the live layernorm of the stored sum. Each is near a
// copy's speed, but the sum is read from memory once more than in the live rung: residual_layernorm_forward of
// kernels/layernorm.cu adds while it normalizes.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward(residual_element* out, const residual_element* inp1, const element* inp2, int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    Floats sum = load(inp1 + i);
    const Floats more = load(inp2 + i);
    for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
    store(out + i, sum);
}
