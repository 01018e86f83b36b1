// Queries and keys, each head normalized, scaled and rotated. Henry et al. 2020, https://arxiv.org/abs/2010.04245
//
//     forward   each query and key x becomes rotate(scale * x * rstd), rstd = 1 / sqrt(mean(x^2) + eps)
//               scale: of queries; of keys, it is 1                                     qkv = (in place), rstd =
//     backward  with y, that result, and d, its gradient, over each head: dx = rstd * (scale * d - y * mean(d * y) /
//               scale), rotated back
//               partials[block] = the column sums of dx, values included                dx = (or dqkv), partials =
//
// qkv, dqkv (N,3C): query, key, value; rstd (N,2NH) float32; rope (T,HS/2): see rope.cuh. A rotation changes no product
// of d and y, and may be undone last. The column sums are the gradient of the bias that was added to make qkv.
//
// Bound by bytes: forward moves 4 elements for each of C channels, backward 7 in place.

#include "rope.cuh"
#if QKNORM_FP8
#include "fp8.cuh"
#endif

constexpr int LANES = HS / PACK;  // that share a head
static_assert(LANES * PACK == HS && LANES <= 32 && (LANES & LANES - 1) == 0, "a head has 1, 2, 4.. lanes of a warp");

__device__ inline float head_sum(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

// One thread per pack of queries and keys; grid (N*(Q+KV) / PACK / 256).
extern "C" __global__ void qknorm_forward(element* qkv, float* rstd, const float2* rope, float scale, float eps, int N,
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
        const float2 pair = rotated(x.x[k] * factor, x.x[k + 1] * factor, angles[k / 2]);
        x.x[k] = pair.x, x.x[k + 1] = pair.y;
    }
    store(at, x);
    if (c % HS == 0) rstd[int64(row) * (NH + NKV) + c / HS] = r;
}

// store_pack(its number in dqkv, its column, dx) for each pack, by all lanes of a warp at once.
template <class Store>
__device__ inline void backward(float* partials, const element* dqkv, const element* qkv, const float* rstd,
                                const float2* rope, float scale, int N, int T, const Store& store_pack) {
    const auto [c, begin, end] = BlockRows(N);
    const float s = c < Q ? scale : 1.0f;
    Floats sum = {};
    for (int row = begin + threadIdx.y; row < end; row += ROW_GROUPS) {
        const int64 i = int64(row) * QKV + c;
        Floats d = {}, y = {};
        if (c < QKV) d = load(dqkv + i);
        if (c < Q + KV) y = load(qkv + i);
        float products = 0.0f;
#pragma unroll
        for (int k = 0; k < PACK; k++) products += d.x[k] * y.x[k];
        const float mean = head_sum(products) / HS / s;  // by all lanes of the warp
        if (c < Q + KV) {
            const float r = rstd[int64(row) * (NH + NKV) + c / HS];
            const float2* const angles = rope + int64(row % T) * (HS / 2) + c % HS / 2;
#pragma unroll
            for (int k = 0; k < PACK; k += 2) {
                const float2 pair = rotated_back(r * (s * d.x[k] - y.x[k] * mean),
                                                 r * (s * d.x[k + 1] - y.x[k + 1] * mean), angles[k / 2]);
                d.x[k] = pair.x, d.x[k + 1] = pair.y;
            }
        }
        store_pack(i, c, d);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum.x[k] += d.x[k];
    }
    store_column_sums(partials, sum, c < QKV, QKV, [c = c](int k) { return c + k; });
}

// Block and grid: see BlockRows; partials (gridDim.y, QKV) float32. dx (N,QKV) may be dqkv itself, whose values stay.
extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS)
qknorm_backward(element* dx, float* partials, const element* dqkv, const element* qkv, const float* rstd,
                const float2* rope, float scale, int N, int T) {
    backward(partials, dqkv, qkv, rstd, rope, scale, N, T, [&](int64 i, int c, const Floats& d) {
        if (c < Q + KV || dx != dqkv && c < QKV) store(dx + i, d);
    });
}

#if QKNORM_FP8
// dx in 8 bits; fp8_scale .. counts: see fp8.cu.
extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS)
qknorm_backward_fp8(unsigned char* dx, const float* fp8_scale, int* largest, int64* counts, float* partials,
                    const element* dqkv, const element* qkv, const float* rstd, const float2* rope, float scale, int N,
                    int T) {
    const float to_bytes = *fp8_scale;
    AmaxStats stats(to_bytes);
    backward(partials, dqkv, qkv, rstd, rope, scale, N, T, [&](int64 i, int c, const Floats& d) {
        const uint32 lanes = __ballot_sync(0xffffffff, c < QKV);
        if (c >= QKV) return;
        Floats x;
#pragma unroll
        for (int k = 0; k < PACK; k++) x.x[k] = d.x[k] * to_bytes;
        const uint32 bytes[2] = {four_bytes(x.x[0], x.x[1], x.x[2], x.x[3]),
                                 four_bytes(x.x[4], x.x[5], x.x[6], x.x[7])};
        stats.add(d.x, bytes);
        *reinterpret_cast<uint2*>(dx + i) = in_order({bytes[0], bytes[1]}, lanes);
    });
    stats.publish(largest, counts);
}
#endif
