// Token and position embedding. RESULTS.md has what each rung measured.
//
//     forward   out[b,t] = wte[inp[b,t]] + wpe[t]                                                    out =
//     backward  dwte[token] += the sum of dout over the positions of the token                       dwte +=
//               dwpe[t] = the sum of dout over b, 0 for t >= T                                       dwpe =
//
// out, dout (B,T,C), out of the residual stream's type; inp (B,T) int32; wte (Vp,C), wpe (maxT,C);
// dwte, dwpe float32. Bound by bytes. The live rungs are those of kernels/encoder.cu: forward, one
// warp per row, all of its loads in flight at once; backward, the host sorts the positions by
// token, and a warp adds up one token's rows in that order, with no atomics and the same bits in
// every run.

#include "common.cuh"

// thread_an_element. The formula; reads and writes are coalesced. In bfloat16 a thread moves two
// bytes per access, and a warp 64, where the memory system could move 512 per instruction: half the
// bytes of float32 take nearly the same time.
extern "C" __global__ void __launch_bounds__(1024)
encoder_forward_thread_an_element(residual_element* out, const int* inp, const element* wte,
                                  const element* wpe, int B,
                                  int T) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64(B) * T * C) return;
    const int row = i / C, c = i % C;
    from_float(out[i],
               to_float(wte[int64(inp[row]) * C + c]) + to_float(wpe[int64(row % T) * C + c]));
}

// pack_a_thread. 16 bytes per thread all over the tensor: an eighth (bfloat16) or a quarter of the
// threads and instructions. Each thread looks up its own row, after a division to find out which;
// the live rung has one warp per row, and does both once.
extern "C" __global__ void __launch_bounds__(1024)
encoder_forward_pack_a_thread(residual_element* out, const int* inp, const element* wte,
                              const element* wpe, int B,
                              int T) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(B) * T * C) return;
    const int row = i / C, c = i % C;
    Floats sum = load(wte + int64(inp[row]) * C + c);
    const Floats position = load(wpe + int64(row % T) * C + c);
    for (int k = 0; k < PACK; k++) sum.x[k] += position.x[k];
    store(out + i, sum);
}

// atomics. One thread per element of dout adds it to both tables: one read, and no thread has to
// know who else adds there. The positions of one token collide at the same addresses, and so do the
// B rows of one position. The order of the sums, and with it their last bits, differs from run to
// run. It takes as long as forward's thread_an_element, which has no atomics, and nearly as long in
// bfloat16 as in float32: the cost is in having one thread per element. dwpe must be 0.
extern "C" __global__ void __launch_bounds__(1024)
encoder_backward_atomics(float* dwte, float* dwpe, const element* dout, const int* inp, int B,
                         int T) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64(B) * T * C) return;
    const int row = i / C, c = i % C;
    const float d = to_float(dout[i]);
    atomicAdd(dwte + int64(inp[row]) * C + c, d);
    atomicAdd(dwpe + int64(row % T) * C + c, d);
}
