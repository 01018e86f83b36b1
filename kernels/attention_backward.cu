// The gradient of attention (attention.cu) in one pass, in bfloat16, for every GPU from sm_80 on.
//
//     D = sum over HS of dout * out;  P = exp(S - lse);  dP = dout @ value^T
//     dS = P * (dP - D) / sqrt(HS)
//     dquery = dS @ key;  dkey = dS^T @ query;  dvalue = P^T @ dout         dinp =, D =, partials =
//
// Tensors are those of attention.cu. dquery (B,NH,rows,HS) float32 and added (B,NKV,blocks) int32
// are scratch: rows = T rounded up to whole tiles, blocks = T / KEYS rounded up.
//
// A block has KEYS keys and values of one head, 16 * M in each of its warps, as A fragments in
// registers, and so are the sums of dkey and dvalue. Tiles of QUERIES queries and of their dout
// come to shared memory, double-buffered, of one query head of the group after the other, the last
// ones first. For each tile, a warp computes S and dP transposed, keys down and queries across: so
// P and dS are the A operands of dvalue and dkey as they are (mma.cuh). dS goes to shared memory,
// too, where all keys of the block meet: one iteration later, each warp multiplies a piece of it by
// the keys, for the tile's dquery.
//
// Blocks share a tile's dquery, which is added up in `dquery`, in L2, in a fixed order, so that
// every run has the same bits: first the first keys, whose block stores, at last the keys on the
// diagonal, whose block rotates the sums and stores dinp. Tiles go from the last one down to the
// diagonal: so the block of the next keys only has to be a tile behind. `added` counts the tiles
// that a block has added; the block of the next keys waits for its turn. It rarely does: blocks
// start in that order, the largest ones first. No block waits for one with a higher number, and
// those with lower ones have started: no deadlock.
//
// Five matmuls and one exp, where dquery and dkv of attention.cu take seven and two. Bound by the
// tensor cores and by shared memory: with M = 2, 96 reads of 512 bytes for 320 matrix instructions,
// with M = 1, for heads that leave no registers for more, 88 for 160.

#include "attention.cuh"

constexpr int KEYS = ATTENTION_BACKWARD_KEYS;        // of a block
constexpr int QUERIES = ATTENTION_BACKWARD_QUERIES;  // of a tile
constexpr int M = ATTENTION_BACKWARD_M;              // a warp has 16 * M keys
constexpr int WARPS = KEYS / (16 * M), THREADS = WARPS * 32;
constexpr int STEP = 32 / M;  // queries of which a warp has S and dP at a time
constexpr int ANNOUNCED = ATTENTION_BACKWARD_ANNOUNCED;  // tiles at a time
constexpr int TILE = QUERIES * TILE_STRIDE;
// dS has a row for each key, padded as mma.cuh's tiles are
constexpr int DS_STRIDE = QUERIES + 8, DS = KEYS * DS_STRIDE;
// A warp's piece of dquery has 16 * M rows, and this many columns.
constexpr bool IS_WIDE = HS % 32 == 0 && QUERIES / (16 * M) * (HS / 32) >= WARPS;
constexpr int COLUMNS = IS_WIDE ? 32 : 16;
constexpr int PIECES = QUERIES / (16 * M) * (HS / COLUMNS);
// clock cycles, some seconds, after which a block gives up waiting: an error, not a hang
constexpr int64 GIVE_UP = int64(1) << 32;

static_assert(BFLOAT16, "float32's gradient is in attention.cu");
static_assert(ATTENTION_BACKWARD_THREADS == THREADS, "of a block");
static_assert(KEYS % QUERIES == 0, "a block starts at a whole tile");
static_assert(QUERIES % STEP == 0 && QUERIES % (16 * M) == 0, "a tile has whole steps, pieces");
static_assert(KEYS % 64 == 0, "a row of partials has 64 rows");
static_assert(ATTENTION_BACKWARD_SHARED
                  == 2 * (KEYS * TILE_STRIDE + 4 * TILE + 2 * DS) + 4 * 4 * QUERIES,
              "shared memory: keys, two pairs of tiles, two dS, and lse and D of two tiles");

// -------------------------------------------------------------------------------------------------
// before

// lanes that share the dot product of a row of a head, a whole number of PACKs each
constexpr int ROW_LANES = ATTENTION_BACKWARD_ROW_LANES;
static_assert(HS / PACK % ROW_LANES == 0 && 32 % ROW_LANES == 0, "they are in one warp");

// D (B,NH,T) = the row sums of dout * out, both (B,T,Q); added (counts) = 0. A thread for each
// ROW_LANES-th part of a row.
extern "C" __global__ void __launch_bounds__(256)
attention_backward_start(float* D, int* added, const element* dout, const element* out, int B,
                         int T, int counts) {
    const int64 i = int64(blockIdx.x) * 256 + threadIdx.x;
    if (i < counts) added[i] = 0;
    const int64 row = i / ROW_LANES;  // of the B * T * NH
    const bool exists = row < int64(B) * T * NH;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HS / 8 / ROW_LANES; k++) {
        const int64 at = row * HS + (k * ROW_LANES + i % ROW_LANES) * 8;
        if (!exists) continue;
        const Floats x = load(dout + at), y = load(out + at);
#pragma unroll
        for (int c = 0; c < PACK; c++) sum += x.x[c] * y.x[c];
    }
#pragma unroll
    for (int distance = ROW_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (!exists || i % ROW_LANES > 0) return;
    const int h = row % NH;
    const int64 token = row / NH;
    D[(token / T * NH + h) * T + token % T] = sum;
}

// -------------------------------------------------------------------------------------------------
// tiles

// The block's tiles of queries: those of a head from the last one down to the diagonal, then those
// of the next head of the group.
struct Tiles {
    int first, of_head, count;
    Divisor divisor;
    __device__ Tiles(int first, int T)
        : first(first), of_head((T - first + QUERIES - 1) / QUERIES), count(GROUP * of_head),
          divisor(of_head) {}
    __device__ int member(int i) const { return GROUP == 1 ? 0 : divisor.quotient(i); }
    __device__ int start(int i) const {
        return first + QUERIES * ((member(i) + 1) * of_head - 1 - i);
    }
};

// Start copying rows [row, row + ROWS) of one head; rows >= T become 0.
template <int ROWS, int STRIDE>
__device__ inline void copy_rows(element* tile, const element* head, int row, int T) {
    constexpr int UNITS = HS / PACK;
    // whether each thread's addresses are the first one plus constants
    constexpr bool IS_EVEN = THREADS % UNITS == 0 && ROWS * UNITS % THREADS == 0;
    const int r0 = threadIdx.x / UNITS, c0 = threadIdx.x % UNITS * PACK;
    const element* from = head + int64(row) * STRIDE;
    if (IS_EVEN && row + ROWS <= T) {
        from += r0 * STRIDE + c0;
        element* const to = tile_at(tile, r0, c0);
#pragma unroll
        for (int k = 0; k < ROWS * UNITS / THREADS; k++) {
            const int r = k * (THREADS / UNITS);
            copy_async(to + r * TILE_STRIDE, from + r * STRIDE, true);
        }
        return;
    }
    for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
        const int r = i / UNITS, c = i % UNITS * PACK;
        const bool exists = row + r < T;
        copy_async(tile_at(tile, r, c), exists ? from + r * STRIDE + c : head, exists);
    }
}

// -------------------------------------------------------------------------------------------------
// taking turns

// Wait until a block has added `tiles` of its tiles; returns how many it has.
__device__ inline int await_turn(const int* added, int tiles) {
    const int64 since = clock64();
    int count = 0;
    while (true) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(added) : "memory");
        if (count >= tiles) return count;
        if (clock64() - since > GIVE_UP) __trap();
    }
}

// Say that the block has added `tiles` of its tiles; what its other warps wrote before they met
// this one becomes visible with it.
__device__ inline void announce(int* added, int tiles) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(added), "r"(tiles) : "memory");
}

// -------------------------------------------------------------------------------------------------
// one tile

// Store the warp's rows of dS, rounded; each is a key's.
__device__ inline void store_dscores(element* dscores, const FragmentD (&s)[M][STEP / 8]) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    element* const to = dscores + (16 * M * warp + g) * DS_STRIDE + 2 * t;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
            element* const pair = to + 16 * m * DS_STRIDE + 8 * n;
            *reinterpret_cast<uint32*>(pair) = as_pair(s[m][n][0], s[m][n][1]);
            *reinterpret_cast<uint32*>(pair + 8 * DS_STRIDE) = as_pair(s[m][n][2], s[m][n][3]);
        }
    }
}

// dk, dv += the part of STEP queries; dscores = their dS. queries, dout, lse, D: theirs.
// start, warp_row: the first query, the warp's first key.
__device__ inline void add_step(Result (&dk)[M], Result (&dv)[M], element* dscores,
                                const Rows (&k)[M], const Rows (&v)[M], const element* queries,
                                const element* dout, const float* lse, const float* D, int start,
                                int warp_row) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    FragmentD s[M][STEP / 8], dp[M][STEP / 8];  // transposed: keys down, queries across
    matmul_transposed(s, k, queries);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
        const float2 x = *reinterpret_cast<const float2*>(lse + 8 * n + 2 * t);
        const float shift[2] = {x.x * LOG2E, x.y * LOG2E};
#pragma unroll
        for (int j = 0; j < 4 * M; j++) {
            float& p = s[j / 4][n][j % 4];
            p = exp2_of(p * (LOG2E * scale()) - shift[j % 2]);
        }
    }
    if (start < warp_row + 16 * M) {  // on the diagonal, some queries come before some keys
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4 * M; j++) {
                const int column = start + 8 * n + 2 * t + j % 2;
                if (column < warp_row + g + j / 2 * 8) s[j / 4][n][j % 4] = 0.0f;
            }
        }
    }
    matmul(dv, s, dout);
    matmul_transposed(dp, v, dout);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
        const float2 x = *reinterpret_cast<const float2*>(D + 8 * n + 2 * t);
#pragma unroll
        for (int j = 0; j < 4 * M; j++)
            s[j / 4][n][j % 4] *= dp[j / 4][n][j % 4] - (j % 2 ? x.y : x.x);
    }
    store_dscores(dscores, s);
    matmul(dk, s, queries);
}

// *sum += x, or = x, if nothing has been added yet.
__device__ inline void add_in_turn(float4* sum, const FragmentD& x, bool is_first) {
    if (is_first) {
        __stcg(sum, float4{x[0], x[1], x[2], x[3]});
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
    const float4 before = __ldcg(sum);
    __stcg(sum, float4{before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]});
#endif
}

// Add dS^T @ keys to a tile's dquery, of which each lane holds what it does of a Result:
// (QUERIES / 16, HS / 8, 32 lanes, 4). is_first: nothing has been added yet.
__device__ inline void add_dquery(float* dquery, const element* dscores, const element* keys,
                                  bool is_first) {
    constexpr int N = COLUMNS / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = warp; piece < PIECES; piece += WARPS) {
        const int row = piece / (HS / COLUMNS) * M, column = piece % (HS / COLUMNS) * COLUMNS;
        float4* const sums =
            reinterpret_cast<float4*>(dquery) + (row * (HS / 8) + column / 8) * 32 + lane;
        const element* ds = dscores + (lane / 16 * 8 + lane % 8) * DS_STRIDE + 16 * row
            + lane / 8 % 2 * 8;
        const element* key = tile_at(keys, lane / 8 % 2 * 8 + lane % 8, column + lane / 16 * 8);
        FragmentD d[M][N] = {};
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            FragmentA a[M];
#pragma unroll
            for (int m = 0; m < M; m++) load_tiles<1>(a[m], ds + 16 * k * DS_STRIDE + 16 * m);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32 b[4];
                load_tiles<1>(b, tile_at(key, 16 * k, 8 * n));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma(d[m][n], a[m], {b[0], b[1]});
                    mma(d[m][n + 1], a[m], {b[2], b[3]});
                }
            }
        }

#pragma unroll
        for (int j = 0; j < M * N; j++) {
            add_in_turn(sums + (j / N * (HS / 8) + j % N) * 32, d[j / N][j % N], is_first);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// after

// partials[...] = the column sums of the block's KEYS rows from `row` on, 64 rows each. sums: of
// each warp's 16 rows. partials: those of the sequence's first rows.
__device__ inline void store_partials(float* partials, const float (*sums)[HS], int row, int T) {
#pragma unroll
    for (int i = 0; i < KEYS / 64; i++) {
        if (row + 64 * i < T)
            add_warps(partials + int64(row / 64 + i) * QKV, sums + 4 * i, threadIdx.x, THREADS);
    }
}

// A warp's 16 rows of a head's sums in dquery (T,HS); rows >= T are 0.
__device__ inline void load_sums(Result& d, const float* dquery, int row, int T) {
    const float4* const from =
        reinterpret_cast<const float4*>(dquery) + row / 16 * (HS / 8) * 32 + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        const float4 x = row < T ? __ldcg(from + 32 * n) : float4{};
        d[n][0] = x.x;
        d[n][1] = x.y;
        d[n][2] = x.z;
        d[n][3] = x.w;
    }
}

// A block's keys and head: those of `together` heads run at the same time, the first keys first,
// as they have the most queries.
struct Place {
    int block, h, b;
    __device__ Place(int blocks, int heads, int together) {
        const int before = blockIdx.x / (blocks * together) * together;  // heads
        const int n = blockIdx.x - before * blocks, width = min(together, heads - before);
        const int head = before + n % width;
        block = n / width;
        h = head % NKV;
        b = head / NKV;
    }
};

// dinp, of all three, and partials. Block (THREADS); grid (T / KEYS rounded up * NKV * B).
// together: heads of keys whose blocks run at the same time.
extern "C" __global__ void __launch_bounds__(THREADS, M)
attention_backward(element* dinp, float* dquery, int* added, float* partials, const element* dout,
                   const element* inp, const float* lse, const float* D, const float2* rope,
                   const float* rstd, int B, int T, int together) {
    extern __shared__ uint4 shared[];
    element* const keys = reinterpret_cast<element*>(shared);
    element* const tiles = keys + KEYS * TILE_STRIDE;  // query, dout, next query, next dout
    element* const dscores = tiles + 4 * TILE;         // of this tile and of the previous one
    float* const statistics = reinterpret_cast<float*>(dscores + 2 * DS);  // lse, D; the next ones
    const int warp = threadIdx.x / 32, blocks = (T + KEYS - 1) / KEYS;
    const Place here(blocks, B * NKV, together);
    const int h = here.h, b = here.b, block = here.block, first = block * KEYS;
    const Tiles walk(first, T);
    const int count = walk.count;
    const int head_tiles = (T + QUERIES - 1) / QUERIES;
    const int first_head = b * NH + h * GROUP;  // of the group, in all sequences
    // the group's first query head, and from there to its keys and values
    const element* query = inp + int64(b) * T * QKV + h * GROUP * HS;
    const element* dhead = dout + int64(b) * T * Q + h * GROUP * HS;
    const int to_key = Q + (h - h * GROUP) * HS, to_value = to_key + KV;
    // where tile i is among those of all heads
    const auto place = [&](int i) {
        return int64(first_head + walk.member(i)) * head_tiles + walk.start(i) / QUERIES;
    };
    int* const added_here = added + (b * NKV + h) * blocks + block;

    const auto copy = [&](int i) {
        if (i < count) {
            const int start = walk.start(i), member = walk.member(i), stage = i % 2 * 2;
            element* const tile = tiles + stage * TILE;
            copy_rows<QUERIES, QKV>(tile, query + member * HS, start, T);
            copy_rows<QUERIES, Q>(tile + TILE, dhead + member * HS, start, T);
            const int64 row = int64(first_head + member) * T + start;
            if (threadIdx.x < QUERIES) {  // 0 for rows >= T, like dout
                const bool exists = start + threadIdx.x < T;
                const int64 at = exists ? row + threadIdx.x : 0;
                float* const to = statistics + stage * QUERIES + threadIdx.x;
                copy_async_float(to, lse + at, exists);
                copy_async_float(to + QUERIES, D + at, exists);
            }
        }
        copies_commit();
    };

    const int warp_row = first + 16 * M * warp;
    Rows k[M], v[M];
    Result dk[M] = {}, dv[M] = {};
    copy(0);
    copy_rows<KEYS, QKV>(keys, query + to_key, first, T);
    copies_commit();
#pragma unroll
    for (int m = 0; m < M; m++) {
        load_rows(k[m], query + to_key, warp_row + 16 * m, T, QKV);
        load_rows(v[m], query + to_value, warp_row + 16 * m, T, QKV);
    }

    // Iteration i works on tile i and adds up dquery of tile i - 1.
    int seen = 0;  // tiles that the block of the keys before has added, of those it has more
    for (int i = 0; i < count + 2; i++) {
        copies_wait<0>();
        if (warp == 1 && block > 0 && 1 <= i && i <= count) {
            const int needed = i + walk.member(i - 1) * (KEYS / QUERIES);
            if (seen < needed) seen = await_turn(added_here - 1, needed);
        }
        // Tile i has arrived, it is the block's turn to add tile i - 1, all warps are done with
        // tile i - 1, which tile i + 1 overwrites, and have added tile i - 2.
        __syncthreads();
        const bool is_announced = i % ANNOUNCED == 0 || i == count + 1;
        if (threadIdx.x == 0 && i >= 2 && is_announced) announce(added_here, i - 1);
        copy(i + 1);
        if (1 <= i && i <= count) {
            add_dquery(dquery + place(i - 1) * (QUERIES * HS), dscores + (i - 1) % 2 * DS, keys,
                       block == 0);
        }
        if (i >= count) continue;
        const element* const tile = tiles + i % 2 * 2 * TILE;
        const float* const lse_and_D = statistics + i % 2 * 2 * QUERIES;
#pragma unroll 1
        for (int step = 0; step < QUERIES; step += STEP) {
            const int start = walk.start(i) + step;
            element* const ds = dscores + i % 2 * DS + step;
            if (start + STEP <= warp_row) {  // these queries come before all keys of this warp
                const FragmentD zero[M][STEP / 8] = {};
                store_dscores(ds, zero);
            } else {
                const element* const queries = tile + step * TILE_STRIDE;
                add_step(dk, dv, ds, k, v, queries, queries + TILE, lse_and_D + step,
                         lse_and_D + QUERIES + step, start, warp_row);
            }
        }
    }

    // dinp's keys and values, then its queries whose sums this block completed
    float(*const sums)[KEYS / 16][HS] = reinterpret_cast<float(*)[KEYS / 16][HS]>(shared);
    element* const gradient = dinp + int64(b) * T * QKV;
    float* const partial = partials ? partials + int64(b) * ((T + 63) / 64) * QKV : nullptr;
    const float* const rstd_of_sequence = rstd + int64(b) * T * (NH + NKV);
    Result dq[M];
    const auto load_dquery = [&](int member) {
        const int64 head = int64(first_head + member) * head_tiles * (QUERIES * HS);
#pragma unroll
        for (int m = 0; m < M; m++) load_sums(dq[m], dquery + head, warp_row + 16 * m, T);
    };
    load_dquery(0);
    const int key_column = Q + h * HS;
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int row = warp_row + 16 * m;
        float(&of_keys)[HS] = sums[0][M * warp + m], (&of_values)[HS] = sums[1][M * warp + m];
        element* const dkey = gradient + key_column;
        if (QK_NORM) norm_back(dk[m], query + to_key, rstd_of_sequence + NH + h, 1.0f, row, T);
        rotate_back(dk[m], rope, row, T);
        store_gradient(dkey, of_keys, partials, dk[m], scale(), row, T);
        store_gradient(dkey + KV, of_values, partials, dv[m], 1.0f, row, T);
    }
    if (partials) {
        __syncthreads();
        store_partials(partial + key_column, sums[0], first, T);
        store_partials(partial + key_column + KV, sums[1], first, T);
    }
    for (int member = 0; member < GROUP; member++) {
        const int head = h * GROUP + member, column = head * HS;
        float(*const sums_of_head)[HS] = sums[2 + member % 2];
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int row = warp_row + 16 * m;
            if (QK_NORM)
                norm_back(dq[m], query + member * HS, rstd_of_sequence + head,
                          MODEL_QK_SCALE / scale(), row, T);
            rotate_back(dq[m], rope, row, T);
            store_gradient(gradient + column, sums_of_head[M * warp + m], partials, dq[m], scale(),
                           row, T);
        }
        if (partials) {
            __syncthreads();
            store_partials(partial + column, sums_of_head, first, T);
        }
        if (member + 1 < GROUP) load_dquery(member + 1);
    }
}
