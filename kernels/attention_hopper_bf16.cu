// Causal attention as in attention.cu, with the same formulas, for Hopper (sm_90a), heads of 64, bfloat16.
//
// A block takes items one after the other, 128 rows of one head, queries or, in attention_backward_dkv, keys: one block stays on each
// multiprocessor or, where there are few items, each item has its block. A block is three warpgroups. One thread of the first
// one loads: it has TMA bring the item's rows, and tiles of 64 or 128 rows of what passes by them, from the packed tensors to
// shared memory, always some tiles ahead, over the end of an item, too. The other two groups compute: each takes 64 of the rows
// into registers, as the A operands of the tensor cores, and multiplies them with the tiles as they come. S, P, dP and dS live
// in registers only, and a tile serves as either operand as it lies: rows are the inner dimension of S = query @ key^T, columns
// that of P @ value.
//
// Products are begun and waited for apart: those of P with a tile run while the softmax of the next tile is worked out, and
// what one group leaves idle of the tensor cores, the other one takes.
//
// The maps that TMA goes by are made by train_gpt2_cuda.py: of inp (B,T,3C), dout and out (B,T,C), boxes of 64 rows by HS columns, and of
// what a kernel writes, of 16 rows. Rows from T on arrive as zeros, and are not written.
//
// Bound by the tensor cores (2048 multiply-adds a cycle and multiprocessor) and, as much, by exp (16 a cycle: for each element
// of P, as long as its two products with heads of 64). H200, B=64, T=1024: 346 TFLOP/s forward, 329 backward (five products counted,
// seven done); cuDNN 344 and 254. The ladder is in dev/attention.md.

#include "hopper.cuh"
#include "mma.cuh"

static_assert(sizeof(element) == 2 && HS == 64, "elsewhere, attention_bf16.cu or attention.cu is used");

constexpr int GROUPS = 2;  // that compute
constexpr int THREADS = (1 + GROUPS) * GROUP;
constexpr int ROWS = GROUPS * 64;  // of an item
constexpr int LOADER_REGISTERS = 24, COMPUTE_REGISTERS = 240;
constexpr int BOX = 64 * HS;       // elements of a box: 64 rows
constexpr int BOX_BYTES = BOX * sizeof(element);

// Boxes of each passing tensor that make a tile, and tiles that there is room for.
constexpr int FORWARD_BOXES = 2, FORWARD_STAGES = 4;
constexpr int DQUERY_STAGES = 8, DKV_STAGES = 8;  // of one box each

// An item of work: 128 rows of one head, from row 128 * tile on.
struct Item {
    int tile, h, b;
};

// This block's item number `round`; false when there are no more. Items come in the order of w: first tile 0 of all heads, then tile 1 ...
// The blocks take turns forwards and backwards, because tiles get cheaper along the way (or, counted from the end, dearer first).
__device__ inline bool pick(Item& item, int round, int T, const Divisor& heads) {
    const int blocks = gridDim.x, w = round * blocks + (round % 2 ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x));
    const int tile = heads.quotient(w), head = w - tile * heads.by;
    item = {tile, head % NH, head / NH};
    return tile < (T + ROWS - 1) / ROWS;
}

// All threads of the block, before anything else: the rings' barriers, for so many arrivals beside the announced bytes.
template <int STAGES, int LANES>
__device__ inline void make_rings(Ring<1, LANES>& rows, int row_arrivals, Ring<STAGES>& ring, int arrivals) {
    if (threadIdx.x == 0) {
        rows.make(row_arrivals, 4 * GROUPS);
        ring.make(arrivals, 4 * GROUPS);
        fence_barriers();
    }
    __syncthreads();
}

// By the loading thread: tile number n of the ring, BOXES boxes of keys and as many of values.
template <int BOXES, int STAGES>
__device__ inline void load_keys_and_values(Ring<STAGES>& ring, int n, element* tiles, const TensorMap& map, int column, int start, int b) {
    const int stage = n % STAGES;
    element* here = tiles + stage * 2 * BOXES * BOX;
    ring.wait_for_room(n);
    barrier_expect(&ring.full[stage], 2 * BOXES * BOX_BYTES);
    for (int j = 0; j < BOXES; j++) {
        load_box(here + j * BOX, &map, &ring.full[stage], C + column, start + 64 * j, b);
        load_box(here + (BOXES + j) * BOX, &map, &ring.full[stage], 2 * C + column, start + 64 * j, b);
    }
}

// This warp's 16 rows of a box as the A operands of 4 products.
__device__ inline void read_rows(uint32 (&a)[4][4], const element* box) {
    const int lane = threadIdx.x % 32, r = threadIdx.x % GROUP / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4; k++) load_tiles<0>(a[k], box + r * 64 + ((2 * k + lane / 16) ^ r % 8) * 8);
}

// Write a warp's 16 rows (16,64) of one head, times a factor for each of the thread's two rows, by way of `room`, a quarter of a box; all
// but the newest PENDING of the warp's rooms are to be free then.
template <int PENDING>
__device__ inline void store_rows(const TensorMap& map, element* room, const float (&d)[32], float upper, float lower, int column, int row,
                                  int b) {
    const int lane = threadIdx.x % 32, r = lane % 16;
    if (lane == 0) stores_wait<PENDING>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float* x = d + 8 * k;
        store_tiles({as_pair(x[0] * upper, x[1] * upper), as_pair(x[2] * lower, x[3] * lower), as_pair(x[4] * upper, x[5] * upper),
                     as_pair(x[6] * lower, x[7] * lower)},
                    room + r * 64 + ((2 * k + lane / 16) ^ r % 8) * 8);
    }
    fence_for_async();
    __syncwarp();
    if (lane == 0) {
        store_box(&map, room, column, row, b);
        stores_commit();
    }
}

// sums[c] = the sum over the warp's 16 rows, times `factor`.
__device__ inline void sum_rows(float* sums, const float (&d)[32], float factor) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float v[16];
#pragma unroll
    for (int k = 0; k < 16; k++) v[k] = (d[k / 2 * 4 + k % 2] + d[k / 2 * 4 + k % 2 + 2]) * factor;
    halve<8, 1>(v);
    halve<4, 2>(v);
    halve<2, 4>(v);
    const int n = g % 2 * 4 + g / 2 % 2 * 2 + g / 4;
    *reinterpret_cast<float2*>(sums + 8 * n + 2 * t) = float2{v[0], v[1]};
}

// d (64,n) = rows (64,HS) @ tile (n,HS)^T, begun.
template <int N>
__device__ inline void begin_product_transposed(float (&d)[N], const uint32 (&rows)[4][4], const element* tile) {
    const unsigned long long b = describe(tile);  // once: the chain of operations that makes it would hold up every wgmma
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<0>(d, rows[k], b + k * 2, k > 0);  // 16 columns are 32 bytes
}

// d (64,HS) += p (64,n) @ tile (n,HS), begun. p must stay as it is until the product is done, which has to be before the end of the
// loop's body: over the end, the compiler (CUDA 13.0) loses sight of it, and gives its registers to the rows.
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

// The bias's share of an item: partials[tile, c] = the sums of the four warps of this group.
__device__ inline void put_sums(float* partials, const float (&sums)[4][HS], int column, int b, int group_row, int T) {
    const int c = threadIdx.x % GROUP;
    if (c >= HS || group_row >= T) return;
    const int64 tile = int64(b) * ((T + 63) / 64) + group_row / 64;
    partials[tile * 3 * C + column + c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
}

constexpr float TO_LOG2 = LOG2E / 8.0f;  // 8 = sqrt(HS)
constexpr int OWN = 1;                   // the first of the hardware's barriers for one group alone

// Block (384); grid (any number of blocks, which share out the items). Shared memory: 4 + FORWARD_STAGES * 2 * FORWARD_BOXES boxes and 1024
// bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(element* out, float* lse, const element* inp, int T, int B, const __grid_constant__ TensorMap map,
                  const __grid_constant__ TensorMap out_map) {
    extern __shared__ float4 shared[];
    __shared__ Ring<1> rows;
    __shared__ Ring<FORWARD_STAGES> ring;
    constexpr int KEYS = FORWARD_BOXES * 64, TILE = FORWARD_BOXES * BOX;
    element* const queries = tiles_of(shared);
    element* const rooms = queries + GROUPS * BOX;  // for each warp: of out, until TMA has read it
    element* const tiles = rooms + GROUPS * BOX;    // of each stage: key, value
    const int last_tile = (T - 1) / ROWS;
    make_rings(rows, 1, ring, 1);
    const Divisor heads(NH * B);
    Item item;

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
                const int first = (last_tile - item.tile) * ROWS, column = item.h * HS;
                rows.wait_for_room(round);
                barrier_expect(&rows.full[0], GROUPS * BOX_BYTES);
                for (int j = 0; j < GROUPS; j++) load_box(queries + j * BOX, &map, &rows.full[0], column, first + 64 * j, item.b);
                for (int start = 0; start < min(T, first + ROWS); start += KEYS, n++) {
                    load_keys_and_values<FORWARD_BOXES>(ring, n, tiles, map, column, start, item.b);
                }
            }
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        element* const room = rooms + (group * 4 + warp) * (BOX / 4);
        for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
            const int first = (last_tile - item.tile) * ROWS;
            const int group_row = first + 64 * group, row = group_row + 16 * warp + g;  // the thread's rows: row, row + 8
            uint32 q[4][4], p[KEYS / 16][4];
            rows.wait(round);
            read_rows(q, queries + group * BOX);
            rows.release(round);
            float s[KEYS / 2], o[32] = {}, largest[2] = {-INFINITE, -INFINITE}, sum[2] = {0.0f, 0.0f}, shrink[2];
            const int count = (min(T, first + ROWS) + KEYS - 1) / KEYS;  // tiles of keys that are not later than every query here
            static_assert(KEYS == ROWS, "both groups need the same tiles");

            const auto softmax = [&](int start) {
                softmax_of_tile(s, largest, sum, shrink, TO_LOG2, start + KEYS > group_row, start, row);
            };

            ring.wait(n);
            wgmma_fence();
            begin_product_transposed(s, q, tiles + n % FORWARD_STAGES * 2 * TILE);
            wgmma_commit();
            wgmma_wait<0>();
            pin(s);
            softmax(0);
            as_operand(p, s);
            for (int i = 1; i < count; i++) {
                n++;
                ring.wait(n);
                pin(s);
                pin(o);
                wgmma_fence();
                begin_product_transposed(s, q, tiles + n % FORWARD_STAGES * 2 * TILE);
                wgmma_commit();
                begin_product(o, p, tiles + (n - 1) % FORWARD_STAGES * 2 * TILE + TILE);
                wgmma_commit();
                wgmma_wait<1>();
                pin(s);
                softmax(KEYS * i);
                wgmma_wait<0>();
                pin(o);
                ring.release(n - 1);
#pragma unroll
                for (int j = 0; j < 32; j++) o[j] *= shrink[j % 4 / 2];
                as_operand(p, s);
            }
            pin(o);
            wgmma_fence();
            begin_product(o, p, tiles + n % FORWARD_STAGES * 2 * TILE + TILE);
            wgmma_commit();
            sum[0] = quad_sum(sum[0]);
            sum[1] = quad_sum(sum[1]);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int r = row + 8 * k;
                if (t == 0 && r < T) lse[(int64(item.b) * NH + item.h) * T + r] = largest[k] / 8.0f + log2f(sum[k]) * LN2;
            }
            wgmma_wait<0>();
            pin(o);
            ring.release(n++);
            store_rows<0>(out_map, room, o, 1.0f / sum[0], 1.0f / sum[1], item.h * HS, group_row + 16 * warp, item.b);
        }
        if (threadIdx.x % 32 == 0) stores_wait<0>();  // shared memory stays until TMA has read it
    }
}

// dquery, and D for attention_backward_dkv. Block (384); grid as above. Shared memory: 8 + DQUERY_STAGES * 2 boxes and 1024 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery(element* dinp, float* D, float* partials, const element* dout, const element* inp, const element* out,
                          const float* lse, int T, int B, const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap dout_map,
                          const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap dinp_map) {
    extern __shared__ float4 shared[];
    __shared__ Ring<1, 32> rows;
    __shared__ Ring<DQUERY_STAGES> ring;
    __shared__ float sums[GROUPS][4][HS], log_sums[ROWS];  // lse in units of log2 of the item's rows
    constexpr int KEYS = 64;
    element* const queries = tiles_of(shared);
    element* const dqueries = queries + GROUPS * BOX;  // dout
    element* const outs = dqueries + GROUPS * BOX;
    element* const rooms = outs + GROUPS * BOX;        // for each warp: of dquery
    element* const tiles = rooms + GROUPS * BOX;       // of each stage: key, value
    const int last_tile = (T - 1) / ROWS;
    make_rings(rows, 1 + 64, ring, 1);
    const Divisor heads(NH * B);
    Item item;

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
                const int first = (last_tile - item.tile) * ROWS, column = item.h * HS;
                rows.wait_for_room(round);
                barrier_expect(&rows.full[0], 3 * GROUPS * BOX_BYTES);
                for (int j = 0; j < GROUPS; j++) {
                    load_box(dqueries + j * BOX, &dout_map, &rows.full[0], column, first + 64 * j, item.b);
                    load_box(outs + j * BOX, &out_map, &rows.full[0], column, first + 64 * j, item.b);
                    load_box(queries + j * BOX, &map, &rows.full[0], column, first + 64 * j, item.b);
                }
                for (int start = 0; start < min(T, first + ROWS); start += KEYS, n++) {
                    load_keys_and_values<1>(ring, n, tiles, map, column, start, item.b);
                }
            }
        } else if (threadIdx.x >= 64) {
            for (int round = 0; pick(item, round, T, heads); round++) {
                const int r = threadIdx.x - 64, first = (last_tile - item.tile) * ROWS;
                const float* from = lse + (int64(item.b) * NH + item.h) * T;
                const float upper = first + r < T ? from[first + r] : 0.0f, lower = first + 64 + r < T ? from[first + 64 + r] : 0.0f;
                rows.wait_for_room(round);
                log_sums[r] = upper * LOG2E;
                log_sums[64 + r] = lower * LOG2E;
                barrier_arrive(&rows.full[0]);
            }
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        element* const room = rooms + (group * 4 + warp) * (BOX / 4);
        for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
            const int first = (last_tile - item.tile) * ROWS;
            const int group_row = first + 64 * group, row = group_row + 16 * warp + g;
            uint32 q[4][4], d[4][4], ds[KEYS / 16][4];
            float dot[2] = {0.0f, 0.0f};  // D of the thread's rows
            rows.wait(round);
            read_rows(d, dqueries + group * BOX);
            read_rows(q, outs + group * BOX);
            const float log_sum[2] = {log_sums[row - first], log_sums[row - first + 8]};
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 x = as_floats(q[k][i]), y = as_floats(d[k][i]);
                    dot[i % 2] += x.x * y.x + x.y * y.y;
                }
            }
            read_rows(q, queries + group * BOX);
            rows.release(round);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                dot[k] = quad_sum(dot[k]);
                if (t == 0 && row + 8 * k < T) D[(int64(item.b) * NH + item.h) * T + row + 8 * k] = dot[k];
            }

            float s[KEYS / 2], dp[KEYS / 2], dq[32] = {};
            const int count = (min(T, first + ROWS) + KEYS - 1) / KEYS;
            const int own = min(count, group_row / KEYS + 1);  // the others are later than all queries of this group
            const auto weights = [&](int start) {              // s = P
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++) s[j] = power_of_2(s[j] * TO_LOG2 - log_sum[j % 4 / 2]);
                if (start == group_row) {  // the diagonal
#pragma unroll
                    for (int j = 0; j < KEYS / 2; j++) {
                        if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = 0.0f;
                    }
                }
            };

            const element* here = tiles + n % DQUERY_STAGES * 2 * BOX;
            ring.wait(n);
            wgmma_fence();
            begin_product_transposed(s, q, here);
            wgmma_commit();
            begin_product_transposed(dp, d, here + BOX);
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
                const element* before = here;
                n++;
                here = tiles + n % DQUERY_STAGES * 2 * BOX;
                ring.wait(n);
                pin(s);
                pin(dp);
                pin(dq);
                wgmma_fence();
                begin_product_transposed(s, q, here);
                wgmma_commit();
                begin_product_transposed(dp, d, here + BOX);
                wgmma_commit();
                begin_product(dq, ds, before);
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
                ring.release(n - 1);
                as_operand(ds, s);
            }
            pin(dq);
            wgmma_fence();
            begin_product(dq, ds, here);
            wgmma_commit();
            wgmma_wait<0>();
            pin(dq);
            ring.release(n++);
            for (int i = own; i < count; i++, n++) {  // tiles for the other group only
                ring.wait(n);
                ring.release(n);
            }
            store_rows<0>(dinp_map, room, dq, 1.0f / 8.0f, 1.0f / 8.0f, item.h * HS, group_row + 16 * warp, item.b);
            barrier_wait(OWN + group, GROUP);  // the sums of the item before are read
            sum_rows(sums[group][warp], dq, 1.0f / 8.0f);
            barrier_wait(OWN + group, GROUP);
            put_sums(partials, sums[group], item.h * HS, item.b, group_row, T);
        }
        if (threadIdx.x % 32 == 0) stores_wait<0>();
    }
}

// dkey and dvalue; the rows are keys, and queries pass. Block (384); grid as above. Shared memory: 8 + DKV_STAGES * 2 boxes and 1024 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv(element* dinp, float* partials, const element* dout, const element* inp, const float* lse, const float* D, int T,
                       int B, const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap dinp_map) {
    extern __shared__ float4 shared[];
    __shared__ Ring<1> rows;
    __shared__ Ring<DKV_STAGES> ring;
    __shared__ float sums[GROUPS][2][4][HS], statistics[DKV_STAGES][2][64];  // lse in units of log2, and D, of the passing queries
    constexpr int QUERIES = 64;
    element* const keys = tiles_of(shared);
    element* const values = keys + GROUPS * BOX;
    element* const rooms = values + GROUPS * BOX;     // for each warp: of dkey, of dvalue
    element* const tiles = rooms + 2 * GROUPS * BOX;  // of each stage: query, dout
    make_rings(rows, 1, ring, 1 + 64);
    const Divisor heads(NH * B);
    Item item;  // the first keys have the most queries

    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
                const int first = item.tile * ROWS, column = item.h * HS;
                rows.wait_for_room(round);
                barrier_expect(&rows.full[0], 2 * GROUPS * BOX_BYTES);
                for (int j = 0; j < GROUPS; j++) {
                    load_box(keys + j * BOX, &map, &rows.full[0], C + column, first + 64 * j, item.b);
                    load_box(values + j * BOX, &map, &rows.full[0], 2 * C + column, first + 64 * j, item.b);
                }
                for (int start = first; start < T; start += QUERIES, n++) {
                    const int stage = n % DKV_STAGES;
                    element* here = tiles + stage * 2 * BOX;
                    ring.wait_for_room(n);
                    barrier_expect(&ring.full[stage], 2 * BOX_BYTES);
                    load_box(here, &map, &ring.full[stage], column, start, item.b);
                    load_box(here + BOX, &dout_map, &ring.full[stage], column, start, item.b);
                }
            }
        } else if (threadIdx.x >= 64) {
            const int q = threadIdx.x - 64;
            for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
                const int64 head = (int64(item.b) * NH + item.h) * T;
                for (int start = item.tile * ROWS; start < T; start += QUERIES, n++) {
                    const int stage = n % DKV_STAGES, r = start + q;
                    const float log_sum = r < T ? lse[head + r] * LOG2E : 0.0f, dot = r < T ? D[head + r] : 0.0f;
                    ring.wait_for_room(n);
                    statistics[stage][0][q] = log_sum;
                    statistics[stage][1][q] = dot;
                    barrier_arrive(&ring.full[stage]);
                }
            }
        }
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int group = warpgroup() - 1, warp = threadIdx.x % GROUP / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        element* const room = rooms + (group * 4 + warp) * (BOX / 2);
        for (int round = 0, n = 0; pick(item, round, T, heads); round++) {
            const int first = item.tile * ROWS, group_row = first + 64 * group, row = group_row + 16 * warp + g;
            const int count = (T - first + QUERIES - 1) / QUERIES;  // tiles of queries from the first key on
            uint32 k[4][4], v[4][4], p[QUERIES / 16][4], ds[QUERIES / 16][4];
            rows.wait(round);
            read_rows(k, keys + group * BOX);
            read_rows(v, values + group * BOX);
            rows.release(round);

            float s[QUERIES / 2], dp[QUERIES / 2], dk[32] = {}, dv[32] = {};  // s, dp transposed: keys down, queries across
            const auto weights = [&](int stage, bool diagonal) {              // s = P
#pragma unroll
                for (int j = 0; j < QUERIES / 2; j += 2) {
                    const float2 log_sum = *reinterpret_cast<const float2*>(&statistics[stage][0][j / 4 * 8 + 2 * t]);
                    s[j] = power_of_2(s[j] * TO_LOG2 - log_sum.x);
                    s[j + 1] = power_of_2(s[j + 1] * TO_LOG2 - log_sum.y);
                }
                if (diagonal) {
#pragma unroll
                    for (int j = 0; j < QUERIES / 2; j++) {
                        if (group_row + j / 4 * 8 + 2 * t + j % 2 < row + j % 4 / 2 * 8) s[j] = 0.0f;
                    }
                }
            };
            const auto gradient_of_scores = [&](int stage) {  // dp = dS
#pragma unroll
                for (int j = 0; j < QUERIES / 2; j += 2) {
                    const float2 dot = *reinterpret_cast<const float2*>(&statistics[stage][1][j / 4 * 8 + 2 * t]);
                    dp[j] = s[j] * (dp[j] - dot.x);
                    dp[j + 1] = s[j + 1] * (dp[j + 1] - dot.y);
                }
            };
            for (int i = 0; i < min(group, count); i++, n++) {  // these queries are all earlier
                ring.wait(n);
                ring.release(n);
            }
            if (group < count) {
                const element* here = tiles + n % DKV_STAGES * 2 * BOX;
                ring.wait(n);
                wgmma_fence();
                begin_product_transposed(s, k, here);
                wgmma_commit();
                begin_product_transposed(dp, v, here + BOX);
                wgmma_commit();
                wgmma_wait<1>();
                pin(s);
                weights(n % DKV_STAGES, true);
                wgmma_wait<0>();
                pin(dp);
                gradient_of_scores(n % DKV_STAGES);
                as_operand(p, s);
                as_operand(ds, dp);
                for (int i = group + 1; i < count; i++) {
                    const element* before = here;
                    n++;
                    here = tiles + n % DKV_STAGES * 2 * BOX;
                    ring.wait(n);
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
                    weights(n % DKV_STAGES, false);
                    wgmma_wait<1>();
                    pin(dp);
                    gradient_of_scores(n % DKV_STAGES);
                    wgmma_wait<0>();
                    pin(dk);
                    pin(dv);
                    ring.release(n - 1);
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
                ring.release(n++);
            }
            store_rows<1>(dinp_map, room, dk, 1.0f / 8.0f, 1.0f / 8.0f, C + item.h * HS, group_row + 16 * warp, item.b);
            store_rows<1>(dinp_map, room + BOX / 4, dv, 1.0f, 1.0f, 2 * C + item.h * HS, group_row + 16 * warp, item.b);
            barrier_wait(OWN + group, GROUP);  // the sums of the item before are read
            sum_rows(sums[group][0][warp], dk, 1.0f / 8.0f);
            sum_rows(sums[group][1][warp], dv, 1.0f);
            barrier_wait(OWN + group, GROUP);
            put_sums(partials, sums[group][0], C + item.h * HS, item.b, group_row, T);
            put_sums(partials, sums[group][1], 2 * C + item.h * HS, item.b, group_row, T);
        }
        if (threadIdx.x % 32 == 0) stores_wait<0>();
    }
}
