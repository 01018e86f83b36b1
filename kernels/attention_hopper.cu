// Causal attention for Hopper (sm_90a), heads of 64, TF32, with the same kernels, arguments and formulas as
// attention.cu. Read attention_hopper_bf16.cu first: it has the same pipeline and is easier.
//
// A block has 128 rows of one head: queries or, in attention_backward_dkv, keys and values. These rows are resident:
// they stay on the chip while tiles of 64 rows of the other tensors stream by. Data flow of a tile:
//
//     a tile   --loads--> registers --round to TF32, transpose, swizzle--> shared memory --wgmma--> registers: S, P, O
//     O        --stores--> global memory
//
// The producer warpgroup loads tiles into registers, one tile ahead, and writes them to shared memory. TMA could
// neither round nor transpose them. In TF32, wgmma needs both operands K-major: contiguous along the inner dimension.
// For S = Q K^T, rows lie in memory that way; for O += P V they do not, so tiles for that are stored transposed. Each
// of the two consumer warpgroups multiplies 64 of the resident rows by the tiles. While it computes a softmax, the
// tensor cores are busy with the other consumer's matmuls and with its own: it issues O += P V of a tile together with
// S = Q K^T of the next tile, and waits for O only after the softmax of that S.
//
// Of every 8 columns of P, a thread gets columns 2t and 2t + 1 from one wgmma, but the next wgmma expects columns t and
// t + 4 from it. The inner dimension of a matmul may be in any order that both operands share, so the transposed tiles
// are stored in P's order (`in_order_of_P`).
//
// The stages of the ring are guarded by named barriers, because threads fill and empty them, not TMA.
//
// Bound by the tensor cores (TF32: 1024 multiply-adds per cycle and multiprocessor, 32 cycles for a 64x64x8 matmul).
// Measured on an H200, B=16, T=1024, in a step: forward 131 TFLOP/s, dquery 147, dkv 164; the steps from a simple
// kernel to this one are in dev/attention.md.

#include "hopper.cuh"

static_assert(sizeof(element) == 4 && TF32 && HS == 64, "elsewhere, attention.cu is used");

constexpr int THREADS = ATTENTION_THREADS;
constexpr int ROWS = ATTENTION_FORWARD_ROWS;      // per block
constexpr int STAGES = ATTENTION_STAGES;          // sets of tiles in shared memory: two in use, one being loaded
constexpr int DKV_STAGES = ATTENTION_DKV_STAGES;  // one in use, one being loaded: no room for more

static_assert(THREADS == (1 + ATTENTION_GROUPS) * WARPGROUP && ATTENTION_GROUPS == 2,
              "one warpgroup loads, two compute");
static_assert(ROWS == ATTENTION_GROUPS * 64 && ATTENTION_BACKWARD_ROWS == ROWS, "each consumer has 64 rows");
static_assert(ATTENTION_FORWARD_SHARED == STAGES * 2 * TILE * sizeof(element) + 1024 &&
                  ATTENTION_DQUERY_SHARED == (STAGES * 3 + ATTENTION_GROUPS) * TILE * sizeof(element) + 1024 &&
                  ATTENTION_DKV_SHARED == (DKV_STAGES * 4 + ATTENTION_GROUPS) * TILE * sizeof(element) + 1024,
              "shared memory: the stages, backward a tile of each consumer's rows, from a multiple of 1024 bytes on");

constexpr int LOADER_REGISTERS = 120, COMPUTE_REGISTERS = 192;

// Named barriers, by what they guard. The producer syncs on TILE_EMPTY + stage and arrives on TILE_FULL + stage; the
// consumers do the reverse. At CONSUMER_READY + consumer, the threads of one consumer wait until all of them have
// written their resident rows, or sums, to shared memory.
enum NamedBarrier { TILE_FULL = 1, TILE_EMPTY = TILE_FULL + STAGES, CONSUMER_READY = TILE_EMPTY + STAGES };

__device__ inline float round_tf32(float x) { return __uint_as_float(tf32(x)); }

// The order of a transposed tile's inner dimension: of every 8 columns of P, the even ones come first.
__device__ inline int in_order_of_P(int c) { return (c & ~7) | (c & 1) << 2 | (c & 7) >> 1; }

// A tile in the producer's registers, between global and shared memory. A warp reads its 16 rows in 8 steps of 4 rows
// (every other one of 8) by 32 columns, 8 lanes for the 128 bytes of a row. In step i, i % 2 selects the half of the
// columns, i / 2 % 2 even or odd rows, i / 4 the group of 8 rows.
struct Load {
    float4 x[8];
};

// Start loading rows [row, row + 64) of one head; rows >= T are 0.
__device__ inline void fetch(Load& load, const float* head, int row, int T, int row_stride) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    row += 16 * warp + lane / 8 * 2;
    const float* source = head + int64(row) * row_stride + lane % 8 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int down = i / 4 * 8 + i / 2 % 2;
        load.x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (row + down < T) load.x[i] = *reinterpret_cast<const float4*>(source + down * row_stride + i % 2 * 32);
    }
}

// Write the tile, rounded, to `tile`, and transposed to `transposed`; either may be null. Against bank conflicts, lanes
// start transposing at different ones of their four floats. From step to step, an index changes only by additions and
// flipped bits (see `swizzled`), which saves registers.
__device__ inline void write(float* tile, float* transposed, const Load& load) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
    const int r = 16 * warp + lane / 8 * 2, c = lane % 8 * 4, rotation = lane / 2 % 4;
    const int at = swizzled(r, c);
    const int k = in_order_of_P(r);
    const int at_transposed[4] = {swizzled(c + rotation, k), swizzled(c + (rotation + 1) % 4, k),
                                  swizzled(c + (rotation + 2) % 4, k), swizzled(c + (rotation + 3) % 4, k)};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int eights = i / 4, odd = i / 2 % 2, right = i % 2;
        const float4 x = load.x[i], y = {round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w)};
        if (tile) *reinterpret_cast<float4*>(tile + (at ^ odd * 4) + odd * 32 + eights * 256 + right * (TILE / 2)) = y;
        if (transposed) {
            const float4 one = rotation % 2 ? float4{y.y, y.z, y.w, y.x} : y;
            const float4 rotated = rotation / 2 ? float4{one.z, one.w, one.x, one.y} : one;
            const int flip = odd * 4 | eights * 8;
            transposed[(at_transposed[0] ^ flip) + right * 1024] = rotated.x;
            transposed[(at_transposed[1] ^ flip) + right * 1024] = rotated.y;
            transposed[(at_transposed[2] ^ flip) + right * 1024] = rotated.z;
            transposed[(at_transposed[3] ^ flip) + right * 1024] = rotated.w;
        }
    }
}

// Load a consumer warp's 16 rows of one head from global memory, as the A operands of 8 wgmmas.
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

// Begin d (64,64) = rows (64,HS) @ tile (64,HS)^T, like S = Q K^T; rows in registers or, below, in shared memory.
__device__ inline void begin_matmul_transposed(float (&d)[32], const uint32 (&rows)[8][4], const float* tile) {
    const unsigned long long b = descriptor(tile);  // once per tile: computed for each wgmma, it would delay each
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma(d, rows[k], b + k_offset(k), k > 0);
}

__device__ inline void begin_matmul_transposed(float (&d)[32], const float* rows, const float* tile) {
    const unsigned long long a = descriptor(rows), b = descriptor(tile);
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma(d, a + k_offset(k), b + k_offset(k), k > 0);
}

// Begin d (64,HS) += p (64,64) @ tile, which is stored transposed, like O += P V. p must not change until this is done.
__device__ inline void begin_matmul(float (&d)[32], const uint32 (&p)[8][4], const float* transposed) {
    const unsigned long long b = descriptor(transposed);
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma(d, p[k], b + k_offset(k), 1);
}

// The accumulators of one matmul, rounded, as the A operand of the next: S -> P.
__device__ inline void as_operand(uint32 (&a)[8][4], const float (&d)[32]) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        a[k][0] = tf32(d[4 * k]);
        a[k][1] = tf32(d[4 * k + 2]);
        a[k][2] = tf32(d[4 * k + 1]);
        a[k][3] = tf32(d[4 * k + 3]);
    }
}

// A warp's epilogue: store its 16 rows of one head's gradient, times `factor`, and their column sums.
__device__ inline void store_rows(float* head, float* sums, const float (&d)[32], float factor, int row, int T) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 upper = {d[4 * n] * factor, d[4 * n + 1] * factor};
        const float2 lower = {d[4 * n + 2] * factor, d[4 * n + 3] * factor};
        if (row + g < T) *reinterpret_cast<float2*>(head + int64(row + g) * 3 * C + 8 * n + 2 * t) = upper;
        if (row + g + 8 < T) *reinterpret_cast<float2*>(head + int64(row + g + 8) * 3 * C + 8 * n + 2 * t) = lower;
        float2 sum = {upper.x + lower.x, upper.y + lower.y};  // rows >= T are 0
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            sum.x += __shfl_xor_sync(0xffffffff, sum.x, distance);
            sum.y += __shfl_xor_sync(0xffffffff, sum.y, distance);
        }
        if (g == 0) *reinterpret_cast<float2*>(sums + 8 * n + 2 * t) = sum;
    }
}

// Block (384); grid (NH, T / 128 rounded up, B), the queries with the most keys first. Shared memory: STAGES * 2 tiles
// and 1024 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(float* out, float* lse, const float* inp, int T) {
    extern __shared__ float4 shared[];
    float* tiles = tiles_of(shared);  // per stage: keys, transposed values
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const int count = (min(T, first + ROWS) + 63) / 64;  // tiles of keys up to the block's diagonal

    // ---- producer warpgroup ----------------------------------------------------------------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        Load key, value;  // one tile ahead; the one after the last is not used
        fetch(key, query + C, 0, T, 3 * C);
        fetch(value, query + 2 * C, 0, T, 3 * C);
        for (int i = 0; i < count; i++) {
            const int stage = i % STAGES;
            float* tile = tiles + stage * 2 * TILE;
            if (i >= STAGES) named_barrier_sync(TILE_EMPTY + stage, THREADS);
            write(tile, nullptr, key);
            fetch(key, query + C, 64 * (i + 1), T, 3 * C);
            write(nullptr, tile + TILE, value);
            fetch(value, query + 2 * C, 64 * (i + 1), T, 3 * C);
            fence_for_async();
            named_barrier_arrive(TILE_FULL + stage, THREADS);
        }
    // ---- consumer warpgroups, 64 queries each ----------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int consumer = warpgroup() - 1, warp = threadIdx.x % WARPGROUP / 32;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int consumer_row = first + 64 * consumer, warp_row = consumer_row + 16 * warp;
        const int row = warp_row + g;  // the thread's rows: row, row + 8
        uint32 q[8][4], p[8][4];
        load_rows(q, query, warp_row, T, 3 * C);
        float s[32], o[32] = {}, row_max[2] = {-INFINITE, -INFINITE}, row_sum[2] = {0.0f, 0.0f};
        const float to_log2 = LOG2E / 8.0f;  // 8 = sqrt(HS)
        const int consumer_count = min(count, consumer_row / 64 + 1);  // tiles of keys up to this consumer's diagonal
        float rescale[2];
        const auto softmax = [&](int start) {  // s = P
            softmax_of_tile(s, row_max, row_sum, rescale, to_log2, start == consumer_row, start, row);
        };

        // Prologue: S = Q K^T of tile 0, and its softmax.
        named_barrier_sync(TILE_FULL, THREADS);
        wgmma_fence();
        begin_matmul_transposed(s, q, tiles);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(s);
        softmax(0);
        as_operand(p, s);

        // Steady state: begin S = Q K^T of tile i and O += P V of tile i - 1, which overlaps the softmax of tile i.
        for (int i = 1; i < consumer_count; i++) {
            named_barrier_sync(TILE_FULL + i % STAGES, THREADS);
            fence_operand(s);
            fence_operand(o);
            wgmma_fence();
            begin_matmul_transposed(s, q, tiles + i % STAGES * 2 * TILE);
            wgmma_commit();
            begin_matmul(o, p, tiles + (i - 1) % STAGES * 2 * TILE + TILE);
            wgmma_commit();
            wgmma_wait<1>();  // S is done
            fence_operand(s);
            softmax(64 * i);
            wgmma_wait<0>();  // O is done, and tile i - 1 no longer needed
            fence_operand(o);
            if (i - 1 + STAGES < count) named_barrier_arrive(TILE_EMPTY + (i - 1) % STAGES, THREADS);
#pragma unroll
            for (int j = 0; j < 32; j++) o[j] *= rescale[j % 4 / 2];
            as_operand(p, s);
        }

        // Drain: O += P V of the last tile. Then arrive for the tiles that only the other consumer needs.
        fence_operand(o);
        wgmma_fence();
        begin_matmul(o, p, tiles + (consumer_count - 1) % STAGES * 2 * TILE + TILE);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(o);
        for (int i = consumer_count; i < count; i++) named_barrier_arrive(TILE_FULL + i % STAGES, THREADS);

        // Epilogue: lse, and out = O / row_sum.
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + 8 * k;
            const float total = quad_sum(row_sum[k]);
            if (r >= T) continue;
            if (t == 0) lse[(int64(b) * NH + h) * T + r] = (row_max[k] * to_log2 + log2f(total)) * LN2;
            float* out_row = out + (int64(b) * T + r) * C + h * HS;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 pair = {o[4 * n + 2 * k] / total, o[4 * n + 2 * k + 1] / total};
                *reinterpret_cast<float2*>(out_row + 8 * n + 2 * t) = pair;
            }
        }
    }
    __syncthreads();  // no thread may exit while others wait at a barrier where it has only arrived
}

// dquery, and D for attention_backward_dkv. Block (384); grid (NH, T / 128 rounded up, B). Shared memory: STAGES * 3 +
// 2 tiles and 1024 bytes. The resident rows of dout do not fit into registers: each consumer has a tile of them in
// shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery(float* dinp, float* D, float* partials, const float* dout, const float* inp, const float* out,
                          const float* lse, int T) {
    extern __shared__ float4 shared[];
    __shared__ float sums[2][4][HS];
    float* tiles = tiles_of(shared);  // per stage: keys, transposed keys, values
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const int count = (min(T, first + ROWS) + 63) / 64;

    // ---- producer warpgroup ----------------------------------------------------------------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        Load key, value;
        fetch(key, query + C, 0, T, 3 * C);
        fetch(value, query + 2 * C, 0, T, 3 * C);
        for (int i = 0; i < count; i++) {
            const int stage = i % STAGES;
            float* tile = tiles + stage * 3 * TILE;
            if (i >= STAGES) named_barrier_sync(TILE_EMPTY + stage, THREADS);
            write(tile, tile + TILE, key);
            fetch(key, query + C, 64 * (i + 1), T, 3 * C);
            write(tile + 2 * TILE, nullptr, value);
            fetch(value, query + 2 * C, 64 * (i + 1), T, 3 * C);
            fence_for_async();
            named_barrier_arrive(TILE_FULL + stage, THREADS);
        }
    // ---- consumer warpgroups, 64 queries each ----------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int consumer = warpgroup() - 1, warp = threadIdx.x % WARPGROUP / 32;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int consumer_row = first + 64 * consumer, warp_row = consumer_row + 16 * warp;
        const int row = warp_row + g;  // the thread's rows: row, row + 8
        const int64 rows = int64(b) * T * C + h * HS, head = (int64(b) * NH + h) * T;

        // The resident rows: dout to shared memory, queries to registers, D and lse of the thread's rows.
        float* d = tiles + (STAGES * 3 + consumer) * TILE;
        {
            Load dout_rows;
            fetch(dout_rows, dout + rows, consumer_row, T, C);
            write(d, nullptr, dout_rows);
        }
        fence_for_async();
        named_barrier_sync(CONSUMER_READY + consumer, WARPGROUP);
        uint32 q[8][4], ds[8][4];
        load_rows(q, query, warp_row, T, 3 * C);
        float D_of_rows[2] = {0.0f, 0.0f}, lse_of_rows[2] = {0.0f, 0.0f};  // 0 for rows >= T, like dout
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int r = row + 8 * k;
            if (r < T) {
                const int64 at = rows + int64(r) * C + 16 * t;
#pragma unroll
                for (int c = 0; c < 16; c += 4) {
                    const float4 x = *reinterpret_cast<const float4*>(dout + at + c);
                    const float4 y = *reinterpret_cast<const float4*>(out + at + c);
                    D_of_rows[k] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
                }
                lse_of_rows[k] = lse[head + r] * LOG2E;
            }
            D_of_rows[k] = quad_sum(D_of_rows[k]);
            if (t == 0 && r < T) D[head + r] = D_of_rows[k];
        }

        float s[32], dp[32], dq[32] = {};
        const int consumer_count = min(count, consumer_row / 64 + 1);  // tiles of keys up to this consumer's diagonal
        const auto S_to_P = [&](int start) {  // s = P = exp(S - lse)
#pragma unroll
            for (int j = 0; j < 32; j++) s[j] = exp2_approx(s[j] * (LOG2E / 8.0f) - lse_of_rows[j % 4 / 2]);
            if (start == consumer_row) {  // the diagonal
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = 0.0f;
                }
            }
        };

        // Prologue: S = Q K^T and dP = dO V^T of tile 0; dS = P * (dP - D).
        named_barrier_sync(TILE_FULL, THREADS);
        wgmma_fence();
        begin_matmul_transposed(s, q, tiles);
        begin_matmul_transposed(dp, d, tiles + 2 * TILE);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(s);
        fence_operand(dp);
        S_to_P(0);
#pragma unroll
        for (int j = 0; j < 32; j++) s[j] *= dp[j] - D_of_rows[j % 4 / 2];
        as_operand(ds, s);

        // Steady state: begin S and dP of tile i, then dQ += dS K of tile i - 1.
        for (int i = 1; i < consumer_count; i++) {
            named_barrier_sync(TILE_FULL + i % STAGES, THREADS);
            fence_operand(s);
            fence_operand(dp);
            fence_operand(dq);
            wgmma_fence();
            begin_matmul_transposed(s, q, tiles + i % STAGES * 3 * TILE);
            wgmma_commit();
            begin_matmul_transposed(dp, d, tiles + i % STAGES * 3 * TILE + 2 * TILE);
            wgmma_commit();
            begin_matmul(dq, ds, tiles + (i - 1) % STAGES * 3 * TILE + TILE);
            wgmma_commit();
            wgmma_wait<2>();  // S is done
            fence_operand(s);
            S_to_P(64 * i);
            wgmma_wait<1>();  // dP is done
            fence_operand(dp);
#pragma unroll
            for (int j = 0; j < 32; j++) s[j] *= dp[j] - D_of_rows[j % 4 / 2];
            wgmma_wait<0>();  // dQ is done, and tile i - 1 no longer needed
            fence_operand(dq);
            if (i - 1 + STAGES < count) named_barrier_arrive(TILE_EMPTY + (i - 1) % STAGES, THREADS);
            as_operand(ds, s);
        }

        // Drain: dQ += dS K of the last tile. Then arrive for the tiles that only the other consumer needs.
        fence_operand(dq);
        wgmma_fence();
        begin_matmul(dq, ds, tiles + (consumer_count - 1) % STAGES * 3 * TILE + TILE);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(dq);
        for (int i = consumer_count; i < count; i++) named_barrier_arrive(TILE_FULL + i % STAGES, THREADS);

        // Epilogue: dquery = dQ / sqrt(HS), and its column sums for the gradient of the bias.
        store_rows(dinp + int64(b) * T * 3 * C + h * HS, sums[consumer][warp], dq, 1.0f / 8.0f, warp_row, T);
        named_barrier_sync(CONSUMER_READY + consumer, WARPGROUP);
        const int c = threadIdx.x % WARPGROUP;
        if (c < HS && consumer_row < T) {
            const int64 partial = int64(b) * ((T + 63) / 64) + consumer_row / 64;
            const float(*of_warps)[HS] = sums[consumer];
            partials[partial * 3 * C + h * HS + c] = of_warps[0][c] + of_warps[1][c] + of_warps[2][c] + of_warps[3][c];
        }
    }
    __syncthreads();  // no thread may exit while others wait at a barrier where it has only arrived
}

// dkey and dvalue; keys and values are resident, and tiles of queries stream by. Block (384); grid (NH, T / 128 rounded
// up, B). Shared memory: DKV_STAGES * 4 + 2 tiles and 1024 bytes. The resident keys are in shared memory, the values in
// registers. Each tile is finished before the next one is started.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv(float* dinp, float* partials, const float* dout, const float* inp, const float* lse,
                       const float* D, int T) {
    extern __shared__ float4 shared[];
    __shared__ float sums[2][2][4][HS], statistics[DKV_STAGES][2][64];  // of the queries: lse in units of log2, D
    float* tiles = tiles_of(shared);  // per stage: query, transposed query, dout, transposed dout
    const int h = blockIdx.x, b = blockIdx.z;
    const int first = blockIdx.y * ROWS;  // the first keys are seen by the most queries
    const float* query = inp + int64(b) * T * 3 * C + h * HS;
    const float* dhead = dout + int64(b) * T * C + h * HS;
    const int64 head = (int64(b) * NH + h) * T;
    const int count = (T - first + 63) / 64;  // tiles of queries from the diagonal on

    // ---- producer warpgroup ----------------------------------------------------------------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        Load q, d;
        float statistic;
        const auto fetch_statistic = [&](int start) {  // threads 0 .. 63 lse, the others D; 0 for rows >= T
            const int r = start + threadIdx.x % 64;
            const float* source = threadIdx.x < 64 ? lse : D;
            statistic = r < T ? source[head + r] * (threadIdx.x < 64 ? LOG2E : 1.0f) : 0.0f;
        };
        fetch(q, query, first, T, 3 * C);
        fetch(d, dhead, first, T, C);
        fetch_statistic(first);
        for (int i = 0; i < count; i++) {
            const int stage = i % DKV_STAGES, next = first + 64 * (i + 1);
            float* tile = tiles + stage * 4 * TILE;
            if (i >= DKV_STAGES) named_barrier_sync(TILE_EMPTY + stage, THREADS);
            write(tile, tile + TILE, q);
            fetch(q, query, next, T, 3 * C);
            write(tile + 2 * TILE, tile + 3 * TILE, d);
            fetch(d, dhead, next, T, C);
            statistics[stage][threadIdx.x / 64][threadIdx.x % 64] = statistic;
            fetch_statistic(next);
            fence_for_async();
            named_barrier_arrive(TILE_FULL + stage, THREADS);
        }
    // ---- consumer warpgroups, 64 keys each -------------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int consumer = warpgroup() - 1, warp = threadIdx.x % WARPGROUP / 32;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int consumer_row = first + 64 * consumer, warp_row = consumer_row + 16 * warp;
        const int row = warp_row + g;  // the thread's rows: row, row + 8

        // The resident rows: keys to shared memory, values to registers.
        float* k = tiles + (DKV_STAGES * 4 + consumer) * TILE;
        {
            Load rows;
            fetch(rows, query + C, consumer_row, T, 3 * C);
            write(k, nullptr, rows);
        }
        fence_for_async();
        named_barrier_sync(CONSUMER_READY + consumer, WARPGROUP);
        uint32 v[8][4], p[8][4], ds[8][4];
        load_rows(v, query + 2 * C, warp_row, T, 3 * C);

        float s[32], dp[32], dk[32] = {}, dv[32] = {};  // S^T, dP^T: keys down, queries across
        for (int i = 0; i < count; i++) {
            const int stage = i % DKV_STAGES, start = first + 64 * i;
            const float* tile = tiles + stage * 4 * TILE;
            named_barrier_sync(TILE_FULL + stage, THREADS);
            if (start >= consumer_row) {  // else all of these queries come before this consumer's keys
                // Begin S^T = K Q^T and dP^T = V dO^T.
                fence_operand(s);
                fence_operand(dp);
                wgmma_fence();
                begin_matmul_transposed(s, k, tile);
                wgmma_commit();
                begin_matmul_transposed(dp, v, tile + 2 * TILE);
                wgmma_commit();
                wgmma_wait<1>();
                fence_operand(s);

                // P^T = exp(S^T - lse)
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    s[j] = exp2_approx(s[j] * (LOG2E / 8.0f) - statistics[stage][0][j / 4 * 8 + 2 * t + j % 2]);
                }
                if (start == consumer_row) {  // the diagonal
#pragma unroll
                    for (int j = 0; j < 32; j++) {
                        if (start + j / 4 * 8 + 2 * t + j % 2 < row + j % 4 / 2 * 8) s[j] = 0.0f;
                    }
                }
                as_operand(p, s);
                wgmma_wait<0>();
                fence_operand(dp);

                // dS^T = P^T * (dP^T - D)
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    // P^T, recovered from the operand: keeping s would take more registers than there are
                    const float rounded = __uint_as_float(p[j / 4][j % 2 * 2 + j % 4 / 2] & 0xffffe000);
                    dp[j] = rounded * (dp[j] - statistics[stage][1][j / 4 * 8 + 2 * t + j % 2]);
                }
                as_operand(ds, dp);

                // dV += P^T dO and dK += dS^T Q
                fence_operand(dv);
                fence_operand(dk);
                wgmma_fence();
                begin_matmul(dv, p, tile + 3 * TILE);
                begin_matmul(dk, ds, tile + TILE);
                wgmma_commit();
                wgmma_wait<0>();
                fence_operand(dv);
                fence_operand(dk);
            }
            if (i + DKV_STAGES < count) named_barrier_arrive(TILE_EMPTY + stage, THREADS);
        }

        // Epilogue: dkey = dK / sqrt(HS), dvalue = dV, and their column sums for the gradient of the bias.
        float* dhead_inp = dinp + int64(b) * T * 3 * C + h * HS;
        store_rows(dhead_inp + C, sums[consumer][0][warp], dk, 1.0f / 8.0f, warp_row, T);
        store_rows(dhead_inp + 2 * C, sums[consumer][1][warp], dv, 1.0f, warp_row, T);
        named_barrier_sync(CONSUMER_READY + consumer, WARPGROUP);
        const int kind = threadIdx.x % WARPGROUP / HS, c = threadIdx.x % HS;  // 0: dkey, 1: dvalue
        if (consumer_row < T) {
            const int64 partial = int64(b) * ((T + 63) / 64) + consumer_row / 64;
            const float(*of_warps)[HS] = sums[consumer][kind];
            partials[partial * 3 * C + (1 + kind) * C + h * HS + c] =
                of_warps[0][c] + of_warps[1][c] + of_warps[2][c] + of_warps[3][c];
        }
    }
    __syncthreads();  // no thread may exit while others wait at a barrier where it has only arrived
}
