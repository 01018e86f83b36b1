// The addition to the residual stream. What each version measured: RESULTS.md.
//
//     out = inp1 + inp2                                                                              out =
//
// All N elements; inp1 and out of the residual stream's type. Bound by bytes: two in, one out, nothing to compute. The best kernel for it
// is none: the live residual_layernorm_forward of kernels/layernorm.cu adds while it normalizes, and saves the layernorm's reading of the
// sum.

#include "common.cuh"

// thread_an_element.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward_thread_an_element(stream_element* out, const stream_element* inp1, const element* inp2, int64 N) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < N) from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
}

// pack_a_thread. 16 bytes a thread.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward_pack_a_thread(stream_element* out, const stream_element* inp1, const element* inp2, int64 N) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= N) return;
    Floats sum = load(inp1 + i);
    const Floats more = load(inp2 + i);
    for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
    store(out + i, sum);
}

// packs_a_thread. Four packs a thread, all eight loads underway before the first is needed: a thread waits for memory once instead of
// four times, where the number of threads on a multiprocessor alone does not hide the wait.
extern "C" __global__ void __launch_bounds__(1024)
residual_forward_packs_a_thread(stream_element* out, const stream_element* inp1, const element* inp2, int64 N) {
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
        Floats sum = unpack_stream(a[p]);
        const Floats more = unpack(b[p]);
        for (int k = 0; k < PACK; k++) sum.x[k] += more.x[k];
        store(out + first + p * step, sum);
    }
}
