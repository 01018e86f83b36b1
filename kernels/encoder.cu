// Token and position embedding.
//
//     forward   out[b,t] = wte[inp[b,t]] + wpe[t]                                                    out =
//     backward  dwte[token] += the sum of dout over the places of the token                          dwte +=
//               dwpe[t] = the sum of dout over b, 0 for t >= T                                       dwpe = (or += if accumulate)
//
// out, dout (B,T,C), out of the residual stream's type; inp (B,T) int32; wte, dwte (Vp,C); wpe, dwpe (maxT,C).
//
// Bound by bytes: B*T*C elements read and written. H200 (a copy: 4250 GB/s), T=1024: float32, B=4 / B=16, wte 1740 / 2310 GB/s, wpe
// 2660 / 3020; 6 to 17 us at B=4, where launching counts; bfloat16, B=64, in a step, forward 2980 (by itself 3710), wte 2690, wpe 3020,
// 0.18 ms together. The gradient of wte is a sum over rows that the tokens choose. Atomic additions would make it differ from run to run;
// instead, the host sorts the places by token while the GPU works on the step before, and a block adds up one token's rows in that order.

#include "common.cuh"

// A block a row, which is looked up once and not for every pack. Block (64); grid (B*T).
extern "C" __global__ void encoder_forward(stream_element* out, const int* inp, const element* wte, const element* wpe, int T) {
    const int row = blockIdx.x;
    const element* token = wte + int64(inp[row]) * C;
    const element* position = wpe + int64(row % T) * C;
    for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
        Floats sum = load(token + c);
        const Floats more = load(position + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
        store(out + int64(row) * C + c, sum);
    }
}

// order (B*T): the places b*T+t, sorted by token, earlier ones first. first (runs + 1): where each token's run starts in it.
// A block adds up one run, a thread PACK channels; grid (B*T), of which only `runs` have work; block (C / PACK, at most 1024).
extern "C" __global__ void encoder_backward_wte(gradient* dwte, const element* dout, const int* inp, const int* order, const int* first,
                                                const int* runs) {
    const int run = blockIdx.x;
    if (run >= *runs) return;
    const int begin = first[run], end = first[run + 1];
    gradient* out = dwte + int64(inp[order[begin]]) * C;
    for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
        Floats sum = {};
#pragma unroll 8
        for (int i = begin; i < end; i++) {
            const Floats row = load(dout + int64(order[i]) * C + c);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum.x[k] += row.x[k];
        }
        const Floats before = load(out + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum.x[k] += before.x[k];
        store(out + c, sum);
    }
}

// One thread a pack of dwpe; grid (maxT*C / PACK / 256).
extern "C" __global__ void encoder_backward_wpe(gradient* dwpe, const element* dout, int accumulate, int B, int T, int maxT) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(maxT) * C) return;
    const int t = i / C;
    Floats sum = {};
    if (accumulate) sum = load(dwpe + i);
    if (t < T) {
#pragma unroll 4
        for (int b = 0; b < B; b++) {
            const Floats row = load(dout + int64(b) * T * C + i);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum.x[k] += row.x[k];
        }
    }
    store(dwpe + i, sum);
}
