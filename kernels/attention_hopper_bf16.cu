// Causal attention as in attention.cu, with the same formulas, for Hopper (sm_90a), heads of 64, bfloat16.
//
// A block is three warpgroups. One thread of the first one loads: it has TMA bring tiles of 64 columns (one head) of keys and
// values, or of queries and dout, from the packed tensors to shared memory, some tiles ahead. The other two groups compute:
// each has 64 rows of one head (queries; keys in attention_backward_dkv) in its registers, as the A operands of the tensor
// cores, and multiplies them with the tiles as they come. S, P, dP and dS live in registers only, and a tile serves as either
// operand as it lies: rows are the inner dimension of S = query @ key^T, columns that of P @ value.
//
// Products are begun and waited for apart: those of P with a tile run while the softmax of the next tile is worked out, and
// what one group leaves idle of the tensor cores, the other one takes.
//
// The maps that TMA reads by are made by train_gpt2_cuda.py: of inp (B,T,3C) and of dout (B,T,C), boxes of so many rows by HS
// columns. Rows from T on arrive as zeros.
//
// Bound by the tensor cores (2048 multiply-adds a cycle and multiprocessor) and, as much, by exp (16 a cycle: for each element
// of P, as long as its two products with heads of 64). The ladder is in dev/attention.md.

#include "hopper.cuh"

static_assert(sizeof(element) == 2 && HS == 64, "elsewhere, attention_bf16.cu or attention.cu is used");

constexpr int GROUPS = 2;  // that compute
constexpr int THREADS = (1 + GROUPS) * GROUP;
constexpr int ROWS = GROUPS * 64;  // of a block
constexpr int LOADER_REGISTERS = 24, COMPUTE_REGISTERS = 240;
constexpr int ARRIVALS = GROUPS * 4;  // of warps, when a tile is no longer needed

// Rows of a passing tile, and how many sets of them there is room for.
constexpr int FORWARD_ROWS = 128, FORWARD_STAGES = 4;
constexpr int DQUERY_ROWS = 64, DQUERY_STAGES = 6;
constexpr int DKV_ROWS = 64, DKV_STAGES = 6;

// Barriers of each stage: its tiles are here; its tiles are no longer needed.
template <int STAGES>
struct Pipeline {
    Barrier full[STAGES], empty[STAGES];

    // All threads of the block; `arrivals` for full, beside the announced bytes.
    __device__ void make(int arrivals) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; s++) {
                barrier_make(&full[s], arrivals);
                barrier_make(&empty[s], ARRIVALS);
            }
            fence_barriers();
        }
        __syncthreads();
    }
    // Tile i: wait until it is here; give it back (each warp once); wait until its place is free.
    __device__ void wait(int i) { barrier_wait(&full[i % STAGES], i / STAGES & 1); }
    __device__ void release(int i) {
        if (threadIdx.x % 32 == 0) barrier_arrive(&empty[i % STAGES]);
    }
    __device__ void wait_for_room(int i) {
        if (i >= STAGES) barrier_wait(&empty[i % STAGES], (i / STAGES & 1) ^ 1);
    }
};

// Among the 4 lanes that share a row: lane t has x[n], piece t of unit n, and gets piece n of unit t, or the other way around.
__device__ inline void turn(uint32 (&x)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const int i = bit == 1 ? 2 : 1;  // x[0], x[bit] are exchanged, and x[i], x[i + bit]
        const bool upper = t & bit;
        const uint32 a = __shfl_xor_sync(0xffffffff, upper ? x[0] : x[bit], bit);
        const uint32 b = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + bit], bit);
        (upper ? x[0] : x[bit]) = a;
        (upper ? x[i] : x[i + bit]) = b;
    }
}

// A warp's 16 rows of one head, from global memory, as the A operands of 4 products; rows from T on are zeros.
__device__ inline void load_rows(uint32 (&a)[4][4], const element* head, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {  // row g or g + 8, left or right half of the columns
        const int r = row + g + i % 2 * 8, half = i / 2;
        uint4 unit = {0, 0, 0, 0};
        if (r < T) unit = *reinterpret_cast<const uint4*>(head + int64(r) * row_stride + half * 32 + t * 8);
        uint32 x[4] = {unit.x, unit.y, unit.z, unit.w};
        turn(x);
#pragma unroll
        for (int n = 0; n < 4; n++) a[half * 2 + n / 2][n % 2 * 2 + i % 2] = x[n];
    }
}

// Write a warp's 16 rows (16,64) of one head, times a factor for each of the thread's two rows.
__device__ inline void store_rows(element* head, const float (&d)[32], float upper, float lower, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = row + g + i % 2 * 8, half = i / 2;
        const float factor = i % 2 ? lower : upper;
        uint32 x[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int j = (half * 4 + n) * 4 + i % 2 * 2;
            x[n] = as_pair(d[j] * factor, d[j + 1] * factor);
        }
        turn(x);
        if (r < T) *reinterpret_cast<uint4*>(head + int64(r) * row_stride + half * 32 + t * 8) = {x[0], x[1], x[2], x[3]};
    }
}

// sums[c] = the sum over the warp's 16 rows, times `factor`.
__device__ inline void sum_rows(float* sums, const float (&d)[32], float factor) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 sum = {(d[4 * n] + d[4 * n + 2]) * factor, (d[4 * n + 1] + d[4 * n + 3]) * factor};
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            sum.x += __shfl_xor_sync(0xffffffff, sum.x, distance);
            sum.y += __shfl_xor_sync(0xffffffff, sum.y, distance);
        }
        if (g == 0) *reinterpret_cast<float2*>(sums + 8 * n + 2 * t) = sum;
    }
}

// d (64,n) = rows (64,HS) @ tile (n,HS)^T, begun.
template <int N>
__device__ inline void begin_product_transposed(float (&d)[N], const uint32 (&rows)[4][4], const element* tile) {
    const unsigned long long b = describe(tile);  // once: the chain of operations that makes it would hold up every wgmma
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<0>(d, rows[k], b + k * 2, k > 0);  // 16 columns are 32 bytes
}

// d (64,HS) += p (64,n) @ tile (n,HS), begun. p must stay as it is until the product is done.
template <int K>
__device__ inline void begin_product(float (&d)[32], const uint32 (&p)[K][4], const element* tile) {
    const unsigned long long b = describe(tile);
#pragma unroll
    for (int k = 0; k < K; k++) wgmma<1>(d, p[k], b + k * 128, 1);  // 16 rows are 2048 bytes
}

// A result of one product as the A operand of the next.
template <int K>
__device__ inline void as_operand(uint32 (&a)[K][4], const float (&d)[8 * K]) {
#pragma unroll
    for (int k = 0; k < K; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = as_pair(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
    }
}

// Dynamic shared memory from the first multiple of 1024 bytes on.
__device__ inline element* tiles_of(float4* shared) {
    return reinterpret_cast<element*>(reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023));
}

// The bias's share of a block: partials[tile, c] = the sums of the four warps of this group.
__device__ inline void put_sums(float* partials, const float (&sums)[4][HS], int column, int b, int group_row, int T) {
    const int c = threadIdx.x % GROUP;
    if (c >= HS || group_row >= T) return;
    const int64 tile = int64(b) * ((T + 63) / 64) + group_row / 64;
    partials[tile * 3 * C + column + c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
}

constexpr float TO_LOG2 = LOG2E / 8.0f;  // 8 = sqrt(HS)
constexpr int OWN = 1;                   // the first of the hardware's barriers for one group alone

// Block (384); grid (NH, tiles of 128 queries, B), those with the most keys first. Shared memory: FORWARD_STAGES * 2 tiles and 1024
// bytes. map: of inp, boxes of FORWARD_ROWS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(element* out, float* lse, const element* inp, int T, const __grid_constant__ TensorMap map) {
    extern __shared__ float4 shared[];
    __shared__ Pipeline<FORWARD_STAGES> pipeline;
    constexpr int KEYS = FORWARD_ROWS, BOX = KEYS * HS;
    element* tiles = tiles_of(shared);  // of each stage: key, value
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const int count = (min(T, first + ROWS) + KEYS - 1) / KEYS;  // tiles of keys that are not later than every query here
    pipeline.make(1);

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; i++) {
                const int stage = i % FORWARD_STAGES;
                pipeline.wait_for_room(i);
                barrier_expect(&pipeline.full[stage], 2 * BOX * sizeof(element));
                load_box(tiles + stage * 2 * BOX, &map, &pipeline.full[stage], C + h * HS, KEYS * i, b);
                load_box(tiles + stage * 2 * BOX + BOX, &map, &pipeline.full[stage], 2 * C + h * HS, KEYS * i, b);
            }
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int group_row = first + 64 * group, row = group_row + 16 * warp + g;  // the thread's rows: row, row + 8
        uint32 q[4][4], p[KEYS / 16][4];
        load_rows(q, inp + int64(b) * T * 3 * C + h * HS, group_row + 16 * warp, T, 3 * C);
        float s[KEYS / 2], o[32] = {}, largest[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f}, shrink[2];
        const int own = min(count, (group_row + 63) / KEYS + 1);  // the others are later than all queries of this group

        const auto softmax = [&](int start) {  // s = exp(s - largest), which may have grown: what was summed up is to shrink
            if (start + KEYS > group_row) {    // the diagonal
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++) {
                    if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = -INFINITE;
                }
            }
            float biggest[2] = {largest[0], largest[1]};
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++) biggest[j % 4 / 2] = fmaxf(biggest[j % 4 / 2], s[j]);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                biggest[k] = quad_max(biggest[k]);  // not -inf: key 0 is in the first tile, and never later
                shrink[k] = power_of_2((largest[k] - biggest[k]) * TO_LOG2);
                largest[k] = biggest[k];
                sum[k] *= shrink[k];
            }
            const float shift[2] = {largest[0] * TO_LOG2, largest[1] * TO_LOG2};
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++) {
                s[j] = power_of_2(s[j] * TO_LOG2 - shift[j % 4 / 2]);
                sum[j % 4 / 2] += s[j];
            }
        };

        pipeline.wait(0);
        wgmma_fence();
        begin_product_transposed(s, q, tiles);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        softmax(0);
        as_operand(p, s);
        for (int i = 1; i < own; i++) {
            pipeline.wait(i);
            pin(s);
            pin(o);
            wgmma_fence();
            begin_product_transposed(s, q, tiles + i % FORWARD_STAGES * 2 * BOX);
            wgmma_commit();
            begin_product(o, p, tiles + (i - 1) % FORWARD_STAGES * 2 * BOX + BOX);
            wgmma_commit();
            wgmma_wait<1>();
            pin(s);
            softmax(KEYS * i);
            wgmma_wait<0>();
            pin(o);
            pipeline.release(i - 1);
#pragma unroll
            for (int j = 0; j < 32; j++) o[j] *= shrink[j % 4 / 2];
            as_operand(p, s);
        }
        pin(o);
        wgmma_fence();
        begin_product(o, p, tiles + (own - 1) % FORWARD_STAGES * 2 * BOX + BOX);
        wgmma_commit();
        sum[0] = quad_sum(sum[0]);
        sum[1] = quad_sum(sum[1]);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + 8 * k;
            if (t == 0 && r < T) lse[(int64(b) * NH + h) * T + r] = largest[k] / 8.0f + log2f(sum[k]) * LN2;
        }
        wgmma_wait<0>();
        pin(o);
        store_rows(out + int64(b) * T * C + h * HS, o, 1.0f / sum[0], 1.0f / sum[1], group_row + 16 * warp, T, C);
    }
}

// dquery, and D for attention_backward_dkv. Block (384); grid (NH, tiles of 128 queries, B). Shared memory: DQUERY_STAGES * 2
// tiles and 1024 bytes. map: of inp, boxes of DQUERY_ROWS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery(element* dinp, float* D, float* partials, const element* dout, const element* inp, const element* out,
                          const float* lse, int T, const __grid_constant__ TensorMap map) {
    extern __shared__ float4 shared[];
    __shared__ Pipeline<DQUERY_STAGES> pipeline;
    __shared__ float sums[GROUPS][4][HS];
    constexpr int KEYS = DQUERY_ROWS, BOX = KEYS * HS;
    element* tiles = tiles_of(shared);  // of each stage: key, value
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const int count = (min(T, first + ROWS) + KEYS - 1) / KEYS;
    pipeline.make(1);

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; i++) {
                const int stage = i % DQUERY_STAGES;
                pipeline.wait_for_room(i);
                barrier_expect(&pipeline.full[stage], 2 * BOX * sizeof(element));
                load_box(tiles + stage * 2 * BOX, &map, &pipeline.full[stage], C + h * HS, KEYS * i, b);
                load_box(tiles + stage * 2 * BOX + BOX, &map, &pipeline.full[stage], 2 * C + h * HS, KEYS * i, b);
            }
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int group_row = first + 64 * group, row = group_row + 16 * warp + g;
        const int64 rows = int64(b) * T * C + h * HS, head = (int64(b) * NH + h) * T;
        uint32 q[4][4], d[4][4], ds[KEYS / 16][4];
        load_rows(d, dout + rows, group_row + 16 * warp, T, C);
        float dot[2] = {0.0f, 0.0f}, log_sum[2] = {0.0f, 0.0f};  // D and lse of the thread's rows; zeros from T on, like their dout
        load_rows(q, out + rows, group_row + 16 * warp, T, C);
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = as_floats(q[k][i]), y = as_floats(d[k][i]);
                dot[i % 2] += x.x * y.x + x.y * y.y;
            }
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + 8 * k;
            dot[k] = quad_sum(dot[k]);
            if (r < T) log_sum[k] = lse[head + r] * LOG2E;
            if (t == 0 && r < T) D[head + r] = dot[k];
        }
        load_rows(q, inp + int64(b) * T * 3 * C + h * HS, group_row + 16 * warp, T, 3 * C);

        float s[KEYS / 2], dp[KEYS / 2], dq[32] = {};
        const int own = min(count, (group_row + 63) / KEYS + 1);
        const auto weights = [&](int start) {  // s = P
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++) s[j] = power_of_2(s[j] * TO_LOG2 - log_sum[j % 4 / 2]);
            if (start + KEYS > group_row) {  // the diagonal
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++) {
                    if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = 0.0f;
                }
            }
        };

        pipeline.wait(0);
        wgmma_fence();
        begin_product_transposed(s, q, tiles);
        wgmma_commit();
        begin_product_transposed(dp, d, tiles + BOX);
        wgmma_commit();
        wgmma_wait<1>();
        pin(s);
        weights(0);
        wgmma_wait<0>();
        pin(dp);
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++) s[j] *= dp[j] - dot[j % 4 / 2];
        as_operand(ds, s);
        for (int i = 1; i < own; i++) {
            const element* here = tiles + i % DQUERY_STAGES * 2 * BOX;
            pipeline.wait(i);
            pin(s);
            pin(dp);
            pin(dq);
            wgmma_fence();
            begin_product_transposed(s, q, here);
            wgmma_commit();
            begin_product_transposed(dp, d, here + BOX);
            wgmma_commit();
            begin_product(dq, ds, tiles + (i - 1) % DQUERY_STAGES * 2 * BOX);
            wgmma_commit();
            wgmma_wait<2>();
            pin(s);
            weights(KEYS * i);
            wgmma_wait<1>();
            pin(dp);
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++) s[j] *= dp[j] - dot[j % 4 / 2];
            wgmma_wait<0>();
            pin(dq);
            pipeline.release(i - 1);
            as_operand(ds, s);
        }
        pin(dq);
        wgmma_fence();
        begin_product(dq, ds, tiles + (own - 1) % DQUERY_STAGES * 2 * BOX);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dq);
        store_rows(dinp + int64(b) * T * 3 * C + h * HS, dq, 1.0f / 8.0f, 1.0f / 8.0f, group_row + 16 * warp, T, 3 * C);
        sum_rows(sums[group][warp], dq, 1.0f / 8.0f);
        barrier_wait(OWN + group, GROUP);
        put_sums(partials, sums[group], h * HS, b, group_row, T);
    }
}

// dkey and dvalue; the rows are keys, and queries pass. Block (384); grid (NH, tiles of 128 keys, B). Shared memory: DKV_STAGES * 2 tiles
// and 1024 bytes. maps: of inp and of dout, boxes of DKV_ROWS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv(element* dinp, float* partials, const element* dout, const element* inp, const float* lse, const float* D, int T,
                       const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap dout_map) {
    extern __shared__ float4 shared[];
    __shared__ Pipeline<DKV_STAGES> pipeline;
    __shared__ float sums[GROUPS][2][4][HS], statistics[DKV_STAGES][2][DKV_ROWS];  // lse in units of log2, and D, of the passing queries
    constexpr int QUERIES = DKV_ROWS, BOX = QUERIES * HS;
    static_assert(QUERIES == 64, "the loop begins at the group's own diagonal; two warps fetch the statistics");
    element* tiles = tiles_of(shared);  // of each stage: query, dout
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = blockIdx.y * ROWS;  // the first keys have the most queries
    const int64 head = (int64(b) * NH + h) * T;
    const int count = (T - first + QUERIES - 1) / QUERIES;  // tiles of queries from the first key on
    pipeline.make(1 + 64);

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; i++) {
                const int stage = i % DKV_STAGES;
                pipeline.wait_for_room(i);
                barrier_expect(&pipeline.full[stage], 2 * BOX * sizeof(element));
                load_box(tiles + stage * 2 * BOX, &map, &pipeline.full[stage], h * HS, first + QUERIES * i, b);
                load_box(tiles + stage * 2 * BOX + BOX, &dout_map, &pipeline.full[stage], h * HS, first + QUERIES * i, b);
            }
        } else if (threadIdx.x >= 64) {
            const int q = threadIdx.x - 64;
            for (int i = 0; i < count; i++) {
                const int stage = i % DKV_STAGES, r = first + QUERIES * i + q;
                const float log_sum = r < T ? lse[head + r] * LOG2E : 0.0f, dot = r < T ? D[head + r] : 0.0f;
                pipeline.wait_for_room(i);
                statistics[stage][0][q] = log_sum;
                statistics[stage][1][q] = dot;
                barrier_arrive(&pipeline.full[stage]);
            }
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int group_row = first + 64 * group, row = group_row + 16 * warp + g;
        const element* rows = inp + int64(b) * T * 3 * C + h * HS;
        uint32 k[4][4], v[4][4], p[QUERIES / 16][4], ds[QUERIES / 16][4];
        load_rows(k, rows + C, group_row + 16 * warp, T, 3 * C);
        load_rows(v, rows + 2 * C, group_row + 16 * warp, T, 3 * C);

        float s[QUERIES / 2], dp[QUERIES / 2], dk[32] = {}, dv[32] = {};  // s, dp transposed: keys down, queries across
        if (group > 0) pipeline.release(0);                               // these queries are all earlier
        const auto weights = [&](int i) {                                 // s = P of tile i
            const float* log_sums = statistics[i % DKV_STAGES][0];
#pragma unroll
            for (int j = 0; j < QUERIES / 2; j += 2) {
                const float2 log_sum = *reinterpret_cast<const float2*>(log_sums + j / 4 * 8 + 2 * t);
                s[j] = power_of_2(s[j] * TO_LOG2 - log_sum.x);
                s[j + 1] = power_of_2(s[j + 1] * TO_LOG2 - log_sum.y);
            }
            if (i == group) {  // the diagonal
#pragma unroll
                for (int j = 0; j < QUERIES / 2; j++) {
                    if (group_row + j / 4 * 8 + 2 * t + j % 2 < row + j % 4 / 2 * 8) s[j] = 0.0f;
                }
            }
        };
        const auto gradient_of_scores = [&](int i) {  // dp = dS of tile i
            const float* dots = statistics[i % DKV_STAGES][1];
#pragma unroll
            for (int j = 0; j < QUERIES / 2; j += 2) {
                const float2 dot = *reinterpret_cast<const float2*>(dots + j / 4 * 8 + 2 * t);
                dp[j] = s[j] * (dp[j] - dot.x);
                dp[j + 1] = s[j + 1] * (dp[j + 1] - dot.y);
            }
        };
        if (group < count) {
            const element* here = tiles + group * 2 * BOX;
            pipeline.wait(group);
            wgmma_fence();
            begin_product_transposed(s, k, here);
            wgmma_commit();
            begin_product_transposed(dp, v, here + BOX);
            wgmma_commit();
            wgmma_wait<1>();
            pin(s);
            weights(group);
            wgmma_wait<0>();
            pin(dp);
            gradient_of_scores(group);
            as_operand(p, s);
            as_operand(ds, dp);
            for (int i = group + 1; i < count; i++) {
                const element *before = here;
                here = tiles + i % DKV_STAGES * 2 * BOX;
                pipeline.wait(i);
                pin(s);
                pin(dp);
                pin(dk);
                pin(dv);
                wgmma_fence();
                begin_product_transposed(s, k, here);
                wgmma_commit();
                begin_product_transposed(dp, v, here + BOX);
                wgmma_commit();
                begin_product(dv, p, before + BOX);
                begin_product(dk, ds, before);
                wgmma_commit();
                wgmma_wait<2>();
                pin(s);
                weights(i);
                wgmma_wait<1>();
                pin(dp);
                gradient_of_scores(i);
                wgmma_wait<0>();
                pin(dk);
                pin(dv);
                pipeline.release(i - 1);
                as_operand(p, s);
                as_operand(ds, dp);
            }
            pin(dk);
            pin(dv);
            wgmma_fence();
            begin_product(dv, p, here + BOX);
            begin_product(dk, ds, here);
            wgmma_commit();
            wgmma_wait<0>();
            pin(dk);
            pin(dv);
        }
        element* dhead = dinp + int64(b) * T * 3 * C + h * HS;
        store_rows(dhead + C, dk, 1.0f / 8.0f, 1.0f / 8.0f, group_row + 16 * warp, T, 3 * C);
        store_rows(dhead + 2 * C, dv, 1.0f, 1.0f, group_row + 16 * warp, T, 3 * C);
        sum_rows(sums[group][0][warp], dk, 1.0f / 8.0f);
        sum_rows(sums[group][1][warp], dv, 1.0f);
        barrier_wait(OWN + group, GROUP);
        put_sums(partials, sums[group][0], C + h * HS, b, group_row, T);
        put_sums(partials, sums[group][1], 2 * C + h * HS, b, group_row, T);
    }
}
