// Queries and keys, each head normalized, scaled and rotated. Henry et al. 2020,
// https://arxiv.org/abs/2010.04245
//
//     forward   each query and key x becomes y = rotate(scale * x * rstd), rstd = 1 / sqrt(mean(x^2) + eps)
//               scale: of queries; of keys, it is 1                                     qkv = (in place), rstd =
//     backward  with d, the gradient of y, over each head: dx = rstd * (scale * d - y * mean(d * y) / scale), rotated
//               back; a rotation changes no product of d and y, and may be undone last. Attention's
//               backward kernels do
//               it before they store d.
//
// qkv (N,3C): query, key, value; rstd (N,2NH) float32; rope (T,HS/2): see rope.cuh.
//
// Bound by bytes: 4 elements for each of C channels.

#include "rope.cuh"

constexpr int LANES = HS / PACK;  // that share a head
static_assert(LANES * PACK == HS && LANES <= 32 && (LANES & LANES - 1) == 0,
              "a head has 1, 2, 4.. lanes of a warp");

__device__ inline float head_sum(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

// One thread per pack of queries and keys; grid (N*(Q+KV) / PACK / 256).
extern "C" __global__ void qknorm_forward(element* qkv, float* rstd, const float2* rope,
                                          float scale, float eps, int N,
                                          int T) {
    const int64 i = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * PACK;
    const bool exists = i < int64(N) * (Q + KV);
    const int row = i / (Q + KV), c = i % (Q + KV);
    element* const at = qkv + int64(row) * QKV + c;
    Floats x = {};
    if (exists) x = load(at);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < PACK; k++) squares += x.x[k] * x.x[k];
    const float r = 1.0f / sqrtf(head_sum(squares) / HS + eps), factor = c < Q ? r * scale : r;
    if (!exists) return;
    const float2* const angles = rope + int64(row % T) * (HS / 2) + c % HS / 2;
#pragma unroll
    for (int k = 0; k < PACK; k += 2) {
        x.x[k] *= factor, x.x[k + 1] *= factor;
        rotate(x.x[k], x.x[k + 1], angles[k / 2]);
    }
    store(at, x);
    if (c % HS == 0) rstd[int64(row) * (NH + NKV) + c / HS] = r;
}
