// Rotary position embedding. Su et al. 2021, https://arxiv.org/abs/2104.09864
//
//     forward   each pair of neighbours (a, b) of a query or key at position t becomes
//               (a cos - b sin, a sin + b cos), of the pair's angle at t                     qkv = (in place)
//
// qkv (N,QKV), N = B*T; rope (T,HS/2) has (cos, sin). Backward is no kernel of its own: attention's
// gradient rotates back what it stores. Nor is forward on Hopper, where the matmul before it
// rotates (hopper/matmul_swiglu.cu).
//
// Bound by bytes: moves 2 elements for each of Q + KV channels.

#include "rope.cuh"

static_assert(HS % PACK == 0, "a thread's pack is of one head");

// One thread per pack of queries and keys; grid (N*(Q+KV) / PACK / 256).
extern "C" __global__ void rope_forward(element* qkv, const float2* rope, int N, int T) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    if (i >= int64(N) * (Q + KV)) return;
    const int row = i / (Q + KV), c = i % (Q + KV);
    const float2* const angles = rope + int64(row % T) * (HS / 2) + c % HS / 2;
    element* const at = qkv + int64(row) * QKV + c;
    Floats x = load(at);
#pragma unroll
    for (int k = 0; k < PACK; k += 2) rotate(x.x[k], x.x[k + 1], angles[k / 2]);
    store(at, x);
}
