// Causal multi-head attention that never stores a (T,T) matrix. Vaswani et al. 2017, https://arxiv.org/abs/1706.03762;
// online softmax and recomputation after FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691
//
//     forward   S = query @ key^T / sqrt(HS), -inf for keys after the query
//               lse = log(sum over keys of exp(S));  P = exp(S - lse);  out = P @ value                out =, lse =
//     backward  D = sum over HS of dout * out;  dP = dout @ value^T;  dS = P * (dP - D) / sqrt(HS)
//               dquery = dS @ key;  dkey = dS^T @ query;  dvalue = P^T @ dout                          dinp =, D =, partials =
//
// inp, dinp (B,T,3C): query, key, value side by side, each NH heads of HS. out, dout (B,T,C). lse, D (B,NH,T) float32.
// partials (B * tiles of T, 3C) float32: the column sums of dinp over each tile of rows, for the gradient of the bias.
//
// A block works on a tile of one head's rows (queries; keys in attention_backward_dkv), which it keeps in registers, a
// warp 16 or 32 of them; tiles of the other side pass through shared memory, the next one underway while this one is
// worked on. The backward pass is two kernels, one for dquery and one for dkey and dvalue: seven products instead of five,
// but every sum has one owner and a fixed order, so no atomic additions and the same bits in every run.
//
// Bound by the tensor cores, and as closely by the reading of the passing tiles from shared memory: 2 cycles for each
// 16x8x8 product where 16 rows share what is read (backward), 1 where 32 do (forward). Both operands of a product may have
// their inner dimension in any one order, and its columns may come out in any order; the orders here are those in which
// a thread's floats lie side by side, for accesses of 16 and 8 bytes. H200, TF32, B=32, T=1024: forward 109 TFLOP/s, backward 68 (five
// products counted, seven done); attention_hopper.cu 154 and 133.

#include "mma.cuh"

static_assert(sizeof(element) == 4, "this file is float32's; bfloat16 has its own");
static_assert(HS % 16 == 0 && HS <= 128, "head size: a multiple of 16 (two products' worth), at most 128 (registers)");

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int HEAD_TILES = HS / 8;
constexpr int PASSING = HS <= 64 && __CUDA_ARCH__ >= 800 ? 64 : 32;  // rows of a passing tile; sm_75 has 64 KB of shared memory
constexpr int PASSING_TILES = PASSING / 8;
constexpr int MROWS = HS <= 64 && TF32 ? 2 : 1;   // forward: tiles of 16 queries of a warp, as registers allow
constexpr int QUERIES = WARPS * 16 * MROWS;       // forward: rows of a block
constexpr int ROWS = WARPS * 16;                  // backward: rows of a block
constexpr int STRIDE = (HS + 31) / 32 * 32;       // floats from one row of a passing tile to the next
constexpr int TILE = PASSING * STRIDE;

__device__ inline float scale() { return 1.0f / sqrtf(float(HS)); }  // a constant to the compiler

// Where the c-th float of row r is in a passing tile. The 16-byte units of a row are permuted, differently in rows that
// a warp reads at once: rows g at column 4t with 16 bytes a lane, rows 2t at column 2g with 8 bytes a lane, both hit every
// bank equally often.
__device__ inline int place(int r, int c) {
    const int flip = (r >> 1 & 1) << 1 | ((r >> 2 ^ r) & 1) << 2;
    return r * STRIDE + ((c / 4 ^ flip) * 4 | c % 4);
}

// Begin to copy rows [row, row + PASSING) of one head into shared memory; rows from T on become zeros.
__device__ inline void copy_tile(float* tile, const float* head, int row, int T, int row_stride) {
#pragma unroll 4
    for (int i = threadIdx.x; i < PASSING * HS / 4; i += THREADS) {
        const int r = i / (HS / 4), c = i % (HS / 4) * 4;
        const bool exists = row + r < T;
        copy_async(tile + place(r, c), head + int64(exists ? row + r : 0) * row_stride + c, exists);
    }
}

// 16 rows of one head, from global memory, as the A operands of HEAD_TILES products. Of every 16 columns a lane has 4t..4t+3: the
// first two are columns t and t + 4 of one product's operand, the others of the next one's.
__device__ inline void load_rows(TileA (&tiles)[HEAD_TILES], const float* head, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < HEAD_TILES; k += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + g + 8 * i;
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (r < T) x = *reinterpret_cast<const float4*>(head + int64(r) * row_stride + 8 * k + 4 * t);
            tiles[k][i] = x.x;
            tiles[k][i + 2] = x.y;
            tiles[k + 1][i] = x.z;
            tiles[k + 1][i + 2] = x.w;
        }
    }
}

// d[m] (16, PASSING) = rows[m] (16, HS) @ tile (PASSING, HS)^T, for M times 16 rows.
template <int M>
__device__ inline void product_transposed(TileD (&d)[M][PASSING_TILES], const TileA (&rows)[M][HEAD_TILES], const float* tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < PASSING_TILES; j++) d[m][j][0] = d[m][j][1] = d[m][j][2] = d[m][j][3] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < HEAD_TILES; k += 2) {
#pragma unroll
        for (int half = 0; half < PASSING_TILES; half += 4) {  // products that follow one another go to different sums
            float4 b[4];
#pragma unroll
            for (int j = 0; j < 4; j++) b[j] = *reinterpret_cast<const float4*>(tile + 8 * (half + j) * STRIDE + place(g, 8 * k + 4 * t));
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) mma(d[m][half + j], rows[m][k], {b[j].x, b[j].y});
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) mma(d[m][half + j], rows[m][k + 1], {b[j].z, b[j].w});
            }
        }
    }
}

// d[m] (16, HS) += p[m] (16, PASSING) @ tile (PASSING, HS). p stays in the registers that it was computed in: they hold columns 2t
// and 2t + 1 where an A operand has t and t + 4, which is made up for by reading the tile's rows in the same order. Of
// every 16 columns of d, two products have the even and the odd ones; see columns_of.
template <int M>
__device__ inline void product(TileD (&d)[M][HEAD_TILES], const TileD (&p)[M][PASSING_TILES], const float* tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < PASSING_TILES; j++) {
#pragma unroll
        for (int n = 0; n < HEAD_TILES; n += 2) {
            const float* at = tile + 8 * j * STRIDE;
            const float2 first = *reinterpret_cast<const float2*>(at + place(2 * t, 8 * n + 2 * g));
            const float2 second = *reinterpret_cast<const float2*>(at + place(2 * t + 1, 8 * n + 2 * g));
#pragma unroll
            for (int m = 0; m < M; m++) {
                const TileA a = {p[m][j][0], p[m][j][2], p[m][j][1], p[m][j][3]};
                mma(d[m][n], a, {first.x, second.x});
                mma(d[m][n + 1], a, {first.y, second.y});
            }
        }
    }
}

// Columns 8n + 4t .. 8n + 4t + 3 (n even) of row g (i = 0) or g + 8 (i = 1) of a result of `product`.
__device__ inline float4 columns_of(const TileD (&d)[HEAD_TILES], int n, int i) {
    return {d[n][2 * i], d[n + 1][2 * i], d[n][2 * i + 1], d[n + 1][2 * i + 1]};
}

// Write 16 rows of a gradient of one head, times `factor`, and their column sums to sums[warp].
__device__ inline void store_rows(float* head, float (*sums)[HS], const TileD (&d)[HEAD_TILES], float factor, int row, int T) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n += 2) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float4 x = columns_of(d, n, i);
            x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
            const int r = row + g + 8 * i;
            if (r < T) *reinterpret_cast<float4*>(head + int64(r) * 3 * C + 8 * n + 4 * t) = x;
            sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};  // rows from T on are zeros
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            sum.x += __shfl_xor_sync(0xffffffff, sum.x, distance);
            sum.y += __shfl_xor_sync(0xffffffff, sum.y, distance);
            sum.z += __shfl_xor_sync(0xffffffff, sum.z, distance);
            sum.w += __shfl_xor_sync(0xffffffff, sum.w, distance);
        }
        if (g == 0) *reinterpret_cast<float4*>(&sums[warp][8 * n + 4 * t]) = sum;
    }
}

// Block (128); grid (NH, tiles of QUERIES, B), those with the most keys first. Shared memory: 4 tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(float* out, float* lse, const float* inp, int T) {
    extern __shared__ float4 shared[];
    float* tiles = reinterpret_cast<float*>(shared);  // key, value, and the next key, value
    const int h = blockIdx.x, b = blockIdx.z;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = (gridDim.y - 1 - blockIdx.y) * QUERIES;
    const int row = first + warp * 16 * MROWS;  // the warp's first query
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const float *key = query + C, *value = query + 2 * C;
    const int keys = min(T, first + QUERIES);  // the others are later than every query here

    copy_tile(tiles, key, 0, T, 3 * C);
    copy_tile(tiles + TILE, value, 0, T, 3 * C);
    copies_commit();
    TileA q[MROWS][HEAD_TILES];
    TileD o[MROWS][HEAD_TILES] = {};
    float largest[MROWS][2], sum[MROWS][2];  // of rows g and g + 8; `largest` in units of log2
#pragma unroll
    for (int m = 0; m < MROWS; m++) {
        load_rows(q[m], query, row + 16 * m, T, 3 * C);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[m][i] = -INFINITE;
            sum[m][i] = 0.0f;
        }
    }

    for (int start = 0; start < keys; start += PASSING) {
        float* const here = tiles + start / PASSING % 2 * 2 * TILE;
        float* const next = tiles + (start / PASSING + 1) % 2 * 2 * TILE;
        if (start + PASSING < keys) {
            copy_tile(next, key, start + PASSING, T, 3 * C);
            copy_tile(next + TILE, value, start + PASSING, T, 3 * C);
        }
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        if (start < row + 16 * MROWS) {  // else all of these keys come later
            TileD s[MROWS][PASSING_TILES];
            product_transposed(s, q, here);
            const float to_log2 = scale() * LOG2E;
            const bool diagonal = start + PASSING > row;
#pragma unroll
            for (int m = 0; m < MROWS; m++) {
                float biggest[2] = {largest[m][0], largest[m][1]};
#pragma unroll
                for (int j = 0; j < PASSING_TILES; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const bool later = diagonal && start + 8 * j + 2 * t + i % 2 > row + 16 * m + g + i / 2 * 8;
                        s[m][j][i] = later ? -INFINITE : s[m][j][i] * to_log2;
                        biggest[i / 2] = fmaxf(biggest[i / 2], s[m][j][i]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    biggest[i] = quad_max(biggest[i]);  // not -inf: key 0 is in the first tile, and never later
                    const float shrink = exp2f(largest[m][i] - biggest[i]);
                    largest[m][i] = biggest[i];
                    sum[m][i] *= shrink;
#pragma unroll
                    for (int n = 0; n < HEAD_TILES; n++) {
                        o[m][n][2 * i] *= shrink;
                        o[m][n][2 * i + 1] *= shrink;
                    }
                }
#pragma unroll
                for (int j = 0; j < PASSING_TILES; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        s[m][j][i] = exp2f(s[m][j][i] - largest[m][i / 2]);
                        sum[m][i / 2] += s[m][j][i];
                    }
                }
            }
            product(o, s, here + TILE);
        }
        __syncthreads();
    }

#pragma unroll
    for (int m = 0; m < MROWS; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + 16 * m + g + 8 * i;
            const float total = quad_sum(sum[m][i]);
            if (r >= T) continue;
            if (t == 0) lse[(int64(b) * NH + h) * T + r] = (largest[m][i] + log2f(total)) * LN2;
            float* at = out + (int64(b) * T + r) * C + h * HS;
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n += 2) {
                const float4 x = columns_of(o[m], n, i);
                *reinterpret_cast<float4*>(at + 8 * n + 4 * t) = {x.x / total, x.y / total, x.z / total, x.w / total};
            }
        }
    }
}

// dquery, and D for the kernel below. Block (128); grid (NH, tiles of ROWS, B). Shared memory: 4 tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery(float* dinp, float* D, float* partials, const float* dout, const float* inp, const float* out, const float* lse,
                          int T) {
    extern __shared__ float4 shared[];
    float* tiles = reinterpret_cast<float*>(shared);
    const int h = blockIdx.x, b = blockIdx.z;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int tile = gridDim.y - 1 - blockIdx.y, first = tile * ROWS;
    const int row = first + warp * 16;
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const float *key = query + C, *value = query + 2 * C;
    const int keys = min(T, first + ROWS);

    copy_tile(tiles, key, 0, T, 3 * C);
    copy_tile(tiles + TILE, value, 0, T, 3 * C);
    copies_commit();
    TileA q[1][HEAD_TILES], d[1][HEAD_TILES];
    load_rows(q[0], query, row, T, 3 * C);
    load_rows(d[0], dout + int64(b) * T * C + h * HS, row, T, C);

    float dot[2] = {0.0f, 0.0f}, log_sum[2];  // D and lse of rows g and g + 8; zeros for rows from T on, like their dout
    {
        TileA o[HEAD_TILES];
        load_rows(o, out + int64(b) * T * C + h * HS, row, T, C);
#pragma unroll
        for (int k = 0; k < HEAD_TILES; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dot[i % 2] += d[0][k][i] * o[k][i];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = row + g + 8 * i;
        const int64 at = (int64(b) * NH + h) * T + r;
        dot[i] = quad_sum(dot[i]);
        log_sum[i] = r < T ? lse[at] * LOG2E : 0.0f;
        if (t == 0 && r < T) D[at] = dot[i];
    }

    TileD dq[1][HEAD_TILES] = {};
    for (int start = 0; start < keys; start += PASSING) {
        float* const here = tiles + start / PASSING % 2 * 2 * TILE;
        float* const next = tiles + (start / PASSING + 1) % 2 * 2 * TILE;
        if (start + PASSING < keys) {
            copy_tile(next, key, start + PASSING, T, 3 * C);
            copy_tile(next + TILE, value, start + PASSING, T, 3 * C);
        }
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        if (start < row + 16) {
            TileD s[1][PASSING_TILES], dp[1][PASSING_TILES];
            product_transposed(s, q, here);
            product_transposed(dp, d, here + TILE);
            const bool diagonal = start + PASSING > row;
#pragma unroll
            for (int j = 0; j < PASSING_TILES; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const bool later = diagonal && start + 8 * j + 2 * t + i % 2 > row + g + i / 2 * 8;
                    const float p = later ? 0.0f : exp2f(s[0][j][i] * (scale() * LOG2E) - log_sum[i / 2]);
                    s[0][j][i] = p * (dp[0][j][i] - dot[i / 2]);
                }
            }
            product(dq, s, here);
        }
        __syncthreads();
    }

    __shared__ __align__(16) float sums[WARPS][HS];
    store_rows(dinp + int64(b) * T * 3 * C + h * HS, sums, dq[0], scale(), row, T);
    __syncthreads();
    float* partial = partials + (int64(b) * gridDim.y + tile) * 3 * C + h * HS;
    for (int c = threadIdx.x; c < HS; c += THREADS) partial[c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
}

// dkey and dvalue; the rows are keys, and queries pass. Block (128); grid (NH, tiles of ROWS, B); shared memory: 4 tiles and 4 * PASSING.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv(float* dinp, float* partials, const float* dout, const float* inp, const float* lse, const float* D, int T) {
    extern __shared__ float4 shared[];
    float* tiles = reinterpret_cast<float*>(shared);  // query, dout, and the next query, dout
    float* statistics = tiles + 4 * TILE;             // lse, D, and the next lse, D
    const int h = blockIdx.x, b = blockIdx.z;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = blockIdx.y * ROWS;  // the first keys have the most queries
    const int row = first + warp * 16;
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const float* dhead = dout + int64(b) * T * C + h * HS;
    const int64 head = (int64(b) * NH + h) * T;

    const auto copy = [&](int start) {
        const int slot = start / PASSING % 2;
        copy_tile(tiles + slot * 2 * TILE, query, start, T, 3 * C);
        copy_tile(tiles + slot * 2 * TILE + TILE, dhead, start, T, C);
        for (int i = threadIdx.x; i < 2 * PASSING; i += THREADS) {  // zeros from T on, like dout
            const int q = start + i % PASSING;
            copy_async_float(statistics + slot * 2 * PASSING + i, (i < PASSING ? lse : D) + head + min(q, T - 1), q < T);
        }
    };
    const int begin = first / PASSING * PASSING;  // queries before `first` do not see these keys
    copy(begin);
    copies_commit();

    TileA k[1][HEAD_TILES], v[1][HEAD_TILES];
    load_rows(k[0], query + C, row, T, 3 * C);
    load_rows(v[0], query + 2 * C, row, T, 3 * C);
    TileD dk[1][HEAD_TILES] = {}, dv[1][HEAD_TILES] = {};
    for (int start = begin; start < T; start += PASSING) {
        const int slot = start / PASSING % 2;
        const float* here = tiles + slot * 2 * TILE;
        const float* log_sum = statistics + slot * 2 * PASSING;
        const float* dot = log_sum + PASSING;
        if (start + PASSING < T) copy(start + PASSING);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        if (start + PASSING > row) {
            TileD s[1][PASSING_TILES], dp[1][PASSING_TILES];  // transposed: keys down, queries across
            product_transposed(s, k, here);
            const bool diagonal = start < row + 16;
#pragma unroll
            for (int j = 0; j < PASSING_TILES; j++) {
                const float2 sums = *reinterpret_cast<const float2*>(log_sum + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const bool earlier = diagonal && start + 8 * j + 2 * t + i % 2 < row + g + i / 2 * 8;
                    s[0][j][i] = earlier ? 0.0f : exp2f(s[0][j][i] * (scale() * LOG2E) - (i % 2 ? sums.y : sums.x) * LOG2E);
                }
            }
            product(dv, s, here + TILE);
            product_transposed(dp, v, here + TILE);
#pragma unroll
            for (int j = 0; j < PASSING_TILES; j++) {
                const float2 dots = *reinterpret_cast<const float2*>(dot + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) s[0][j][i] *= dp[0][j][i] - (i % 2 ? dots.y : dots.x);
            }
            product(dk, s, here);
        }
        __syncthreads();
    }

    __shared__ __align__(16) float sums[2][WARPS][HS];
    float* dhead_inp = dinp + int64(b) * T * 3 * C + h * HS;
    store_rows(dhead_inp + C, sums[0], dk[0], scale(), row, T);
    store_rows(dhead_inp + 2 * C, sums[1], dv[0], 1.0f, row, T);
    __syncthreads();
    float* partial = partials + (int64(b) * gridDim.y + blockIdx.y) * 3 * C + h * HS;
    for (int c = threadIdx.x; c < HS; c += THREADS) {
        partial[C + c] = sums[0][0][c] + sums[0][1][c] + sums[0][2][c] + sums[0][3][c];
        partial[2 * C + c] = sums[1][0][c] + sums[1][1][c] + sums[1][2][c] + sums[1][3][c];
    }
}
