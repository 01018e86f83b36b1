// Token and position embedding. What each version measured: RESULTS.md.
//
//     forward   out[b,t] = wte[inp[b,t]] + wpe[t]                                                    out =
//     backward  dwte[token] += the sum of dout over the places of the token                          dwte +=
//               dwpe[t] = the sum of dout over b, 0 for t >= T                                       dwpe =
//
// out, dout (B,T,C), out of the residual stream's type; inp (B,T) int32; wte (Vp,C), wpe (maxT,C); dwte, dwpe float32. Bound by bytes.
// The live versions are those of kernels/encoder.cu: forward, 16 bytes a thread all over the tensor; backward, the host sorts the places by
// token, and a block adds up one token's rows in that order, with no atomics and the same bits in every run.

#include "common.cuh"

// thread_an_element. The formula; neighbouring threads read and write neighbouring elements. In bfloat16 each access moves two bytes,
// and a warp 64, where the memory system would take 512 for the same instruction.
extern "C" __global__ void __launch_bounds__(1024)
encoder_forward_thread_an_element(stream_element* out, const int* inp, const element* wte, const element* wpe, int B, int T) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64(B) * T * C) return;
    const int row = i / C, c = i % C;
    from_float(out[i], to_float(wte[int64(inp[row]) * C + c]) + to_float(wpe[int64(row % T) * C + c]));
}

// block_a_row. 16 bytes a thread, and a block for each place: what depends on the row is worked out once and not for every element.
// A small C leaves many threads of a large block idle. Grid (B*T).
extern "C" __global__ void __launch_bounds__(1024)
encoder_forward_block_a_row(stream_element* out, const int* inp, const element* wte, const element* wpe, int T) {
    const int row = blockIdx.x;
    const element* token = wte + int64(inp[row]) * C;
    const element* position = wpe + int64(row % T) * C;
    for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
        Floats sum = load(token + c);
        const Floats more = load(position + c);
        for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
        store(out + int64(row) * C + c, sum);
    }
}

// atomics. A thread an element of dout, which adds it to both tables. The places of one token meet at the same addresses, and so do the
// B rows of one position. The sums' order, and with it their last bits, differ from run to run. dwpe must be 0.
extern "C" __global__ void __launch_bounds__(1024)
encoder_backward_atomics(float* dwte, float* dwpe, const element* dout, const int* inp, int B, int T) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64(B) * T * C) return;
    const int row = i / C, c = i % C;
    const float d = to_float(dout[i]);
    atomicAdd(dwte + int64(inp[row]) * C + c, d);
    atomicAdd(dwpe + int64(row % T) * C + c, d);
}

// wpe_apart. Positions need no atomics: who adds to which row is known, so a thread adds up one element over the batch, which is the live
// encoder_backward_wpe. What is left for atomics are the tokens.
extern "C" __global__ void __launch_bounds__(1024)
encoder_backward_wte_atomics(float* dwte, const element* dout, const int* inp, int N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < int64(N) * C) atomicAdd(dwte + int64(inp[i / C]) * C + i % C, to_float(dout[i]));
}
