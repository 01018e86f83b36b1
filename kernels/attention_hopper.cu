// Causal attention as in attention.cu, with the same kernels, arguments and formulas, for Hopper (sm_90a), heads of 64, TF32.
//
// A block is three warpgroups. The first one loads: it brings tiles of 64 rows from memory to shared memory, rounded to TF32.
// The other two compute: each has 64 rows of one head (queries; keys in attention_backward_dkv) in its registers, and
// multiplies them with the tiles as they come. While one of the two works on its softmax, the other one's products keep the
// tensor cores busy, and its own, too: those of P with a tile are begun together with the first products of the next tile, and
// waited for after the softmax of that. Meanwhile, the tile after it is being loaded.
//
// The tensor cores want the inner dimension of a tile contiguous. For query @ key^T that is how rows lie in memory; for
// P @ value it is the other way, so the loading group writes such tiles transposed. P comes out of the registers of the product
// before it, where a thread holds columns 2t and 2t + 1 of every 8, but goes in as columns t and t + 4: the transposed tiles
// have their columns in that order (`position`).
//
// Bound by the tensor cores (TF32: 1024 multiply-adds a cycle and multiprocessor, 32 cycles for a 64x64x8 product). Measured
// on an H200, B=16, T=1024, in a step: forward 131 TFLOP/s, dquery 147, dkv 164; the ladder is in dev/attention.md.

#include "hopper.cuh"

static_assert(sizeof(element) == 4 && TF32 && HS == 64, "elsewhere, attention.cu is used");

constexpr int THREADS = 3 * GROUP;
constexpr int ROWS = 2 * 64;  // of a block
constexpr int STAGES = 3;     // sets of tiles in shared memory: two worked on, one underway
constexpr int DKV_STAGES = 2; // one worked on: no room for more
constexpr int LOADER_REGISTERS = 120, COMPUTE_REGISTERS = 192;

// Barriers of stage s: its tiles are FULL + s loaded, EMPTY + s no longer needed; and one for each computing group.
constexpr int FULL = 1, EMPTY = FULL + STAGES, OWN = EMPTY + STAGES;

__device__ inline float round_tf32(float x) { return __uint_as_float(tf32(x)); }

// Where column c of a transposed tile is stored: of every 8, the even ones first.
__device__ inline int position(int c) { return (c & ~7) | (c & 1) << 2 | (c & 7) >> 1; }

// A tile on its way from global to shared memory, in the registers of one group. Step i of a warp is 4 rows, every other one, by
// 32 columns, 8 lanes to a row's 128 bytes: i % 2 is the half of the columns, i / 2 % 2 odd rows, i / 4 the next 8 rows.
struct Load {
    float4 x[8];
};

// Begin to read rows [row, row + 64) of one head; rows from T on are zeros.
__device__ inline void fetch(Load& load, const float* head, int row, int T, int row_stride) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    row += 16 * warp + lane / 8 * 2;
    const float* source = head + int64(row) * row_stride + lane % 8 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int down = i / 4 * 8 + i / 2 % 2;
        load.x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (row + down < T) load.x[i] = *reinterpret_cast<const float4*>(source + down * row_stride + i % 2 * 32);
    }
}

// Write it, rounded, to `tile` and transposed to `across` (either may be null). Each lane begins with another of its four floats,
// so that no bank is hit twice. In `place`, a step is an addition, and flips bits where the permutation of units takes part:
// few registers for many addresses.
__device__ inline void write(float* tile, float* across, const Load& load) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    const int r = 16 * warp + lane / 8 * 2, c = lane % 8 * 4, turn = lane / 2 % 4;
    const int at = place(r, c);
    const int at_across[4] = {place(c + turn, position(r)), place(c + (turn + 1) % 4, position(r)), place(c + (turn + 2) % 4, position(r)),
                              place(c + (turn + 3) % 4, position(r))};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int eights = i / 4, odd = i / 2 % 2, right = i % 2;
        const float4 x = load.x[i], y = {round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w)};
        if (tile) *reinterpret_cast<float4*>(tile + (at ^ odd * 4) + odd * 32 + eights * 256 + right * (TILE / 2)) = y;
        if (across) {
            const float4 one = turn % 2 ? float4{y.y, y.z, y.w, y.x} : y;
            const float4 turned = turn / 2 ? float4{one.z, one.w, one.x, one.y} : one;
            const int flip = odd * 4 | eights * 8;
            across[(at_across[0] ^ flip) + right * 1024] = turned.x;
            across[(at_across[1] ^ flip) + right * 1024] = turned.y;
            across[(at_across[2] ^ flip) + right * 1024] = turned.z;
            across[(at_across[3] ^ flip) + right * 1024] = turned.w;
        }
    }
}

// A computing warp's 16 rows of one head, from global memory, as the A operands of 8 products.
__device__ inline void load_rows(uint32 (&a)[8][4], const float* head, int row, int T, int row_stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 8; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + g + i % 2 * 8;
            a[k][i] = r < T ? tf32(head[int64(r) * row_stride + 8 * k + t + i / 2 * 4]) : 0;
        }
    }
}

// d (64,64) = rows (64,HS) @ tile (64,HS)^T, begun.
__device__ inline void begin_product_transposed(float (&d)[32], const uint32 (&rows)[8][4], const float* tile) {
    const unsigned long long b = describe(tile);  // once: the chain of operations that makes it would hold up every wgmma
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma(d, rows[k], b + part(k), k > 0);
}

__device__ inline void begin_product_transposed(float (&d)[32], const float* rows, const float* tile) {
    const unsigned long long a = describe(rows), b = describe(tile);
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma(d, a + part(k), b + part(k), k > 0);
}

// d (64,HS) += p (64,64) @ tile, which is stored transposed, begun. p must stay as it is until the product is done.
__device__ inline void begin_product(float (&d)[32], const uint32 (&p)[8][4], const float* across) {
    const unsigned long long b = describe(across);
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma(d, p[k], b + part(k), 1);
}

// A result of one product as the A operand of the next.
__device__ inline void as_operand(uint32 (&a)[8][4], const float (&d)[32]) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        a[k][0] = tf32(d[4 * k]);
        a[k][1] = tf32(d[4 * k + 2]);
        a[k][2] = tf32(d[4 * k + 1]);
        a[k][3] = tf32(d[4 * k + 3]);
    }
}

// Write a warp's 16 rows of a gradient of one head, times `factor`, and their column sums.
__device__ inline void store_rows(float* head, float* sums, const float (&d)[32], float factor, int row, int T) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 upper = {d[4 * n] * factor, d[4 * n + 1] * factor}, lower = {d[4 * n + 2] * factor, d[4 * n + 3] * factor};
        if (row + g < T) *reinterpret_cast<float2*>(head + int64(row + g) * 3 * C + 8 * n + 2 * t) = upper;
        if (row + g + 8 < T) *reinterpret_cast<float2*>(head + int64(row + g + 8) * 3 * C + 8 * n + 2 * t) = lower;
        float2 sum = {upper.x + lower.x, upper.y + lower.y};  // rows from T on are zeros
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            sum.x += __shfl_xor_sync(0xffffffff, sum.x, distance);
            sum.y += __shfl_xor_sync(0xffffffff, sum.y, distance);
        }
        if (g == 0) *reinterpret_cast<float2*>(sums + 8 * n + 2 * t) = sum;
    }
}

// Block (384); grid (NH, tiles of 128 queries, B), those with the most keys first. Shared memory: STAGES * 2 tiles and 1024 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(float* out, float* lse, const float* inp, int T) {
    extern __shared__ float4 shared[];
    float* tiles = tiles_of(shared);  // of each stage: key, value across
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const int count = (min(T, first + ROWS) + 63) / 64;  // tiles of keys that are not later than every query here

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        Load key, value;  // always one tile ahead; beyond the last one, rows that exist but are not wanted
        fetch(key, query + C, 0, T, 3 * C);
        fetch(value, query + 2 * C, 0, T, 3 * C);
        for (int i = 0; i < count; i++) {
            const int stage = i % STAGES;
            float* here = tiles + stage * 2 * TILE;
            if (i >= STAGES) barrier_wait(EMPTY + stage, THREADS);
            write(here, nullptr, key);
            fetch(key, query + C, 64 * (i + 1), T, 3 * C);
            write(nullptr, here + TILE, value);
            fetch(value, query + 2 * C, 64 * (i + 1), T, 3 * C);
            fence_for_async();
            barrier_arrive(FULL + stage, THREADS);
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int group_row = first + 64 * group, row = group_row + 16 * warp + g;  // the thread's rows: row, row + 8
        uint32 q[8][4], p[8][4];
        load_rows(q, query, group_row + 16 * warp, T, 3 * C);
        float s[32], o[32] = {}, largest[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f};
        const float to_log2 = LOG2E / 8.0f;  // 8 = sqrt(HS)

        const int own = min(count, group_row / 64 + 1);  // the others are later than all queries of this group

        float shrink[2];
        const auto softmax = [&](int start) { softmax_of_tile(s, largest, sum, shrink, to_log2, start == group_row, start, row); };

        barrier_wait(FULL, THREADS);
        wgmma_fence();
        begin_product_transposed(s, q, tiles);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        softmax(0);
        as_operand(p, s);
        for (int i = 1; i < own; i++) {
            barrier_wait(FULL + i % STAGES, THREADS);
            pin(s);
            pin(o);
            wgmma_fence();
            begin_product_transposed(s, q, tiles + i % STAGES * 2 * TILE);
            wgmma_commit();
            begin_product(o, p, tiles + (i - 1) % STAGES * 2 * TILE + TILE);
            wgmma_commit();
            wgmma_wait<1>();
            pin(s);
            softmax(64 * i);
            wgmma_wait<0>();
            pin(o);
            if (i - 1 + STAGES < count) barrier_arrive(EMPTY + (i - 1) % STAGES, THREADS);
#pragma unroll
            for (int j = 0; j < 32; j++) o[j] *= shrink[j % 4 / 2];
            as_operand(p, s);
        }
        pin(o);
        wgmma_fence();
        begin_product(o, p, tiles + (own - 1) % STAGES * 2 * TILE + TILE);
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        for (int i = own; i < count; i++) barrier_arrive(FULL + i % STAGES, THREADS);  // tiles for the other group only
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + 8 * k;
            const float total = quad_sum(sum[k]);
            if (r >= T) continue;
            if (t == 0) lse[(int64(b) * NH + h) * T + r] = (largest[k] * to_log2 + log2f(total)) * LN2;
            float* at = out + (int64(b) * T + r) * C + h * HS;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 pair = {o[4 * n + 2 * k] / total, o[4 * n + 2 * k + 1] / total};
                *reinterpret_cast<float2*>(at + 8 * n + 2 * t) = pair;
            }
        }
    }
    __syncthreads();  // no group leaves while another still waits at a barrier that it has arrived at
}

// dquery, and D for the kernel below. Block (384); grid (NH, tiles of 128 queries, B). Shared memory: STAGES * 3 + 2 tiles and 1024
// bytes. For want of registers, the rows of dout are in shared memory here, one tile for each computing group.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery(float* dinp, float* D, float* partials, const float* dout, const float* inp, const float* out, const float* lse,
                          int T) {
    extern __shared__ float4 shared[];
    __shared__ float sums[2][4][HS];
    float* tiles = tiles_of(shared);  // of each stage: key, key across, value
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const int count = (min(T, first + ROWS) + 63) / 64;

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        Load key, value;
        fetch(key, query + C, 0, T, 3 * C);
        fetch(value, query + 2 * C, 0, T, 3 * C);
        for (int i = 0; i < count; i++) {
            const int stage = i % STAGES;
            float* here = tiles + stage * 3 * TILE;
            if (i >= STAGES) barrier_wait(EMPTY + stage, THREADS);
            write(here, here + TILE, key);
            fetch(key, query + C, 64 * (i + 1), T, 3 * C);
            write(here + 2 * TILE, nullptr, value);
            fetch(value, query + 2 * C, 64 * (i + 1), T, 3 * C);
            fence_for_async();
            barrier_arrive(FULL + stage, THREADS);
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int group_row = first + 64 * group, row = group_row + 16 * warp + g;
        const int64 rows = int64(b) * T * C + h * HS, head = (int64(b) * NH + h) * T;
        float* d = tiles + (STAGES * 3 + group) * TILE;
        {
            Load rows_of_dout;
            fetch(rows_of_dout, dout + rows, group_row, T, C);
            write(d, nullptr, rows_of_dout);
        }
        fence_for_async();
        barrier_wait(OWN + group, GROUP);
        uint32 q[8][4], p[8][4];
        load_rows(q, query, group_row + 16 * warp, T, 3 * C);
        float dot[2] = {0.0f, 0.0f}, log_sum[2] = {0.0f, 0.0f};  // D and lse of the thread's rows; zeros from T on, like their dout
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + 8 * k;
            if (r < T) {
                const int64 at = rows + int64(r) * C + 16 * t;
#pragma unroll
                for (int c = 0; c < 16; c += 4) {
                    const float4 x = *reinterpret_cast<const float4*>(dout + at + c), y = *reinterpret_cast<const float4*>(out + at + c);
                    dot[k] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
                }
                log_sum[k] = lse[head + r] * LOG2E;
            }
            dot[k] = quad_sum(dot[k]);
            if (t == 0 && r < T) D[head + r] = dot[k];
        }

        float s[32], dp[32], dq[32] = {};
        const int own = min(count, group_row / 64 + 1);
        const auto weights = [&](int start) {  // s = P
#pragma unroll
            for (int j = 0; j < 32; j++) s[j] = power_of_2(s[j] * (LOG2E / 8.0f) - log_sum[j % 4 / 2]);
            if (start == group_row) {  // the diagonal
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = 0.0f;
                }
            }
        };

        barrier_wait(FULL, THREADS);
        wgmma_fence();
        begin_product_transposed(s, q, tiles);
        begin_product_transposed(dp, d, tiles + 2 * TILE);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        weights(0);
#pragma unroll
        for (int j = 0; j < 32; j++) s[j] *= dp[j] - dot[j % 4 / 2];
        as_operand(p, s);
        for (int i = 1; i < own; i++) {
            barrier_wait(FULL + i % STAGES, THREADS);
            pin(s);
            pin(dp);
            pin(dq);
            wgmma_fence();
            begin_product_transposed(s, q, tiles + i % STAGES * 3 * TILE);
            wgmma_commit();
            begin_product_transposed(dp, d, tiles + i % STAGES * 3 * TILE + 2 * TILE);
            wgmma_commit();
            begin_product(dq, p, tiles + (i - 1) % STAGES * 3 * TILE + TILE);
            wgmma_commit();
            wgmma_wait<2>();
            pin(s);
            weights(64 * i);
            wgmma_wait<1>();
            pin(dp);
#pragma unroll
            for (int j = 0; j < 32; j++) s[j] *= dp[j] - dot[j % 4 / 2];
            wgmma_wait<0>();
            pin(dq);
            if (i - 1 + STAGES < count) barrier_arrive(EMPTY + (i - 1) % STAGES, THREADS);
            as_operand(p, s);
        }
        pin(dq);
        wgmma_fence();
        begin_product(dq, p, tiles + (own - 1) % STAGES * 3 * TILE + TILE);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dq);
        for (int i = own; i < count; i++) barrier_arrive(FULL + i % STAGES, THREADS);  // tiles for the other group only
        store_rows(dinp + int64(b) * T * 3 * C + h * HS, sums[group][warp], dq, 1.0f / 8.0f, group_row + 16 * warp, T);
        barrier_wait(OWN + group, GROUP);
        const int c = threadIdx.x % GROUP;
        if (c < HS && group_row < T) {
            const int64 tile = int64(b) * ((T + 63) / 64) + group_row / 64;
            partials[tile * 3 * C + h * HS + c] = sums[group][0][c] + sums[group][1][c] + sums[group][2][c] + sums[group][3][c];
        }
    }
    __syncthreads();  // no group leaves while another still waits at a barrier that it has arrived at
}

// dkey and dvalue; the rows are keys, and queries pass. Block (384); grid (NH, tiles of 128 keys, B). Shared memory: DKV_STAGES * 4
// + 2 tiles and 1024 bytes. The rows of key are in shared memory, too.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv(float* dinp, float* partials, const float* dout, const float* inp, const float* lse, const float* D, int T) {
    extern __shared__ float4 shared[];
    __shared__ float sums[2][2][4][HS], statistics[DKV_STAGES][2][64];  // lse in units of log2, and D, of the passing queries
    float* tiles = tiles_of(shared);  // of each stage: query, query across, dout, dout across
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = blockIdx.y * ROWS;  // the first keys have the most queries
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const float* dhead = dout + int64(b) * T * C + h * HS;
    const int64 head = (int64(b) * NH + h) * T;
    const int count = (T - first + 63) / 64;  // tiles of queries from the first key on

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        Load q, d;
        float statistic;
        const auto fetch_statistic = [&](int start) {  // threads 0 .. 63 lse, the others D; zeros from T on, like dout
            const int r = start + threadIdx.x % 64;
            const float* source = threadIdx.x < 64 ? lse : D;
            statistic = r < T ? source[head + r] * (threadIdx.x < 64 ? LOG2E : 1.0f) : 0.0f;
        };
        fetch(q, query, first, T, 3 * C);
        fetch(d, dhead, first, T, C);
        fetch_statistic(first);
        for (int i = 0; i < count; i++) {
            const int stage = i % DKV_STAGES, next = first + 64 * (i + 1);
            float* here = tiles + stage * 4 * TILE;
            if (i >= DKV_STAGES) barrier_wait(EMPTY + stage, THREADS);
            write(here, here + TILE, q);
            fetch(q, query, next, T, 3 * C);
            write(here + 2 * TILE, here + 3 * TILE, d);
            fetch(d, dhead, next, T, C);
            statistics[stage][threadIdx.x / 64][threadIdx.x % 64] = statistic;
            fetch_statistic(next);
            fence_for_async();
            barrier_arrive(FULL + stage, THREADS);
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int group_row = first + 64 * group, row = group_row + 16 * warp + g;
        float* k = tiles + (DKV_STAGES * 4 + group) * TILE;
        {
            Load rows;
            fetch(rows, query + C, group_row, T, 3 * C);
            write(k, nullptr, rows);
        }
        fence_for_async();
        barrier_wait(OWN + group, GROUP);
        uint32 v[8][4], p[8][4], ds[8][4];
        load_rows(v, query + 2 * C, group_row + 16 * warp, T, 3 * C);

        float s[32], dp[32], dk[32] = {}, dv[32] = {};  // s, dp transposed: keys down, queries across
        for (int i = 0; i < count; i++) {
            const int stage = i % DKV_STAGES, start = first + 64 * i;
            const float* here = tiles + stage * 4 * TILE;
            barrier_wait(FULL + stage, THREADS);
            if (start >= group_row) {  // else all of these queries come earlier
                pin(s);
                pin(dp);
                wgmma_fence();
                begin_product_transposed(s, k, here);
                wgmma_commit();
                begin_product_transposed(dp, v, here + 2 * TILE);
                wgmma_commit();
                wgmma_wait<1>();
                pin(s);
#pragma unroll
                for (int j = 0; j < 32; j++) s[j] = power_of_2(s[j] * (LOG2E / 8.0f) - statistics[stage][0][j / 4 * 8 + 2 * t + j % 2]);
                if (start == group_row) {  // the diagonal
#pragma unroll
                    for (int j = 0; j < 32; j++) {
                        if (start + j / 4 * 8 + 2 * t + j % 2 < row + j % 4 / 2 * 8) s[j] = 0.0f;
                    }
                }
                as_operand(p, s);
                wgmma_wait<0>();
                pin(dp);
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    // s again, with no register of its own
                    const float rounded = __uint_as_float(p[j / 4][j % 2 * 2 + j % 4 / 2] & 0xffffe000);
                    dp[j] = rounded * (dp[j] - statistics[stage][1][j / 4 * 8 + 2 * t + j % 2]);
                }
                as_operand(ds, dp);
                pin(dv);
                pin(dk);
                wgmma_fence();
                begin_product(dv, p, here + 3 * TILE);
                begin_product(dk, ds, here + TILE);
                wgmma_commit();
                wgmma_wait<0>();
                pin(dv);
                pin(dk);
            }
            if (i + DKV_STAGES < count) barrier_arrive(EMPTY + stage, THREADS);
        }
        float* dhead_inp = dinp + int64(b) * T * 3 * C + h * HS;
        store_rows(dhead_inp + C, sums[group][0][warp], dk, 1.0f / 8.0f, group_row + 16 * warp, T);
        store_rows(dhead_inp + 2 * C, sums[group][1][warp], dv, 1.0f, group_row + 16 * warp, T);
        barrier_wait(OWN + group, GROUP);
        const int kind = threadIdx.x % GROUP / HS, c = threadIdx.x % HS;  // 0: dkey, 1: dvalue
        if (group_row < T) {
            const int64 tile = int64(b) * ((T + 63) / 64) + group_row / 64;
            const float(*parts)[HS] = sums[group][kind];
            partials[tile * 3 * C + (1 + kind) * C + h * HS + c] = parts[0][c] + parts[1][c] + parts[2][c] + parts[3][c];
        }
    }
    __syncthreads();  // no group leaves while another still waits at a barrier that it has arrived at
}
