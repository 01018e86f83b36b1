// Causal attention, forward and backward, from one thread per row to the tensor cores. RESULTS.md
// has what each rung measured.
//
//     forward   S = query @ key^T / sqrt(HS), only keys up to the query;  lse = log(sum over keys of exp(S))
//               P = exp(S - lse);  out = P @ value                                             out =, lse =
//     backward  D = sum over HS of dout * out;  dP = dout @ value^T;  dS = P * (dP - D) / sqrt(HS)
//               dquery = dS @ key;  dkey = dS^T @ query;  dvalue = P^T @ dout                  dinp =, D =
//
// inp, dinp (B,T,3C): query, key, value side by side, each NH heads of HS. out, dout (B,T,C). lse,
// D (B,NH,T) float32. lse is all that the backward pass needs of the softmax; D is the row sum of P
// * dP, which the derivative of softmax needs.
//
// Bound by operations: two matmuls forward, five backward, of 2 * HS operations for each of the T *
// (T + 1) / 2 pairs of a head, while the tensors are read and written once. Two rungs are live:
// mma_sync, in kernels/attention.cu, and wgmma, in kernels/hopper/attention.cu, where four warps
// multiply together and their tiles stay in shared memory. attention_hopper.cu in this folder is
// the step from one to the other.

#include "mma.cuh"

__device__ inline float scale() { return 1.0f / sqrtf(float(HS)); }  // a constant to the compiler

// Row t of one head's queries (part 0), keys (1) or values (2) in inp or dinp (B,T,3C). The row
// stride is 3 * C.
template <class E>
__device__ inline E* head_in(E* inp, int part, int b, int h, int T, int t = 0) {
    return inp + ((int64(b) * T + t) * 3 + part) * C + h * HS;
}

// The same in out or dout (B,T,C).
template <class E>
__device__ inline E* head_out(E* out, int b, int h, int T, int t = 0) {
    return out + (int64(b) * T + t) * C + h * HS;
}

// A thread's part of a row of HS numbers that LANES neighboring threads share: fours lane, lane +
// LANES, ...
template <int LANES>
struct Part {
    static_assert(HS % (4 * LANES) == 0, "threads share a row in units of four floats");
    float4 x[HS / 4 / LANES];
};

template <int LANES>
__device__ inline Part<LANES> load_part(const element* row, float factor) {
    Part<LANES> part;
#pragma unroll
    for (int u = 0; u < HS / 4 / LANES; u++) {
        const element* from = row + (LANES * u + threadIdx.x % LANES) * 4;
        part.x[u] = {to_float(from[0]) * factor, to_float(from[1]) * factor,
                     to_float(from[2]) * factor,
                     to_float(from[3]) * factor};
    }
    return part;
}

template <int LANES>
__device__ inline void store_part(element* row, const Part<LANES>& part, float divisor) {
#pragma unroll
    for (int u = 0; u < HS / 4 / LANES; u++) {
        element* to = row + (LANES * u + threadIdx.x % LANES) * 4;
        from_float(to[0], part.x[u].x / divisor);
        from_float(to[1], part.x[u].y / divisor);
        from_float(to[2], part.x[u].z / divisor);
        from_float(to[3], part.x[u].w / divisor);
    }
}

// The dot product of a shared row and a row in shared memory; all LANES threads get it.
template <int LANES>
__device__ inline float dot(const Part<LANES>& part, const float4* row) {
    float4 s = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int u = 0; u < HS / 4 / LANES; u++) {
        const float4 a = part.x[u], b = row[LANES * u + threadIdx.x % LANES];
        s = {s.x + a.x * b.x, s.y + a.y * b.y, s.z + a.z * b.z, s.w + a.w * b.w};
    }
    const float sum = s.x + s.y + (s.z + s.w);
    return LANES == 4 ? quad_sum(sum) : sum;
}

// sums += factor * row
template <int LANES>
__device__ inline void add(Part<LANES>& sums, float factor, const float4* row) {
#pragma unroll
    for (int u = 0; u < HS / 4 / LANES; u++) {
        const float4 s = sums.x[u], b = row[LANES * u + threadIdx.x % LANES];
        sums.x[u] = {s.x + factor * b.x, s.y + factor * b.y, s.z + factor * b.z,
                     s.w + factor * b.w};
    }
}

constexpr int TILE = 32;  // rows that pass through shared memory at once

// Load rows first .. first + TILE - 1 of a head to shared memory; past the end of the sequence, its
// last row again, which is not used.
__device__ inline void load_rows(float4 (*tile)[HS / 4], const element* head, int row_stride,
                                 int first, int T) {
    for (int i = threadIdx.x; i < TILE * HS / PACK; i += blockDim.x) {
        const int r = i / (HS / PACK), c = i % (HS / PACK) * PACK;
        store(reinterpret_cast<float*>(tile[r]) + c,
              load(head + int64(min(first + r, T - 1)) * row_stride + c));
    }
}

// -------------------------------------------------------------------------------------------------
// forward

// thread_a_row. The formula, one thread per query: one loop over the keys for the maximum score, a
// second one for the sums, which recomputes the scores. Nothing is tiled: every product reads both
// its numbers from memory or the cache. Block (any size up to 256), grid (T / block, NH, B).
extern "C" __global__ void __launch_bounds__(256)
attention_forward_thread_a_row(element* out, float* lse, const element* inp, int T) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
    if (t >= T) return;
    const element* query = head_in(inp, 0, b, h, T, t);
    const auto score = [&](int k) {
        const element* key = head_in(inp, 1, b, h, T, k);
        float sum = 0.0f;
        for (int c = 0; c < HS; c++) sum += to_float(query[c]) * to_float(key[c]);
        return sum * scale();
    };
    float largest = -INFINITE;
    for (int k = 0; k <= t; k++) largest = fmaxf(largest, score(k));

    float total = 0.0f, sums[HS] = {};
    for (int k = 0; k <= t; k++) {
        const element* value = head_in(inp, 2, b, h, T, k);
        const float p = expf(score(k) - largest);
        total += p;
#pragma unroll
        for (int c = 0; c < HS; c++) sums[c] += p * to_float(value[c]);
    }
    element* result = head_out(out, b, h, T, t);
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(result[c], sums[c] / total);
    lse[(int64(b) * NH + h) * T + t] = largest + logf(total);
}

// online. One loop over the keys, and no (T,T) matrix: when a larger score turns up, the sums so
// far are scaled down
// (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). A thread keeps its query and its
// sums in registers; keys and values pass through shared memory, in tiles that all rows of the
// block share. Tiles of keys after the last query are skipped. The limit is now the CUDA cores: one
// multiply-add per thread and cycle. No faster in bfloat16 than in float32, since all arithmetic is
// float32. Block (any size up to 256), grid (T / block, NH, B).
extern "C" __global__ void __launch_bounds__(256)
attention_forward_online(element* out, float* lse, const element* inp, int T) {
    __shared__ float4 keys[TILE][HS / 4], values[TILE][HS / 4];
    const int t = blockIdx.x * blockDim.x + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int last = min(T, int(blockIdx.x + 1) * int(blockDim.x)) - 1;  // the block's last query
    const Part<1> query = load_part<1>(head_in(inp, 0, b, h, T, min(t, last)), scale());
    Part<1> sums = {};
    float largest = -INFINITE, total = 0.0f;
    for (int first = 0; first <= last; first += TILE) {
        __syncthreads();  // all have read the previous tile
        load_rows(keys, head_in(inp, 1, b, h, T), 3 * C, first, T);
        load_rows(values, head_in(inp, 2, b, h, T), 3 * C, first, T);
        __syncthreads();
        // keys of this tile that this query may see
        const int count = t > last ? 0 : min(TILE, t - first + 1);
        for (int k = 0; k < count; k++) {
            const float score = dot(query, keys[k]);
            if (score > largest) {  // rare, once some keys have been seen
                const float factor = expf(largest - score);
                total *= factor;
#pragma unroll
                for (float4& x : sums.x)
                    x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
                largest = score;
            }
            const float p = expf(score - largest);
            total += p;
            add(sums, p, values[k]);
        }
    }
    if (t > last) return;
    store_part(head_out(out, b, h, T, t), sums, total);
    lse[(int64(b) * NH + h) * T + t] = largest + logf(total);
}

// -------------------------------------------------------------------------------------------------
// backward

// For all rungs but the live ones: D, one warp per row of a head. Block (256), grid (B * NH * T /
// 8).
extern "C" __global__ void __launch_bounds__(256)
attention_backward_row_sums(float* D, const element* dout, const element* out, int rows, int T) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const int t = row % T, h = row / T % NH, b = row / T / NH;
    const element *d = head_out(dout, b, h, T, t), *o = head_out(out, b, h, T, t);
    float sum = 0.0f;
    for (int c = lane; c < HS; c += 32) sum += to_float(d[c]) * to_float(o[c]);
    sum = warp_sum(sum);
    if (lane == 0) D[row] = sum;
}

// thread_a_row. The formulas, in two loops: one thread per query goes over the keys that it sees
// and sums dquery, then one thread per key goes over the queries that see it and sums dkey and
// dvalue. P and dS of a pair are computed in both, so there are seven matmuls instead of five, but
// none of the masked half, and no (T,T) matrix. Nothing is in shared memory: every product reads
// both its numbers from memory or the cache, and neighboring threads read rows 3C apart.
// Both: block (any size up to 256), grid (T / block, NH, B).
__device__ inline float row_product(const element* a, const element* b) {
    float sum = 0.0f;
// fully unrolled, the compiler would keep the thread's own rows in registers, where the sums leave
// no room
#pragma unroll 8
    for (int c = 0; c < HS; c++) sum += to_float(a[c]) * to_float(b[c]);
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
attention_backward_dquery_thread_a_row(element* dinp, const element* dout, const element* inp,
                                       const float* lse,
                                       const float* D, int T) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
    if (t >= T) return;
    const int64 row = (int64(b) * NH + h) * T + t;
    const element *query = head_in(inp, 0, b, h, T, t), *d = head_out(dout, b, h, T, t);
    float dquery[HS] = {};
    for (int k = 0; k <= t; k++) {
        const element *key = head_in(inp, 1, b, h, T, k), *value = head_in(inp, 2, b, h, T, k);
        const float p = expf(row_product(query, key) * scale() - lse[row]);
        const float ds = p * (row_product(d, value) - D[row]) * scale();
#pragma unroll
        for (int c = 0; c < HS; c++) dquery[c] += ds * to_float(key[c]);
    }
    element* result = head_in(dinp, 0, b, h, T, t);
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(result[c], dquery[c]);
}

extern "C" __global__ void __launch_bounds__(256)
attention_backward_dkv_thread_a_row(element* dinp, const element* dout, const element* inp,
                                    const float* lse,
                                    const float* D, int T) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x, h = blockIdx.y, b = blockIdx.z;
    if (k >= T) return;
    const int64 head = (int64(b) * NH + h) * T;
    const element *key = head_in(inp, 1, b, h, T, k), *value = head_in(inp, 2, b, h, T, k);
    float dkey[HS] = {}, dvalue[HS] = {};
    for (int t = k; t < T; t++) {
        const element *query = head_in(inp, 0, b, h, T, t), *d = head_out(dout, b, h, T, t);
        const float p = expf(row_product(query, key) * scale() - lse[head + t]);
        const float ds = p * (row_product(d, value) - D[head + t]) * scale();
#pragma unroll
        for (int c = 0; c < HS; c++) {
            dkey[c] += ds * to_float(query[c]);
            dvalue[c] += p * to_float(d[c]);
        }
    }
    element *to_dkey = head_in(dinp, 1, b, h, T, k), *to_dvalue = head_in(dinp, 2, b, h, T, k);
#pragma unroll
    for (int c = 0; c < HS; c++) {
        from_float(to_dkey[c], dkey[c]);
        from_float(to_dvalue[c], dvalue[c]);
    }
}

// recompute. The same two loops, but a thread keeps its own rows in registers, and the other
// operand passes through shared memory, in tiles that all rows of the block share. Four neighboring
// threads share a row, since four rows of HS do not fit into the registers of one.
// Both: block (any multiple of 32 up to 256), grid (T / (block / 4), NH, B).

extern "C" __global__ void __launch_bounds__(256)
attention_backward_dquery_recompute(element* dinp, const element* dout, const element* inp,
                                    const float* lse,
                                    const float* D, int T) {
    __shared__ float4 keys[TILE][HS / 4], values[TILE][HS / 4];
    const int rows = blockDim.x / 4, t = blockIdx.x * rows + threadIdx.x / 4, h = blockIdx.y,
        b = blockIdx.z;
    // threads beyond the last query repeat its work
    const int last = min(T, int(blockIdx.x + 1) * rows) - 1, mine = min(t, last);
    const int64 row = (int64(b) * NH + h) * T + mine;
    const Part<4> query = load_part<4>(head_in(inp, 0, b, h, T, mine), 1.0f);
    const Part<4> d = load_part<4>(head_out(dout, b, h, T, mine), 1.0f);
    const float row_lse = lse[row], row_D = D[row];
    Part<4> dquery = {};
    for (int first = 0; first <= last; first += TILE) {
        __syncthreads();
        load_rows(keys, head_in(inp, 1, b, h, T), 3 * C, first, T);
        load_rows(values, head_in(inp, 2, b, h, T), 3 * C, first, T);
        __syncthreads();
        // the same for all threads, because of the sums over four
        const int count = min(TILE, last - first + 1);
        for (int k = 0; k < count; k++) {
            const float s = dot(query, keys[k]) * scale(), dp = dot(d, values[k]);
            const float p = first + k <= mine ? expf(s - row_lse) : 0.0f;
            add(dquery, p * (dp - row_D) * scale(), keys[k]);
        }
    }
    if (t <= last) store_part(head_in(dinp, 0, b, h, T, t), dquery, 1.0f);
}

extern "C" __global__ void __launch_bounds__(256)
attention_backward_dkv_recompute(element* dinp, const element* dout, const element* inp,
                                 const float* lse,
                                 const float* D, int T) {
    __shared__ float4 queries[TILE][HS / 4], douts[TILE][HS / 4];
    const int rows = blockDim.x / 4, k = blockIdx.x * rows + threadIdx.x / 4, h = blockIdx.y,
        b = blockIdx.z;
    const int mine = min(k, T - 1);
    const int64 head = (int64(b) * NH + h) * T;
    const Part<4> key = load_part<4>(head_in(inp, 1, b, h, T, mine), 1.0f);
    const Part<4> value = load_part<4>(head_in(inp, 2, b, h, T, mine), 1.0f);
    Part<4> dkey = {}, dvalue = {};
    // Queries before the block's first key see none of its keys.
    for (int first = blockIdx.x * rows / TILE * TILE; first < T; first += TILE) {
        __syncthreads();
        load_rows(queries, head_in(inp, 0, b, h, T), 3 * C, first, T);
        load_rows(douts, head_out(dout, b, h, T), C, first, T);
        __syncthreads();
        const int count = min(TILE, T - first);
        for (int i = 0; i < count; i++) {
            const int t = first + i;
            const float s = dot(key, queries[i]) * scale(), dp = dot(value, douts[i]);
            const float p = mine <= t ? expf(s - lse[head + t]) : 0.0f;
            add(dkey, p * (dp - D[head + t]) * scale(), queries[i]);
            add(dvalue, p, douts[i]);
        }
    }
    if (k >= T) return;
    store_part(head_in(dinp, 1, b, h, T, k), dkey, 1.0f);
    store_part(head_in(dinp, 2, b, h, T, k), dvalue, 1.0f);
}

// -------------------------------------------------------------------------------------------------
// mma_sync: kernels/attention.cu, the live kernels of all GPUs but Hopper. A warp multiplies 16 or
// 32 rows by the tiles that pass through shared memory, and P and dS stay in registers, as the next
// matmul needs them. A tensor core instruction does thousands of operations, any other one 64, and
// the next tile is copied while this one is worked on. The kernel of dquery also computes D;
// partials (3C for every 64 rows) are the column sums for the bias gradient.
