// Causal multi-head attention that never stores a (T,T) matrix. Vaswani et al. 2017,
// https://arxiv.org/abs/1706.03762;
// online softmax and recomputation after FlashAttention-2, Dao 2023,
// https://arxiv.org/abs/2307.08691; grouped queries,
// Ainslie et al. 2023, https://arxiv.org/abs/2305.13245
//
//     forward   S = query @ key^T / sqrt(HS), -inf for keys after the query
//               lse = log(sum over keys of exp(S));  P = exp(S - lse);  out = P @ value         out =, lse =
//     backward  D = sum over HS of dout * out;  dP = dout @ value^T;  dS = P * (dP - D) / sqrt(HS)
//               dquery = dS @ key;  dkey = dS^T @ query;  dvalue = P^T @ dout                   dinp =, D =, partials =
//
// inp, dinp (B,T,QKV): NH heads of queries, NKV of keys and NKV of values side by side, each of HS.
// Query head h reads key and value head h / (NH / NKV); dkey and dvalue sum over the query heads of
// their group, in order. out, dout (B,T,Q). lse, D (B,NH,T) float32.
// rope (T,HS/2): if not null, the queries and keys in inp have been rotated (rope.cuh), and their
// gradients are rotated back. rstd (B,T,NH+NKV): of queries and keys that were normalized first
// (MODEL_QK_SCALE: qknorm.cu). partials (B * (T / 64 rounded up), QKV) float32: if not null, the
// column sums of dinp over every 64 rows, for the bias.
//
// For every GPU, in float32, TF32 and bfloat16, but for the gradient in bfloat16, which
// attention_backward.cu computes in one pass; on Hopper in bfloat16, heads of 64 and 128 use
// hopper/attention.cu.
//
// A block of 4 warps has 64 or 128 rows of one head: queries or, in attention_backward_dkv, keys
// and values. Each warp keeps 16 or 32 of them in registers, as A fragments. Tiles of the other
// tensors (keys and values; queries and dout) stream through shared memory, double-buffered: while
// the block works on one, the next one is being copied. S, P, dP and dS stay in registers: the
// result of one matmul becomes the A operand of the next (mma.cuh). The backward pass is two
// kernels. Together they do seven matmuls instead of five, but one block computes each sum, in
// order: no atomics.
//
// Bound by the tensor cores, of which mma.sync can use 60 percent on Hopper in bfloat16. In TF32,
// reading tiles from shared memory takes as long: 2 cycles per instruction where 16 rows share a B
// fragment (backward), 1 where 32 do (forward). What was tried is in dev/attention.md.

#include "attention.cuh"

constexpr int THREADS = ATTENTION_THREADS, WARPS = THREADS / 32;
constexpr int FORWARD_ROWS = ATTENTION_FORWARD_ROWS;  // per block
// a warp has 16 * M, forward
constexpr int M = FORWARD_ROWS / (WARPS * 16);
constexpr int PASSING = ATTENTION_PASSING;  // rows of a streamed tile

static_assert(ATTENTION_FORWARD_SHARED == 4 * PASSING * ROW_BYTES,
              "shared memory: two pairs of tiles");

// per multiprocessor; with 1, the compiler gives a thread more registers
constexpr int MIN_BLOCKS = BFLOAT16 ? 0 : 1;

// Start copying rows [row, row + N) of one head to a tile; rows >= T become 0.
template <int N>
__device__ inline void copy_tile(element* tile, const element* head, int row, int T,
                                 int row_stride) {
    constexpr int UNITS = HS / PACK;
    for (int i = threadIdx.x; i < N * UNITS; i += THREADS) {
        const int r = i / UNITS, c = i % UNITS * PACK;
        const bool exists = row + r < T;
        copy_async(tile_at(tile, r, c), head + (exists ? int64(row + r) * row_stride + c : 0),
                   exists);
    }
}

// Block (THREADS); grid (NH, T / FORWARD_ROWS rounded up, B), most keys first. Shared memory: 4
// tiles of PASSING rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_forward(element* out, float* lse, const element* inp, int T) {
    extern __shared__ uint4 shared[];
    constexpr int TILE = PASSING * TILE_STRIDE;
    element* const tiles = reinterpret_cast<element*>(shared);  // key, value, next key, next value
    const int h = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
        t = threadIdx.x % 4;
    const int first = (gridDim.y - 1 - blockIdx.y) * FORWARD_ROWS, warp_row = first + warp * 16 * M;
    const element* query = inp + int64(b) * T * QKV + h * HS;
    const int to_key = Q + (h / GROUP - h) * HS, to_value = to_key + KV;  // from the query's head
    const int count = (min(T, first + FORWARD_ROWS) + PASSING - 1) / PASSING;  // tiles of keys

    const auto copy = [&](int i) {
        if (i < count) {
            copy_tile<PASSING>(tiles + i % 2 * 2 * TILE, query + to_key, PASSING * i, T, QKV);
            copy_tile<PASSING>(tiles + i % 2 * 2 * TILE + TILE, query + to_value, PASSING * i, T,
                               QKV);
        }
        copies_commit();
    };
    copy(0);
    Rows q[M];
    Result o[M] = {};
    float largest[M][2], sum[M][2] = {};  // of rows g and g + 8
#pragma unroll
    for (int m = 0; m < M; m++) {
        load_rows(q[m], query, warp_row + 16 * m, T, QKV);
        largest[m][0] = largest[m][1] = -INFINITE;
    }

    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        // tile i has arrived, and all warps are done with tile i - 1, which tile i + 1 overwrites
        __syncthreads();
        copy(i + 1);
        const int start = PASSING * i;
        if (start >= warp_row + 16 * M) continue;  // these keys come after all queries of this warp
        const element* key = tiles + i % 2 * 2 * TILE;
        FragmentD s[M][PASSING / 8];
        matmul_transposed(s, q, key);
#pragma unroll
        for (int m = 0; m < M; m++) {
            float rescale[2],
                (&scores)[PASSING / 2] = reinterpret_cast<float(&)[PASSING / 2]>(s[m]);
            softmax_of_tile(scores, largest[m], sum[m], rescale, LOG2E * scale(),
                            start + PASSING > warp_row, start,
                            warp_row + 16 * m + g);
#pragma unroll
            for (int j = 0; j < HS / 2; j++) o[m][j / 4][j % 4] *= rescale[j % 4 / 2];
        }
        matmul(o, s, key + TILE);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        float total[2], inverse[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = warp_row + 16 * m + g + 8 * k;
            total[k] = quad_sum(sum[m][k]);
            inverse[k] = 1.0f / total[k];
            const float x = largest[m][k], y = log2f(total[k]);
            if (t == 0 && r < T)
                lse[(int64(b) * NH + h) * T + r] = BFLOAT16 ? x * scale() + y * LN2 : (x + y) * LN2;
        }
        store_rows(out + int64(b) * T * Q + h * HS, o[m], warp_row + 16 * m, T, Q,
                   [&](float x, int k) { return BFLOAT16 ? x * inverse[k] : x / total[k]; });
    }
}

#if !BFLOAT16

constexpr int ROWS = ATTENTION_BACKWARD_ROWS;  // per block

static_assert(ROWS == WARPS * 16, "backward, a warp has 16 rows");
static_assert(ATTENTION_DQUERY_SHARED == ATTENTION_FORWARD_SHARED, "the same");
static_assert(ATTENTION_DKV_SHARED == 4 * PASSING * (ROW_BYTES + 4),
              "two pairs of tiles, and lse and D for each row");

// dquery, and D for attention_backward_dkv. Block and shared memory as above; grid (NH, T / ROWS
// rounded up, B).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward_dquery(element* dinp, float* D, float* partials, const element* dout,
                          const element* inp,
                          const element* out, const float* lse, const float2* rope,
                              const float* rstd, int T) {
    extern __shared__ uint4 shared[];
    __shared__ float sums[WARPS][HS];
    constexpr int TILE = PASSING * TILE_STRIDE;
    element* const tiles = reinterpret_cast<element*>(shared);  // key, value, next key, next value
    const int h = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
        t = threadIdx.x % 4;
    const int row_block = gridDim.y - 1 - blockIdx.y, first = row_block * ROWS,
        warp_row = first + 16 * warp;
    const element* query = inp + int64(b) * T * QKV + h * HS;
    const int to_key = Q + (h / GROUP - h) * HS, to_value = to_key + KV;  // from the query's head
    const int64 rows = int64(b) * T * Q + h * HS, head = (int64(b) * NH + h) * T;
    const int count = (min(T, first + ROWS) + PASSING - 1) / PASSING;

    const auto copy = [&](int i) {
        if (i < count) {
            copy_tile<PASSING>(tiles + i % 2 * 2 * TILE, query + to_key, PASSING * i, T, QKV);
            copy_tile<PASSING>(tiles + i % 2 * 2 * TILE + TILE, query + to_value, PASSING * i, T,
                               QKV);
        }
        copies_commit();
    };
    copy(0);
    Rows q[1], d[1];
    // D and lse of rows g and g + 8; 0 for rows >= T, like dout
    float D_of_rows[2] = {0.0f, 0.0f}, lse_of_rows[2] = {0.0f, 0.0f};
    load_rows(q[0], out + rows, warp_row, T, Q);
    load_rows(d[0], dout + rows, warp_row, T, Q);
    add_dot_products(D_of_rows, q[0], d[0]);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int r = warp_row + g + 8 * k;
        D_of_rows[k] = quad_sum(D_of_rows[k]);
        if (r < T) lse_of_rows[k] = lse[head + r] * LOG2E;
        if (t == 0 && r < T) D[head + r] = D_of_rows[k];
    }
    load_rows(q[0], query, warp_row, T, QKV);

    Result dq[1] = {};
    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        __syncthreads();
        copy(i + 1);
        const int start = PASSING * i;
        if (PASSING < ROWS && start >= warp_row + 16) continue;
        const element* key = tiles + i % 2 * 2 * TILE;
        FragmentD s[1][PASSING / 8], dp[1][PASSING / 8];
        matmul_transposed(s, q, key);
        matmul_transposed(dp, d, key + TILE);
#pragma unroll
        for (int j = 0; j < PASSING / 2; j++) {
            float& x = s[0][j / 4][j % 4];
            const int column = start + j / 4 * 8 + 2 * t + j % 2,
                row = warp_row + g + j % 4 / 2 * 8;
            x = exp2_of(x * (LOG2E * scale()) - lse_of_rows[j % 4 / 2])
                * (dp[0][j / 4][j % 4] - D_of_rows[j % 4 / 2]);
            if (start >= first && column > row) x = 0.0f;  // a key after the query, on the diagonal
        }
        matmul(dq, s, key);
    }
    // tells the compiler that lanes have reconverged after `continue`: else each shuffle branches
    __syncthreads();
    const float* const rstd_of_head = rstd + int64(b) * T * (NH + NKV) + h;
    if (QK_NORM) norm_back(dq[0], query, rstd_of_head, MODEL_QK_SCALE / scale(), warp_row, T);
    rotate_back(dq[0], rope, warp_row, T);
    store_gradient(dinp + int64(b) * T * QKV + h * HS, sums[warp], partials, dq[0], scale(),
                   warp_row, T);
    if (!partials) return;
    __syncthreads();
    add_warps(partials + (int64(b) * gridDim.y + row_block) * QKV + h * HS, sums,
              threadIdx.x, THREADS);
}

// dkey and dvalue: the block's rows are keys and values; tiles of query and dout stream by, of one
// query head of the group after the other. Block (THREADS); grid (NKV, T / ROWS rounded up, B).
// Shared memory: 4 tiles of PASSING rows, and a float of statistics for each of these rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_backward_dkv(element* dinp, float* partials, const element* dout, const element* inp,
                       const float* lse,
                       const float* D, const float2* rope, const float* rstd, int T) {
    extern __shared__ uint4 shared[];
    __shared__ float sums[2][WARPS][HS];
    constexpr int N = PASSING, TILE = N * TILE_STRIDE;
    // query, dout, next query, next dout
    element* const tiles = reinterpret_cast<element*>(shared);
    // of the queries: lse, D, next lse, next D
    float* const statistics = reinterpret_cast<float*>(tiles + 4 * TILE);
    const int h = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
        t = threadIdx.x % 4;
    // the first keys have the most queries
    const int first = blockIdx.y * ROWS, warp_row = first + 16 * warp;
    // of the group's first query head
    const element* query = inp + int64(b) * T * QKV + h * GROUP * HS;
    const element* dhead = dout + int64(b) * T * Q + h * GROUP * HS;
    const int64 head = (int64(b) * NH + h * GROUP) * T;
    const int to_key = Q + (h - h * GROUP) * HS, to_value = to_key + KV;
    const int head_tiles = (T - first + N - 1) / N;  // queries before `first` do not see these keys
    const int count = GROUP * head_tiles;
    const Divisor divisor(head_tiles);
    // tile i's head in the group
    const auto member_of = [&](int i) { return GROUP == 1 ? 0 : divisor.quotient(i); };
    const auto start_of = [&](int i) { return first + N * (i - member_of(i) * head_tiles); };

    const auto copy = [&](int i) {
        if (i < count) {
            const int start = start_of(i), member = member_of(i);
            copy_tile<N>(tiles + i % 2 * 2 * TILE, query + member * HS, start, T, QKV);
            copy_tile<N>(tiles + i % 2 * 2 * TILE + TILE, dhead + member * HS, start, T, Q);
            for (int j = threadIdx.x; j < 2 * N; j += THREADS) {  // 0 for rows >= T, like dout
                const bool exists = start + j % N < T;
                const float* from = (j < N ? lse : D)
                    + (exists ? head + int64(member) * T + start + j % N : 0);
                copy_async_float(statistics + i % 2 * 2 * N + j, from, exists);
            }
        }
        copies_commit();
    };
    copy(0);
    Rows k[1], v[1];
    load_rows(k[0], query + to_key, warp_row, T, QKV);
    load_rows(v[0], query + to_value, warp_row, T, QKV);
    Result dk[1] = {}, dv[1] = {};
    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        __syncthreads();
        copy(i + 1);
        const int start = start_of(i);
        if (start + N <= warp_row) continue;  // these queries come before all keys of this warp
        const element* tile = tiles + i % 2 * 2 * TILE;
        const float* lse_and_D = statistics + i % 2 * 2 * N;
        FragmentD s[1][N / 8], dp[1][N / 8];  // transposed: keys down, queries across
        matmul_transposed(s, k, tile);
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            const float2 lse_of_queries =
                *reinterpret_cast<const float2*>(lse_and_D + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = s[0][n][i];
                x = exp2_of(x * (LOG2E * scale()) - (i % 2 ? lse_of_queries.y : lse_of_queries.x)
                            * LOG2E);
                const int column = start + 8 * n + 2 * t + i % 2, row = warp_row + g + i / 2 * 8;
                // a query before the key, on the diagonal
                if (start < first + ROWS && column < row) x = 0.0f;
            }
        }
        matmul(dv, s, tile + TILE);
        matmul_transposed(dp, v, tile + TILE);
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            const float2 D_of_queries =
                *reinterpret_cast<const float2*>(lse_and_D + N + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[0][n][i] *= dp[0][n][i] - (i % 2 ? D_of_queries.y : D_of_queries.x);
        }
        matmul(dk, s, tile);
    }
    element* dkey = dinp + int64(b) * T * QKV + Q + h * HS;
    // tells the compiler that lanes have reconverged after `continue`: else each shuffle branches
    __syncthreads();
    const float* const rstd_of_head = rstd + int64(b) * T * (NH + NKV) + NH + h;
    if (QK_NORM) norm_back(dk[0], query + to_key, rstd_of_head, 1.0f, warp_row, T);
    rotate_back(dk[0], rope, warp_row, T);
    store_gradient(dkey, sums[0][warp], partials, dk[0], scale(), warp_row, T);
    store_gradient(dkey + KV, sums[1][warp], partials, dv[0], 1.0f, warp_row, T);
    if (!partials) return;
    float* partial = partials + (int64(b) * gridDim.y + blockIdx.y) * QKV + Q + h * HS;
    __syncthreads();
    add_warps(partial, sums[0], threadIdx.x, THREADS);
    add_warps(partial + KV, sums[1], threadIdx.x, THREADS);
}

#endif
