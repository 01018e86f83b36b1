// The embedding, and the layernorm where there are too many rows for each block of a matmul.
// Latency bounds both.

#include "decode/layernorm.cuh"

// Block (THREADS); grid (N). residual (N,C) = wte[tokens] + wpe or, with a weight, its RMSNorm;
// branches (FC_PARTS,N,C) = 0, for the first layernorm.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_embed(float* residual, float* branches, const int* tokens, const element* wte,
             const element* wpe, const element* weight, const Control* control, int T) {
    let_next_begin();
    wait_for_inputs();
    const int n = blockIdx.x;
    const element* const token = wte + int64(tokens[n]) * C;
    const element* const position = ROPE ? nullptr : wpe + int64(control->position + n % T) * C;
    Floats x[PACKS];
    float squares = 0.0f, rstd = 1.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = channel_of(p);
        if (c >= C) continue;
        x[p] = load(token + c);
        const Floats y = ROPE ? Floats{} : load(position + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) x[p].x[k] += y.x[k], squares += x[p].x[k] * x[p].x[k];
    }
    if (weight) rstd = 1.0f / sqrtf(sum_over_block(squares, 0) / C + float(DECODE_EPS));
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int c = channel_of(p);
        if (c >= C) continue;
        const Floats gain = weight ? load(weight + c) : Floats{};
#pragma unroll
        for (int k = 0; k < PACK && weight; k++) x[p].x[k] *= rstd * gain.x[k];
        store(residual + int64(n) * C + c, x[p]);
        for (int part = 0; part < FC_PARTS; part++)
            store(branches + (int64(part) * gridDim.x + n) * C + c, Floats{});
    }
}

// Block (THREADS); grid (N). count: of the parts of branches, ATT_PARTS or FC_PARTS.
extern "C" __global__ void __launch_bounds__(THREADS)
decode_layernorm(element* normed, float* residual, const float* inp, const float* branches,
                 const element* branch_bias, const element* weight, const element* bias,
                 int count) {
    let_next_begin();
    const Vectors vectors(branch_bias, weight, bias);
    normed += int64(blockIdx.x) * C;
    wait_for_inputs();
    const Residual sum = {residual, inp, branches};
    if (count == ATT_PARTS) normalize<ATT_PARTS>(normed, sum, vectors, blockIdx.x, gridDim.x, true);
    else normalize<FC_PARTS>(normed, sum, vectors, blockIdx.x, gridDim.x, true);
}
