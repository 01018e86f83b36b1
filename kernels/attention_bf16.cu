// Causal attention as in attention.cu, with the same formulas, in bfloat16 with the tensor core instructions of every GPU from
// sm_80 on. For Hopper and heads of 64 there is attention_hopper_bf16.cu.
//
// A block is 4 warps. Each warp has 16 rows of one head (forward, heads up to 64: 32), queries or, in attention_backward_dkv, keys, in
// its registers, as the A operands of the tensor cores. Tiles of PASSING rows of the other tensors pass through shared memory, two of
// them: one is worked on, one is underway. S, P, dP and dS live in registers only. The D of one product has the layout of the
// A of the next, but for rounding, and a tile serves as B both ways: with its columns as the inner dimension (S = query @ key^T),
// or, turned while it is read, its rows (P @ value).
//
// Bound by the tensor cores, which mma.sync keeps busy to 60 percent on Hopper. H200, B=64, T=1024: 214 TFLOP/s forward, 156 backward
// (five products counted, seven done) on a GPU that is not warm yet. The ladder is in dev/attention.md.

#include "mma.cuh"

static_assert(sizeof(element) == 2 && HS % 16 == 0 && HS <= 128, "in float32, attention.cu is used");

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int KSTEPS = HS / 16;                     // products of 16 columns of a head
constexpr int FORWARD_TILES = HS <= 64 ? 2 : 1;     // of 16 rows, of a warp
constexpr int FORWARD_ROWS = WARPS * 16 * FORWARD_TILES, ROWS = WARPS * 16;  // of a block
constexpr int PASSING = 64;                         // rows of a tile
constexpr int DKV_PASSING = HS <= 64 ? 64 : 32;
constexpr int STRIDE = HS + 8;                      // of a tile's rows: 8 rows' units of 16 bytes lie in different banks

// Begin to copy rows [row, row + N) of one head to a tile; rows from T on are zeros.
template <int N>
__device__ inline void begin_tile(element* tile, const element* head, int row, int T, int row_stride) {
    constexpr int UNITS = HS / 8;
    for (int i = threadIdx.x; i < N * UNITS; i += THREADS) {
        const int r = i / UNITS, c = i % UNITS * 8;
        const bool exists = row + r < T;
        copy_async(tile + r * STRIDE + c, head + (exists ? int64(row + r) * row_stride + c : 0), exists);
    }
}

// A warp's 16 rows of one head, from global memory, as A operands; rows from T on are zeros.
__device__ inline void load_rows(uint32 (&a)[KSTEPS][4], const element* head, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < KSTEPS; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + g + i % 2 * 8;
            a[k][i] = r < T ? *reinterpret_cast<const uint32*>(head + int64(r) * row_stride + 16 * k + 2 * t + i / 2 * 8) : 0;
        }
    }
}

// d[m] (16,N) = rows[m] (16,HS) @ tile (N,HS)^T
template <int TILES, int N>
__device__ inline void product_transposed(TileD (&d)[TILES][N / 8], const uint32 (&rows)[TILES][KSTEPS][4], const element* tile) {
    const int lane = threadIdx.x % 32;
    const element* from = tile + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int i = 0; i < 8; i++) d[m][n + i / 4][i % 4] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < KSTEPS; k++) {
            uint32 b[4];
            load_tiles<0>(b, from + n * 8 * STRIDE + 16 * k);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma(d[m][n], rows[m][k], b[0], b[1]);
                mma(d[m][n + 1], rows[m][k], b[2], b[3]);
            }
        }
    }
}

// d[m] (16,HS) += p[m] (16,N) @ tile (N,HS); p is the D of another product, rounded here.
template <int TILES, int N>
__device__ inline void product(TileD (&d)[TILES][HS / 8], const TileD (&p)[TILES][N / 8], const element* tile) {
    const int lane = threadIdx.x % 32;
    const element* from = tile + (lane / 8 % 2 * 8 + lane % 8) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        uint32 a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = as_pair(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < HS / 8; n += 2) {
            uint32 b[4];
            load_tiles<1>(b, from + k * 16 * STRIDE + n * 8);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma(d[m][n], a[m], b[0], b[1]);
                mma(d[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Write a warp's 16 rows of one head, times a factor for each of the thread's two rows.
__device__ inline void store_rows(element* head, const TileD (&d)[HS / 8], float upper, float lower, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        element* at = head + int64(row + g) * row_stride + 8 * n + 2 * t;
        if (row + g < T) *reinterpret_cast<uint32*>(at) = as_pair(d[n][0] * upper, d[n][1] * upper);
        if (row + g + 8 < T) *reinterpret_cast<uint32*>(at + 8 * row_stride) = as_pair(d[n][2] * lower, d[n][3] * lower);
    }
}

// Write the gradient of a block's 64 rows, and their column sums to partials[column ..]. All threads of the block.
__device__ inline void store_gradient(element* head, float* partials, const TileD (&d)[HS / 8], float factor, int row, int T) {
    __shared__ float sums[WARPS][HS];
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    store_rows(head, d, factor, factor, row + 16 * warp, T, 3 * C);
    __syncthreads();  // the sums of the call before are read
#pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        float2 sum = {(d[n][0] + d[n][2]) * factor, (d[n][1] + d[n][3]) * factor};  // rows from T on are zeros
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            sum.x += __shfl_xor_sync(0xffffffff, sum.x, distance);
            sum.y += __shfl_xor_sync(0xffffffff, sum.y, distance);
        }
        if (g == 0) *reinterpret_cast<float2*>(&sums[warp][8 * n + 2 * t]) = sum;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < HS; c += THREADS) partials[c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
}

// Block (128); grid (NH, tiles of FORWARD_ROWS queries, B), those with the most keys first. Shared memory: 4 tiles of PASSING rows.
extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(element* out, float* lse, const element* inp, int T) {
    extern __shared__ uint4 shared[];
    constexpr int TILES = FORWARD_TILES, TILE = PASSING * STRIDE;
    element* tiles = reinterpret_cast<element*>(shared);  // of each stage: key, value
    const int h = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = (gridDim.y - 1 - blockIdx.y) * FORWARD_ROWS, warp_row = first + warp * 16 * TILES;
    const element* query = inp + int64(b) * T * 3 * C + h * HS;
    const int count = (min(T, first + FORWARD_ROWS) + PASSING - 1) / PASSING;
    const float scale = rsqrtf(HS), to_log2 = LOG2E * scale;

    const auto begin = [&](int i) {
        if (i < count) {
            begin_tile<PASSING>(tiles + i % 2 * 2 * TILE, query + C, PASSING * i, T, 3 * C);
            begin_tile<PASSING>(tiles + i % 2 * 2 * TILE + TILE, query + 2 * C, PASSING * i, T, 3 * C);
        }
        copies_commit();
    };
    begin(0);
    uint32 q[TILES][KSTEPS][4];
    TileD o[TILES][HS / 8] = {};
    float largest[TILES][2], sum[TILES][2] = {};
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        load_rows(q[m], query, warp_row + 16 * m, T, 3 * C);
        largest[m][0] = largest[m][1] = -INFINITE;
    }

    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        __syncthreads();  // the tile is here, and the one before is no longer needed
        begin(i + 1);
        const int start = PASSING * i;
        if (start > warp_row + 16 * TILES - 1) continue;  // later than all queries of this warp
        const element* here = tiles + i % 2 * 2 * TILE;
        TileD s[TILES][PASSING / 8];
        product_transposed<TILES, PASSING>(s, q, here);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const int row = warp_row + 16 * m + g;
            if (start + PASSING > warp_row) {  // the diagonal
#pragma unroll
                for (int j = 0; j < PASSING / 2; j++) {
                    if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[m][j / 4][j % 4] = -INFINITE;
                }
            }
            float biggest[2] = {largest[m][0], largest[m][1]};
#pragma unroll
            for (int j = 0; j < PASSING / 2; j++) biggest[j % 4 / 2] = fmaxf(biggest[j % 4 / 2], s[m][j / 4][j % 4]);
            float shrink[2], shift[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                biggest[k] = quad_max(biggest[k]);  // not -inf: key 0 is in the first tile, and never later
                shrink[k] = power_of_2((largest[m][k] - biggest[k]) * to_log2);
                largest[m][k] = biggest[k];
                sum[m][k] *= shrink[k];
                shift[k] = biggest[k] * to_log2;
            }
#pragma unroll
            for (int j = 0; j < PASSING / 2; j++) {
                float& p = s[m][j / 4][j % 4];
                p = power_of_2(p * to_log2 - shift[j % 4 / 2]);
                sum[m][j % 4 / 2] += p;
            }
#pragma unroll
            for (int j = 0; j < HS / 2; j++) o[m][j / 4][j % 4] *= shrink[j % 4 / 2];
        }
        product<TILES, PASSING>(o, s, here + TILE);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const int row = warp_row + 16 * m;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + g + 8 * k;
            sum[m][k] = quad_sum(sum[m][k]);
            if (t == 0 && r < T) lse[(int64(b) * NH + h) * T + r] = largest[m][k] * scale + log2f(sum[m][k]) * LN2;
        }
        store_rows(out + int64(b) * T * C + h * HS, o[m], 1.0f / sum[m][0], 1.0f / sum[m][1], row, T, C);
    }
}

// dquery, and D for attention_backward_dkv. Block (128); grid (NH, tiles of 64 queries, B). Shared memory: 4 tiles of PASSING rows.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_dquery(element* dinp, float* D, float* partials, const element* dout, const element* inp, const element* out,
                          const float* lse, int T) {
    extern __shared__ uint4 shared[];
    constexpr int TILE = PASSING * STRIDE;
    element* tiles = reinterpret_cast<element*>(shared);  // of each stage: key, value
    const int h = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int tile_of_rows = gridDim.y - 1 - blockIdx.y, first = tile_of_rows * ROWS, warp_row = first + 16 * warp;
    const element* query = inp + int64(b) * T * 3 * C + h * HS;
    const int64 rows = int64(b) * T * C + h * HS, head = (int64(b) * NH + h) * T;
    const int count = (min(T, first + ROWS) + PASSING - 1) / PASSING;
    const float scale = rsqrtf(HS), to_log2 = LOG2E * scale;

    const auto begin = [&](int i) {
        if (i < count) {
            begin_tile<PASSING>(tiles + i % 2 * 2 * TILE, query + C, PASSING * i, T, 3 * C);
            begin_tile<PASSING>(tiles + i % 2 * 2 * TILE + TILE, query + 2 * C, PASSING * i, T, 3 * C);
        }
        copies_commit();
    };
    begin(0);
    uint32 q[1][KSTEPS][4], d[1][KSTEPS][4];
    float dot[2] = {0.0f, 0.0f}, log_sum[2] = {0.0f, 0.0f};  // D and lse of the thread's rows; zeros from T on, like their dout
    load_rows(q[0], out + rows, warp_row, T, C);
    load_rows(d[0], dout + rows, warp_row, T, C);
#pragma unroll
    for (int k = 0; k < KSTEPS; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 x = as_floats(q[0][k][i]), y = as_floats(d[0][k][i]);
            dot[i % 2] += x.x * y.x + x.y * y.y;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int r = warp_row + g + 8 * k;
        dot[k] = quad_sum(dot[k]);
        if (r < T) log_sum[k] = lse[head + r] * LOG2E;
        if (t == 0 && r < T) D[head + r] = dot[k];
    }
    load_rows(q[0], query, warp_row, T, 3 * C);

    TileD dq[1][HS / 8] = {};
    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        __syncthreads();
        begin(i + 1);
        const int start = PASSING * i;
        const element* here = tiles + i % 2 * 2 * TILE;
        TileD s[1][PASSING / 8], dp[1][PASSING / 8];
        product_transposed<1, PASSING>(s, q, here);
        product_transposed<1, PASSING>(dp, d, here + TILE);
#pragma unroll
        for (int j = 0; j < PASSING / 2; j++) {
            float& x = s[0][j / 4][j % 4];
            x = power_of_2(x * to_log2 - log_sum[j % 4 / 2]) * (dp[0][j / 4][j % 4] - dot[j % 4 / 2]);
            if (start == first && j / 4 * 8 + 2 * t + j % 2 > 16 * warp + g + j % 4 / 2 * 8) x = 0.0f;  // the diagonal
        }
        product<1, PASSING>(dq, s, here);
    }
    const int64 tile = int64(b) * gridDim.y + tile_of_rows;
    store_gradient(dinp + int64(b) * T * 3 * C + h * HS, partials + tile * 3 * C + h * HS, dq[0], scale, first, T);
}

// dkey and dvalue; the rows are keys, and queries pass. Block (128); grid (NH, tiles of 64 keys, B). Shared memory: 4 tiles and 4 times the
// statistics of DKV_PASSING rows.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_dkv(element* dinp, float* partials, const element* dout, const element* inp, const float* lse, const float* D, int T) {
    extern __shared__ uint4 shared[];
    constexpr int N = DKV_PASSING, TILE = N * STRIDE;
    element* tiles = reinterpret_cast<element*>(shared);                // of each stage: query, dout
    float* statistics = reinterpret_cast<float*>(tiles + 4 * TILE);     // of each stage: lse, D of the passing queries
    const int h = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = blockIdx.y * ROWS, warp_row = first + 16 * warp;  // the first keys have the most queries
    const element *query = inp + int64(b) * T * 3 * C + h * HS, *dhead = dout + int64(b) * T * C + h * HS;
    const int64 head = (int64(b) * NH + h) * T;
    const int count = (T - first + N - 1) / N;
    const float scale = rsqrtf(HS), to_log2 = LOG2E * scale;

    const auto begin = [&](int i) {
        if (i < count) {
            const int start = first + N * i;
            begin_tile<N>(tiles + i % 2 * 2 * TILE, query, start, T, 3 * C);
            begin_tile<N>(tiles + i % 2 * 2 * TILE + TILE, dhead, start, T, C);
            for (int j = threadIdx.x; j < 2 * N; j += THREADS) {
                const bool exists = start + j % N < T;
                copy_async_float(statistics + i % 2 * 2 * N + j, (j < N ? lse : D) + (exists ? head + start + j % N : 0), exists);
            }
        }
        copies_commit();
    };
    begin(0);
    uint32 k[1][KSTEPS][4], v[1][KSTEPS][4];
    load_rows(k[0], query + C, warp_row, T, 3 * C);
    load_rows(v[0], query + 2 * C, warp_row, T, 3 * C);
    TileD dk[1][HS / 8] = {}, dv[1][HS / 8] = {};
    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        __syncthreads();
        begin(i + 1);
        const int start = first + N * i;
        if (start + N <= warp_row) continue;  // earlier than all keys of this warp
        const element* here = tiles + i % 2 * 2 * TILE;
        const float* log_sums = statistics + i % 2 * 2 * N;
        TileD s[1][N / 8], dp[1][N / 8];  // transposed: keys down, queries across
        product_transposed<1, N>(s, k, here);
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float& x = s[0][j / 4][j % 4];
            x = power_of_2(x * to_log2 - log_sums[j / 4 * 8 + 2 * t + j % 2] * LOG2E);
            if (start < first + ROWS && start + j / 4 * 8 + 2 * t + j % 2 < warp_row + g + j % 4 / 2 * 8) x = 0.0f;  // the diagonal
        }
        product<1, N>(dv, s, here + TILE);
        product_transposed<1, N>(dp, v, here + TILE);
#pragma unroll
        for (int j = 0; j < N / 2; j++) s[0][j / 4][j % 4] *= dp[0][j / 4][j % 4] - log_sums[N + j / 4 * 8 + 2 * t + j % 2];
        product<1, N>(dk, s, here);
    }
    element* dhead_inp = dinp + int64(b) * T * 3 * C + h * HS;
    float* sums = partials + (int64(b) * gridDim.y + blockIdx.y) * 3 * C + h * HS;
    store_gradient(dhead_inp + C, sums + C, dk[0], scale, first, T);
    store_gradient(dhead_inp + 2 * C, sums + 2 * C, dv[0], 1.0f, first, T);
}
