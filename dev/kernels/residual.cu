// The addition to the residual stream. RESULTS.md has what each rung measured.
//
//     out = inp1 + inp2                                                                              out =
//
// All N elements; inp1 and out of the residual stream's type. Bound by bytes: two elements read, one written, nothing
// to compute. The best kernel for it is none: the live residual_layernorm_forward of kernels/layernorm.cu adds while it
// normalizes, which saves the layernorm's read of the sum.

#include "common.cuh"

// thread_an_element. The formula: accesses are coalesced, so no byte is fetched in vain. But a thread moves only 2 or 4
// bytes per instruction, and every few elements need a new block. Starting one takes 0.6 ns, whatever it does (the
// column of 32 threads in RESULTS.md): in bfloat16, three quarters of the time with 256 threads.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward_thread_an_element(residual_element* out, const residual_element* inp1, const element* inp2, int64 N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < N) from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
}

// pack_a_thread. 16 bytes per thread and access: an eighth (bfloat16) or a quarter of the threads and instructions for
// the same bytes, and more of them in flight. As fast as PyTorch, and nearly as fast as a copy.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward_pack_a_thread(residual_element* out, const residual_element* inp1, const element* inp2, int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    Floats sum = load(inp1 + i);
    const Floats more = load(inp2 + i);
    for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
    store(out + i, sum);
}

// packs_a_thread. Four packs per thread, all eight loads in flight before the first is needed: a thread waits for
// memory once instead of four times. No gain: in pack_a_thread, the other threads of the multiprocessor hide the wait
// as well. Only with blocks of 32 threads is it faster, by a third: it has a quarter as many of them to start.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward_packs_a_thread(residual_element* out, const residual_element* inp1, const element* inp2, int64 N) {
    const int64 first = (int64(blockIdx.x) * 4 * blockDim.x + threadIdx.x) * PACK, step = blockDim.x * PACK;
    uint4 a[4], b[4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        if (first + p * step >= N) continue;
        a[p] = load_bits(inp1 + first + p * step);
        b[p] = load_bits(inp2 + first + p * step);
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        if (first + p * step >= N) continue;
        Floats sum = unpack_residual(a[p]);
        const Floats more = unpack(b[p]);
        for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
        store(out + first + p * step, sum);
    }
}

// apart: residual_layernorm_forward as two kernels, the best addition (pack_a_thread) and the live layernorm of the
// stored sum. Each is near a copy's speed, but the sum is read from memory once more than in the live rung.
