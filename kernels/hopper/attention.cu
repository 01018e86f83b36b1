// Causal attention for Hopper (sm_90a), heads of 64 or 128, bfloat16, with the formulas, groups and
// arguments of attention.cu. The algorithm is FlashAttention-2's; the pipeline of a producer
// warpgroup and two consumer warpgroups
// is FlashAttention-3's, Shah et al. 2024, https://arxiv.org/abs/2407.08608
//
// A work item is 128 rows of one head: queries or, in attention_backward_dkv, keys and values.
// These rows are resident: they stay on the chip while tiles of 32 to 128 rows of the other tensors
// stream by; past keys and values, those of each query head of the group, one head after the other.
// The kernels are persistent. Data flow in the forward pass:
//
//     queries       --TMA--> shared memory --ldmatrix--> registers ---+
//     keys, values  --TMA--> shared memory, a ring buffer of tiles ---+--wgmma--> S, P, O in registers
//     O             --stmatrix--> shared memory --TMA--> out
//
// In the producer warpgroup, one thread issues TMA loads, a few tiles ahead, across item
// boundaries, too. Each consumer warpgroup has 64 of the item's rows. S, P, dP and dS exist only in
// its registers. Nothing has to be transposed: wgmma reads keys K-major for S = Q K^T, and values
// MN-major for O += P V. A consumer issues a wgmma, does the softmax (P_i, of S_i) meanwhile, and
// then waits for the wgmma: the tensor cores have work in the meantime. The other consumer fills
// the gaps. (In what ptxas of CUDA 13.0 makes of it, the exps of P_i come after the wait for O.
// That is faster by 12 percent: dev/attention.md.)
//
//     tensor cores   S_0 |     | S_1, O += P_0 V_0 | S_2, O += P_1 V_1 | ... | O += P_n V_n
//     other units        | P_0 |     P_1           |     P_2           | ... |
//                    prologue  |             steady state                    | drain, then epilogue: scale and store O
//
// With heads of 128, a thread's part of a result takes twice the registers. So streamed tiles have
// half as many rows, and attention_backward_dkv leaves keys and values in shared memory.
//
// device.py makes the TMA maps: of what is read, inp (B,T,QKV), dout and out (B,T,Q), with boxes of
// 64 or 32 rows by 64 columns; of what is written, with boxes of 16 rows. A head of 128 has two
// boxes side by side, one for each half of its columns: a tile of n rows is (HALVES,n,64). Rows >=
// T arrive as zeros and are not written. Tensors that have a map are accessed only through it:
// their pointers are unused, kept to match attention.cu's arguments. In FP8 runs, the backward pass
// writes dinp in 8 bits, by another epilogue.
//
// Bound by the tensor cores (2048 multiply-adds per cycle and multiprocessor) and equally by exp
// (16 per cycle: with heads of 64, the exp of an element of P takes as long as its part of the two
// matmuls). The steps from a simple kernel to this one are in dev/kernels/, what was tried in
// dev/attention.md.

#include "hopper/hopper.cuh"
#include "mma.cuh"
#include "rope.cuh"
#if ATTENTION_FP8
#include "fp8.cuh"
#endif

static_assert(sizeof(element) == 2 && (HS == 64 || HS == 128), "elsewhere, attention.cu is used");

constexpr int CONSUMERS = ATTENTION_GROUPS;  // warpgroups that compute
constexpr int THREADS = ATTENTION_THREADS;
constexpr int ROWS = ATTENTION_FORWARD_ROWS;  // per item
constexpr int LOADER_REGISTERS = 40, COMPUTE_REGISTERS = 232;
constexpr int GROUP = NH / NKV;  // query heads that read the same keys and values
constexpr int HALVES = HS / 64;  // of a head's columns
constexpr int ROW_BYTES = HS * sizeof(element);
// a consumer's rows of one tensor: elements, bytes
constexpr int RESIDENT = 64 * HS, RESIDENT_BYTES = 64 * ROW_BYTES;

// Rows of the streamed tiles, and stages of the ring of tiles. A stage has a tile of each streamed
// tensor.
constexpr int FORWARD_KEYS = ATTENTION_FORWARD_KEYS, FORWARD_STAGES = ATTENTION_FORWARD_STAGES;
constexpr int PASSING = ATTENTION_READ_ROWS;  // in the backward pass
constexpr int DQUERY_STAGES = ATTENTION_DQUERY_STAGES, DKV_STAGES = ATTENTION_DKV_STAGES;

static_assert(THREADS == (1 + CONSUMERS) * WARPGROUP, "beside the consumer warpgroups, one loads");
static_assert(ROWS == CONSUMERS * 64 && ATTENTION_BACKWARD_ROWS == ROWS,
              "each consumer has 64 rows");
static_assert(ATTENTION_BOX_COLUMNS == 64 && ATTENTION_WRITE_ROWS == 16,
              "TMA writes a warp's 16 rows of 64 columns");
static_assert(64 % ATTENTION_READ_ROWS == 0 && FORWARD_KEYS % ATTENTION_READ_ROWS == 0,
              "TMA reads whole boxes");
static_assert(DKV_STAGES >= 2 + 64 / PASSING,
              "a consumer holds a tile, skips 64 / PASSING, and waits for the next");
static_assert(ATTENTION_FORWARD_SHARED == (2 * ROWS + FORWARD_STAGES * 2 * FORWARD_KEYS) * ROW_BYTES
              + 1024 &&
                  ATTENTION_DQUERY_SHARED == (4 * ROWS + DQUERY_STAGES * 2 * PASSING) * ROW_BYTES
                      + 1024 &&
                  ATTENTION_DKV_SHARED == (4 * ROWS + DKV_STAGES * 2 * PASSING) * ROW_BYTES + 1024,
              "shared memory: an item's rows and results, and the stages, from the next multiple of 1024 bytes on");

// A work item: 128 rows of one head, from `first` on.
struct Item {
    int first, h, b;
};

// A block's items, one after the other. Heads come in groups, so that what a head's items share
// comes from L2: a fourth as many heads as there are blocks, more if T < 1024; the last group has
// up to twice as many. A group's items are in order of decreasing cost: from the last queries on,
// which see the most keys, or from the first keys. In every other round, the blocks take them in
// reverse order, to balance their totals: only the last group has an odd number.
template <bool OF_QUERIES>
struct Items {
    const int tiles, heads;           // items of a head; heads
    int first = 0, round = 0, count;  // the group's first head; in the group; its heads

    __device__ Items(int T, int B) : tiles((T + ROWS - 1) / ROWS),
        heads((OF_QUERIES ? NH : NKV) * B) {
        size_group();
    }
    __device__ void size_group() {
        const int left = heads - first, rounds = (tiles + 7) / 8 * 2,
            size = max(1, rounds * int(gridDim.x) / tiles);
        count = left < 2 * size ? left : size;
    }

    // The next item; false if there are no more.
    __device__ bool next(Item& item) {
        constexpr int HEADS = OF_QUERIES ? NH : NKV;
        const int blocks = gridDim.x, block = blockIdx.x;
        while (true) {
            if (round * blocks >= count * tiles) {
                first += count;
                if (first >= heads) return false;
                size_group();
                round = 0;
            }
            const int w = round * blocks + (round % 2 ? blocks - 1 - block : block);
            // exact: w < 2^20
            const int tile = __fdividef(w + 0.5f, count), head = first + w - tile * count;
            round++;
            if (tile >= tiles) continue;  // the group's last round is not full
            item = {(OF_QUERIES ? tiles - 1 - tile : tile) * ROWS, head % HEADS, head / HEADS};
            return true;
        }
    }
};

// How many tiles of KEYS keys the queries before row `end` see, as the producer loads them and
// consumers count them.
template <int KEYS>
__device__ inline int tiles_of_keys(int end, int T) { return (min(T, end) + KEYS - 1) / KEYS; }

// Called by all threads of the block, before they use the rings. The arrivals are those on `full`.
template <int STAGES, int LANES, int STREAMED_LANES>
__device__ inline void init_rings(Ring<1, LANES>& resident, int resident_arrivals,
                                  Ring<STAGES, STREAMED_LANES>& streamed, int streamed_arrivals) {
    if (threadIdx.x == 0) {
        resident.init(resident_arrivals, 4 * CONSUMERS);
        streamed.init(streamed_arrivals, 4 * CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// Called by the producer thread: start loading N rows of a head.
template <int N>
__device__ inline void load_rows(element* tile, const TensorMap& map, Mbarrier* full, int column,
                                 int row, int b) {
    for (int j = 0; j < HALVES; j++) {
        for (int r = 0; r < N; r += ATTENTION_READ_ROWS) {
            load_box(tile + (j * N + r) * 64, &map, full, column + 64 * j, row + r, b);
        }
    }
}

struct Source {  // one head of a tensor
    const TensorMap& map;
    int column;
};

// Called by the producer thread: when stage n is empty, start loading PARTS tiles of N rows of each
// source, from `row`.
template <int N, int PARTS, int STAGES, int LANES, class... Sources>
__device__ inline void load_stage(Ring<STAGES, LANES>& ring, int n, element* stages, int row, int b,
                                  const Sources&... sources) {
    constexpr int TILES = sizeof...(Sources) * PARTS;
    Mbarrier* const full = &ring.full[n % STAGES];
    element* tile = stages + n % STAGES * TILES * N * HS;
    ring.wait_empty(n);
    mbarrier_arrive_expect_tx(full, TILES * N * ROW_BYTES);
    const auto load = [&](const Source& from) {
        for (int part = 0; part < PARTS; part++, tile += N * HS) {
            load_rows<N>(tile, from.map, full, from.column, row + N * part, b);
        }
    };
    (load(sources), ...);
}

// What the producer thread does where items are of queries: load these rows of the tensors that
// `maps` are of, inp's first, and tiles of keys and values. n counts on across items, as the rings
// do.
template <int KEYS, int STAGES, int LANES, class... Maps>
__device__ inline void load_queries_and_keys(Ring<1, LANES>& query_ring, element* queries,
                                             Ring<STAGES>& kv_ring,
                                             element* tiles, int T, int B, const TensorMap& inp_map,
                                             const Maps&... maps) {
    Items<true> items(T, B);
    Item item;
    for (int round = 0, n = 0; items.next(item); round++) {
        const int column = item.h * HS, key = Q + item.h / GROUP * HS;
        load_stage<64, CONSUMERS>(query_ring, round, queries, item.first, item.b,
                                  Source{inp_map, column},
                                  Source{maps, column}...);
        for (int i = 0; i < tiles_of_keys<KEYS>(item.first + ROWS, T); i++, n++) {
            load_stage<KEYS, 1>(kv_ring, n, tiles, KEYS * i, item.b, Source{inp_map, key},
                                Source{inp_map, KV + key});
        }
    }
}

// Load the warp's 16 rows of a consumer's tile (HALVES,64,64) by ldmatrix, as the A operands of
// wgmmas.
__device__ inline void read_rows(Rows& a, const element* tile) {
    const int lane = threadIdx.x % 32, r = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        load_tiles<0>(a[k], tile + (k / 4 * 64 + r) * 64 + ((2 * (k % 4) + lane / 16) ^ r % 8) * 8);
    }
}

constexpr float SCALE = HS == 64 ? 0.125f : 0.08838834764831845f;  // 1 / sqrt(HS)
constexpr float TO_LOG2 = LOG2E * SCALE;

// The gradient of a head that has been normalized to y: of what it was before, in the thread's
// rows. See qknorm.cu.
__device__ inline void norm_back(float (&d)[HS / 2], const Rows& y, const float (&rstd)[2],
                                 float scale) {
    float products[2] = {};
#pragma unroll
    for (int j = 0; j < HS / 4; j++) {
        const float2 pair = as_floats(y[j / 4][j % 4]);
        products[j % 2] += d[2 * j] * pair.x + d[2 * j + 1] * pair.y;
    }
    const float mean[2] =
        {quad_sum(products[0]) / (HS * scale), quad_sum(products[1]) / (HS * scale)};
#pragma unroll
    for (int j = 0; j < HS / 4; j++) {
        const float2 pair = as_floats(y[j / 4][j % 4]);
        d[2 * j] = rstd[j % 2] * (scale * d[2 * j] - pair.x * mean[j % 2]);
        d[2 * j + 1] = rstd[j % 2] * (scale * d[2 * j + 1] - pair.y * mean[j % 2]);
    }
}
// The same with y in shared memory.
__device__ inline void norm_back(float (&d)[HS / 2], const element* tile, const float (&rstd)[2],
                                 float scale) {
    Rows y;
    read_rows(y, tile);
    norm_back(d, y, rstd, scale);
}
// rstd of the thread's rows `row` and `row` + 8 of a head of batch row b: of queries or, from NH
// on, keys.
__device__ inline void load_rstd(float (&of_rows)[2], const float* rstd, int row, int T, int b,
                                 int head) {
    for (int k = 0; k < 2; k++) {
        // rows >= T are not stored
        of_rows[k] = rstd[(int64(b) * T + min(row + 8 * k, T - 1)) * (NH + NKV) + head];
    }
}

// The gradient of a rotated head: the warp's rows `row` and `row` + 8 of it are rotated back,
// unless rope is null.
__device__ inline void rotate_back(float (&d)[HS / 2], const float2* rope, int row, int T) {
    if (!rope) return;
#pragma unroll
    for (int k = 0; k < ROTATED_PAIRS / 2; k++) {
        const int r = min(row + k % 2 * 8, T - 1);  // rows >= T are not stored
        rotate_back(d[2 * k], d[2 * k + 1], rope[r * (HS / 2) + k / 2 * 4 + threadIdx.x % 4]);
    }
}

// A warp's epilogue: its 16 rows (16,HS) of one head, times a factor for each of the thread's two
// rows, go to `staging`, (HALVES,16,64), by stmatrix, and from there to the tensor by TMA. An item
// has PARTS such results, in turn, each with its own `staging`: TMA may still be reading those of
// the others.
template <int PARTS>
__device__ inline void store_rows(const TensorMap& map, element* staging, const float (&d)[HS / 2],
                                  float upper,
                                  float lower, int column, int row, int b, int /* T */) {
    const int lane = threadIdx.x % 32, r = lane % 16;
    if (lane == 0) stores_wait<PARTS - 1>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        const float* x = d + 8 * k;
        store_tiles({as_pair(x[0] * upper, x[1] * upper), as_pair(x[2] * lower, x[3] * lower),
                     as_pair(x[4] * upper, x[5] * upper), as_pair(x[6] * lower, x[7] * lower)},
                    staging + (k / 4 * 16 + r) * 64 + ((2 * (k % 4) + lane / 16) ^ r % 8) * 8);
    }
    fence_for_async();
    __syncwarp();
    if (lane == 0) {
        for (int j = 0; j < HALVES; j++)
            store_box(&map, staging + j * 16 * 64, column + 64 * j, row, b);
        stores_commit();
    }
}

// sums[c] = the sum of column c over the warp's 16 rows, times `factor`.
__device__ inline void sum_rows(float* sums, const float (&d)[HS / 2], float factor) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int n = g % 2 * 4 + g / 2 % 2 * 2 + g / 4;
#pragma unroll
    for (int j = 0; j < HALVES; j++) {
        float v[16];
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const float* x = d + 32 * j + k / 2 * 4 + k % 2;
            v[k] = (x[0] + x[2]) * factor;
        }
        halve<8, 1>(v);
        halve<4, 2>(v);
        halve<2, 4>(v);
        *reinterpret_cast<float2*>(sums + 64 * j + 8 * n + 2 * t) = float2{v[0], v[1]};
    }
}

// For tiles of 32 rows: wgmma with 32 columns.
#define NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
WGMMA(32, D16(0), NAMES16, "%16", "%17", "%18", "%19, %20")
WGMMA_REGISTERS(32, D16(0), NAMES16, "{%16, %17, %18, %19}", "%20", "%21", "%22")

// What to add to the descriptor of a tile (HALVES,n,64) to start at its column 16 * k: 16 columns
// are 32 bytes.
__device__ constexpr int k_step(int k, int n) { return k / 4 * (n * 128 / 16) + k % 4 * 2; }

// Begin d (64,n) = rows (64,HS) @ tile (n,HS)^T, like S = Q K^T.
template <int N>
__device__ inline void begin_matmul_transposed(float (&d)[N], const Rows& rows,
                                               const element* tile) {
    // once per tile: computed for each wgmma, it would delay each
    const unsigned long long b = descriptor(tile);
#pragma unroll
    for (int k = 0; k < HS / 16; k++) wgmma<0>(d, rows[k], b + k_step(k, 2 * N), k > 0);
}
// The same with the rows in shared memory, (HALVES,64,64).
template <int N>
__device__ inline void begin_matmul_transposed(float (&d)[N], const element* rows,
                                               const element* tile) {
    const unsigned long long a = descriptor(rows), b = descriptor(tile);
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
        wgmma<0, 0>(d, a + k_step(k, 64), b + k_step(k, 2 * N), k > 0);
}

// Begin S and dP, of a tile of each streamed tensor: two groups.
template <int N, class OfRows>
__device__ inline void begin_scores(float (&s)[N], float (&dp)[N], const OfRows& a, const OfRows& b,
                                    const element* tile, const element* second) {
    wgmma_fence();
    begin_matmul_transposed(s, a, tile);
    wgmma_commit();
    begin_matmul_transposed(dp, b, second);
    wgmma_commit();
}

// The keys and values of attention_backward_dkv: in registers, or where they are in shared memory.
#if MODEL_HS == 64
typedef Rows Resident;
__device__ inline void keep_rows(Resident& rows, const element* tile) { read_rows(rows, tile); }
#else
typedef const element* Resident;
__device__ inline void keep_rows(Resident& rows, const element* tile) { rows = tile; }
#endif

// Begin d (64,HS) += p (64,n) @ tile (n,HS), like O += P V. p must not change before it completes.
// Wait for it in the same iteration of a loop: from one iteration to the next, the compiler (CUDA
// 13.0) loses track of p and reuses its registers.
template <int K>
__device__ inline void begin_matmul(float (&d)[HS / 2], const uint32 (&p)[K][4],
                                    const element* tile) {
    // The second half of the columns begins n rows of 128 bytes after the first; `descriptor` says
    // 16 bytes, which does not matter where there is one half.
    constexpr unsigned long long distance = HALVES == 1 ? 0 : K * 16 * 128 / 16 - 1;
    const unsigned long long b = descriptor(tile) + (distance << 16);
#pragma unroll
    for (int k = 0; k < K; k++) wgmma<1>(d, p[k], b + k * 128, 1);  // 16 rows are 2048 bytes
}

// The accumulators of one matmul, rounded, as the A operand of the next: S -> P.
template <int K>
__device__ inline void as_operand(uint32 (&a)[K][4], const float (&d)[8 * K]) {
#pragma unroll
    for (int j = 0; j < 4 * K; j++) a[j / 4][j % 4] = as_pair(d[2 * j], d[2 * j + 1]);
}

// One row of partials = the sums of the consumer's four warps: the part of its 64 rows in the bias
// gradient.
__device__ inline void put_partials(float* partials, const float (&sums)[4][HS], int column, int b,
                                    int consumer_row,
                                    int T) {
    const int c = threadIdx.x % WARPGROUP;
    if (c >= HS || consumer_row >= T) return;
    const int64 partial = int64(b) * ((T + 63) / 64) + consumer_row / 64;
    partials[partial * QKV + column + c] = sums[0][c] + sums[1][c] + sums[2][c] + sums[3][c];
}

// The threads of a consumer wait for each other, twice per item: when all have read the previous
// item's sums, and when all have written this one's.
__device__ inline void consumer_sync(int consumer) { named_barrier_sync(1 + consumer, WARPGROUP); }

#if ATTENTION_FP8
// A tensor that results in 8 bits.
struct Quantized {
    const TensorMap& numbers;
    const float* scale;
    int* largest;
    int64* counts;
};

// The same epilogue for a gradient in E5M2. A warp's room begins with (HALVES,16,64) bytes, whose
// 16-byte units are swizzled as TMA expects of rows of 64 bytes. If T is no multiple of 16, the
// rows from T on are 0 in d.
template <int PARTS>
__device__ inline void store_rows(const Quantized& result, element* staging,
                                  const float (&d)[HS / 2], float upper,
                                  float lower, int column, int row, int b, int T) {
    constexpr int BOX = 16 * 64;  // bytes
    const int lane = threadIdx.x % 32, square = lane / 16, swizzle = lane % 8 / 2;
    unsigned char* const boxes = reinterpret_cast<unsigned char*>(staging);
    const float scale = *result.scale;
    AmaxStats noted(scale, true);
    if (lane == 0) stores_wait<PARTS - 1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < HS / 32; j++) {  // two squares of 16 columns, from `first` on, of a half
        const int half = j / 2 * BOX, first = j % 2 * 2;
        float x[16];
        uint32 rows[4];
#pragma unroll
        for (int k = 0; k < 16; k++) x[k] = d[16 * j + k] * (k / 2 % 2 ? lower : upper);
        round_squares<true>(rows, x, scale);
        noted.add(x, rows);
        store_tiles(rows, boxes + lane % 16 * 64 + half + (first + square ^ swizzle) * 16);
    }
    fence_for_async();
    if (row < T) {
        if (lane == 0) noted.underflowed -= 128 * max(0, row + 16 - T) * HS;
        noted.publish(result.largest, result.counts);
    }
    __syncwarp();
    if (lane == 0) {
        for (int j = 0; j < HALVES; j++)
            store_box(&result.numbers, boxes + j * BOX, column + 64 * j, row, b);
        stores_commit();
    }
}
#endif

// Block (384); grid (any number of blocks, which share the items). Shared memory: see the
// static_assert above.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(element* out, float* lse, const element* inp, int T, int B, MAP inp_map,
                  MAP out_map) {
    extern __shared__ float4 shared[];
    __shared__ Ring<1> query_ring;            // guards `queries`
    __shared__ Ring<FORWARD_STAGES> kv_ring;  // guards `tiles`
    constexpr int KEYS = FORWARD_KEYS, KEY_TILE = KEYS * HS;  // per tile: rows, elements
    element* const queries = tiles_of(shared);
    element* const staging_of_warps = queries + CONSUMERS * RESIDENT;  // out, staged for TMA
    element* const tiles = staging_of_warps + CONSUMERS * RESIDENT;    // per stage: keys, values
    init_rings(query_ring, 1, kv_ring, 1);
    Items<true> items(T, B);
    Item item;

    // ---- producer warpgroup
    // ----------------------------------------------------------------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0)
            load_queries_and_keys<KEYS>(query_ring, queries, kv_ring, tiles, T, B, inp_map);
    // ---- consumer warpgroups, 64 queries each
    // ----------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int consumer = warpgroup() - 1, warp = threadIdx.x % WARPGROUP / 32;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        element* const staging = staging_of_warps + (consumer * 4 + warp) * (RESIDENT / 4);
        const auto key_tile = [&](int n) { return tiles + n % FORWARD_STAGES * 2 * KEY_TILE; };
        const auto value_tile = [&](int n) { return key_tile(n) + KEY_TILE; };
        for (int round = 0, n = 0; items.next(item); round++) {
            const int consumer_row = item.first + 64 * consumer,
                warp_row = consumer_row + 16 * warp;
            const int row = warp_row + g;  // the thread's rows: row, row + 8
            // the block's, and this consumer's
            const int count = tiles_of_keys<KEYS>(item.first + ROWS, T);
            const int consumer_count = KEYS == ROWS ? count
                : tiles_of_keys<KEYS>(consumer_row + 64, T);
            Rows q;
            uint32 p[KEYS / 16][4];
            float s[KEYS / 2], o[HS / 2] = {};
            float row_max[2] = {-INFINITE, -INFINITE}, row_sum[2] = {0.0f, 0.0f}, rescale[2];
            const auto softmax = [&](int start) {  // s = P
                softmax_of_tile(s, row_max, row_sum, rescale, TO_LOG2, start + KEYS > consumer_row,
                                start, row);
            };

            // Wait for the queries, and keep them in registers.
            query_ring.wait_full(round);
            read_rows(q, queries + consumer * RESIDENT);
            query_ring.release(round);

            // Prologue: S = Q K^T of tile 0, and its softmax.
            kv_ring.wait_full(n);
            wgmma_fence();
            begin_matmul_transposed(s, q, key_tile(n));
            wgmma_commit();
            wgmma_wait<0>(s);
            softmax(0);
            as_operand(p, s);

            // Steady state: begin S = Q K^T of tile i and O += P V of tile i - 1, which overlaps
            // the softmax of tile i.
            for (int i = 1; i < consumer_count; i++) {
                n++;
                kv_ring.wait_full(n);
                fence_operand(s, o);
                wgmma_fence();
                begin_matmul_transposed(s, q, key_tile(n));
                wgmma_commit();
                begin_matmul(o, p, value_tile(n - 1));
                wgmma_commit();
                wgmma_wait<1>(s);  // S is done
                softmax(KEYS * i);
                wgmma_wait<0>(o);  // O is done, and tile i - 1 no longer needed
                kv_ring.release(n - 1);
#pragma unroll
                for (int j = 0; j < HS / 2; j++) o[j] *= rescale[j % 4 / 2];
                as_operand(p, s);
            }

            // Drain: O += P V of the last tile; lse meanwhile. Then release the tiles only the
            // other one needs.
            fence_operand(o);
            wgmma_fence();
            begin_matmul(o, p, value_tile(n));
            wgmma_commit();
            row_sum[0] = quad_sum(row_sum[0]);
            row_sum[1] = quad_sum(row_sum[1]);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int r = row + 8 * k;
                float* const lse_of_head = lse + (int64(item.b) * NH + item.h) * T;
                if (t == 0 && r < T) lse_of_head[r] = row_max[k] * SCALE + log2f(row_sum[k]) * LN2;
            }
            wgmma_wait<0>(o);
            kv_ring.release(n++);
            for (int i = consumer_count; i < count; i++, n++) kv_ring.skip(n);

            // Epilogue: out = O / row_sum.
            store_rows<1>(out_map, staging, o, 1.0f / row_sum[0], 1.0f / row_sum[1], item.h * HS,
                          warp_row, item.b, T);
        }
        // the block must not exit before TMA has read its shared memory
        if (threadIdx.x % 32 == 0) stores_wait<0>();
    }
}

// dquery, and D for attention_backward_dkv. Resident: query, dout, out and lse of the item's
// queries; keys and values stream by. Block, grid and shared memory as above. dinp: a TensorMap, or
// Quantized.
template <class Result>
__device__ __forceinline__ void backward_dquery(const Result& dinp, float* D, float* partials,
                                                const float* lse,
                                                const float2* rope, const float* rstd, int T, int B,
                                                const TensorMap& inp_map, const TensorMap& dout_map,
                                                const TensorMap& out_map) {
    extern __shared__ float4 shared[];
    __shared__ Ring<1, 32> query_ring;       // guards `queries`, `douts`, `outs` and `lses`
    __shared__ Ring<DQUERY_STAGES> kv_ring;  // guards `tiles`
    __shared__ float sums[CONSUMERS][4][HS], lses[ROWS];  // lse in units of log2
    constexpr int KEYS = PASSING, KEY_TILE = KEYS * HS;
    element* const queries = tiles_of(shared);
    element* const douts = queries + CONSUMERS * RESIDENT;
    element* const outs = douts + CONSUMERS * RESIDENT;
    element* const staging_of_warps = outs + CONSUMERS * RESIDENT;   // dquery, staged for TMA
    element* const tiles = staging_of_warps + CONSUMERS * RESIDENT;  // per stage: keys, values
    init_rings(query_ring, 1 + 64, kv_ring, 1);
    Items<true> items(T, B);
    Item item;

    // ---- producer warpgroup: thread 0 issues TMA loads, two warps load lse
    // -----------------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            load_queries_and_keys<KEYS>(query_ring, queries, kv_ring, tiles, T, B, inp_map,
                                        dout_map, out_map);
        } else if (threadIdx.x >= 64) {
            for (int round = 0; items.next(item); round++) {
                const int r = threadIdx.x - 64, first = item.first;
                const float* from = lse + (int64(item.b) * NH + item.h) * T;
                const float upper = first + r < T ? from[first + r] : 0.0f;
                const float lower = first + 64 + r < T ? from[first + 64 + r] : 0.0f;
                query_ring.wait_empty(round);
                lses[r] = upper * LOG2E;
                lses[64 + r] = lower * LOG2E;
                mbarrier_arrive(&query_ring.full[0]);
            }
        }
    // ---- consumer warpgroups, 64 queries each
    // ----------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int consumer = warpgroup() - 1, warp = threadIdx.x % WARPGROUP / 32;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        element* const staging = staging_of_warps + (consumer * 4 + warp) * (RESIDENT / 4);
        for (int round = 0, n = 0; items.next(item); round++) {
            const int consumer_row = item.first + 64 * consumer,
                warp_row = consumer_row + 16 * warp;
            const int row = warp_row + g;  // the thread's rows: row, row + 8
            Rows q, d;
            uint32 ds[KEYS / 16][4];
            float s[KEYS / 2], dp[KEYS / 2], dq[HS / 2] = {}, D_of_rows[2] = {0.0f, 0.0f};

            // Wait for the resident rows. q and dout stay in registers; out is needed only for D,
            // sums of dout * out.
            query_ring.wait_full(round);
            read_rows(d, douts + consumer * RESIDENT);
            read_rows(q, outs + consumer * RESIDENT);  // out, for now
            const float lse_of_rows[2] = {lses[row - item.first], lses[row - item.first + 8]};
            add_dot_products(D_of_rows, q, d);
            read_rows(q, queries + consumer * RESIDENT);
            query_ring.release(round);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                D_of_rows[k] = quad_sum(D_of_rows[k]);
                if (t == 0 && row + 8 * k < T)
                    D[(int64(item.b) * NH + item.h) * T + row + 8 * k] = D_of_rows[k];
            }

            // the block's, and this consumer's
            const int count = tiles_of_keys<KEYS>(item.first + ROWS, T);
            const int consumer_count = tiles_of_keys<KEYS>(consumer_row + 64, T);
            const auto S_to_P = [&](int start) {  // s = P = exp(S - lse)
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++)
                    s[j] = exp2_approx(s[j] * TO_LOG2 - lse_of_rows[j % 4 / 2]);
                if (start >= consumer_row) {  // the diagonal
#pragma unroll
                    for (int j = 0; j < KEYS / 2; j++) {
                        if (start + j / 4 * 8 + 2 * t + j % 2 > row + j % 4 / 2 * 8) s[j] = 0.0f;
                    }
                }
            };

            // Prologue: S = Q K^T and dP = dO V^T of tile 0; dS = P * (dP - D).
            const element* tile = tiles + n % DQUERY_STAGES * 2 * KEY_TILE;
            kv_ring.wait_full(n);
            begin_scores(s, dp, q, d, tile, tile + KEY_TILE);
            wgmma_wait<1>(s);
            S_to_P(0);
            wgmma_wait<0>(dp);
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++) s[j] *= dp[j] - D_of_rows[j % 4 / 2];
            as_operand(ds, s);

            // Steady state: begin S and dP of tile i, then dQ += dS K of tile i - 1.
            for (int i = 1; i < consumer_count; i++) {
                const element* previous = tile;
                n++;
                tile = tiles + n % DQUERY_STAGES * 2 * KEY_TILE;
                kv_ring.wait_full(n);
                fence_operand(s, dp, dq);
                begin_scores(s, dp, q, d, tile, tile + KEY_TILE);
                begin_matmul(dq, ds, previous);
                wgmma_commit();
                wgmma_wait<2>(s);  // S is done
                S_to_P(KEYS * i);
                wgmma_wait<1>(dp);  // dP is done
#pragma unroll
                for (int j = 0; j < KEYS / 2; j++) s[j] *= dp[j] - D_of_rows[j % 4 / 2];
                wgmma_wait<0>(dq);  // dQ is done, and tile i - 1 no longer needed
                kv_ring.release(n - 1);
                as_operand(ds, s);
            }

            // Drain: dQ += dS K of the last tile. Then release the tiles that only the other
            // consumer needs.
            fence_operand(dq);
            wgmma_fence();
            begin_matmul(dq, ds, tile);
            wgmma_commit();
            float rstd_of_rows[2];
            if (QK_NORM) load_rstd(rstd_of_rows, rstd, row, T, item.b, item.h);
            wgmma_wait<0>(dq);
            kv_ring.release(n++);
            for (int i = consumer_count; i < count; i++, n++) kv_ring.skip(n);

            // Epilogue: dquery = dQ / sqrt(HS), and its column sums for the gradient of the bias.
            if (QK_NORM) norm_back(dq, q, rstd_of_rows, MODEL_QK_SCALE / SCALE);
            rotate_back(dq, rope, row, T);
            store_rows<1>(dinp, staging, dq, SCALE, SCALE, item.h * HS, warp_row, item.b, T);
            if (!partials) continue;
            consumer_sync(consumer);  // the previous item's sums have been read
            sum_rows(sums[consumer][warp], dq, SCALE);
            consumer_sync(consumer);  // all warps have written theirs
            put_partials(partials, sums[consumer], item.h * HS, item.b, consumer_row, T);
        }
        // the block must not exit before TMA has read its shared memory
        if (threadIdx.x % 32 == 0) stores_wait<0>();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery(element* dinp, float* D, float* partials, const element* dout,
                          const element* inp,
                          const element* out, const float* lse, const float2* rope,
                              const float* rstd, int T, int B,
                          MAP inp_map, MAP dout_map, MAP out_map, MAP dinp_map) {
    backward_dquery(dinp_map, D, partials, lse, rope, rstd, T, B, inp_map, dout_map, out_map);
}

// dkey and dvalue. Resident: keys and values; query, dout, lse and D of tiles of queries stream by.
// Block (384); grid as above. Shared memory: 4 ROWS + DKV_STAGES * 2 * PASSING rows of a head and
// 1024 bytes. dinp: likewise.
template <class Result>
__device__ __forceinline__ void backward_dkv(const Result& dinp, float* partials, const float* lse,
                                             const float* D,
                                             const float2* rope, const float* rstd, int T, int B,
                                             const TensorMap& inp_map, const TensorMap& dout_map) {
    extern __shared__ float4 shared[];
    __shared__ Ring<1> kv_ring;                  // guards `keys` and `values`
    // guards `tiles` and `statistics`, which is read by ordinary loads
    __shared__ Ring<DKV_STAGES, 32> query_ring;
    __shared__ float sums[CONSUMERS][2][4][HS];
    __shared__ float statistics[DKV_STAGES][2][PASSING];  // of the queries: lse in units of log2, D
    constexpr int QUERIES = PASSING, QUERY_TILE = QUERIES * HS;
    constexpr bool IN_REGISTERS = HS == 64;  // keys and values
    element* const keys = tiles_of(shared);
    element* const values = keys + CONSUMERS * RESIDENT;
    // dkey and dvalue, staged for TMA
    element* const staging_of_warps = values + CONSUMERS * RESIDENT;
    element* const tiles = staging_of_warps + 2 * CONSUMERS * RESIDENT;  // per stage: query, dout
    init_rings(kv_ring, 1, query_ring, 1 + QUERIES);
    Items<false> items(T, B);
    Item item;

    // ---- producer warpgroup: thread 0 issues TMA loads, other warps load lse and D
    // ---------------------------------
    if (warpgroup() == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int round = 0, n = 0; items.next(item); round++) {
                const int key = Q + item.h * HS;
                load_stage<64, CONSUMERS>(kv_ring, round, keys, item.first, item.b,
                                          Source{inp_map, key},
                                          Source{inp_map, KV + key});
                for (int h = item.h * GROUP; h < (item.h + 1) * GROUP; h++) {
                    for (int start = item.first; start < T; start += QUERIES, n++) {
                        load_stage<QUERIES, 1>(query_ring, n, tiles, start, item.b,
                                               Source{inp_map, h * HS}, Source{dout_map, h * HS});
                    }
                }
            }
        } else if (threadIdx.x >= WARPGROUP - QUERIES) {
            const int q = threadIdx.x - (WARPGROUP - QUERIES);
            for (int round = 0, n = 0; items.next(item); round++) {
                for (int h = item.h * GROUP; h < (item.h + 1) * GROUP; h++) {
                    const int64 head = (int64(item.b) * NH + h) * T;
                    for (int start = item.first; start < T; start += QUERIES, n++) {
                        const int stage = n % DKV_STAGES, r = start + q;
                        const float lse_of_row = r < T ? lse[head + r] * LOG2E : 0.0f;
                        const float D_of_row = r < T ? D[head + r] : 0.0f;
                        query_ring.wait_empty(n);
                        statistics[stage][0][q] = lse_of_row;
                        statistics[stage][1][q] = D_of_row;
                        mbarrier_arrive(&query_ring.full[stage]);
                    }
                }
            }
        }
    // ---- consumer warpgroups, 64 keys each
    // -------------------------------------------------------------------------
    } else {
        take_registers<COMPUTE_REGISTERS>();
        const int consumer = warpgroup() - 1, warp = threadIdx.x % WARPGROUP / 32;
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        element* const staging = staging_of_warps + (consumer * 4 + warp) * (RESIDENT / 2);
        for (int round = 0, n = 0; items.next(item); round++) {
            const int consumer_row = item.first + 64 * consumer,
                warp_row = consumer_row + 16 * warp;
            const int row = warp_row + g;  // the thread's rows: row, row + 8
            // tiles of queries of a head, from `first` on
            const int count = (T - item.first + QUERIES - 1) / QUERIES;
            // of them, those with queries before this consumer's keys
            const int before = consumer * (64 / QUERIES);
            Resident k, v;
            uint32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
            // S^T, dP^T: keys down, queries across
            float s[QUERIES / 2], dp[QUERIES / 2], dk[HS / 2] = {}, dv[HS / 2] = {};

            // Wait for the resident keys and values, and keep them in registers if there is room.
            kv_ring.wait_full(round);
            keep_rows(k, keys + consumer * RESIDENT);
            keep_rows(v, values + consumer * RESIDENT);
            if (IN_REGISTERS) kv_ring.release(round);

            // s = P^T = exp(S^T - lse)
            const auto S_to_P = [&](int stage, bool diagonal, int start) {
#pragma unroll
                for (int j = 0; j < QUERIES / 2; j += 2) {
                    const float2 log_sum =
                        *reinterpret_cast<const float2*>(&statistics[stage][0][j / 4 * 8 + 2 * t]);
                    s[j] = exp2_approx(s[j] * TO_LOG2 - log_sum.x);
                    s[j + 1] = exp2_approx(s[j + 1] * TO_LOG2 - log_sum.y);
                }
                if (diagonal) {
#pragma unroll
                    for (int j = 0; j < QUERIES / 2; j++) {
                        if (start + j / 4 * 8 + 2 * t + j % 2 < row + j % 4 / 2 * 8) s[j] = 0.0f;
                    }
                }
            };
            const auto dP_to_dS = [&](int stage) {  // dp = dS^T = P^T * (dP^T - D)
#pragma unroll
                for (int j = 0; j < QUERIES / 2; j += 2) {
                    const float2 dot =
                        *reinterpret_cast<const float2*>(&statistics[stage][1][j / 4 * 8 + 2 * t]);
                    dp[j] = s[j] * (dp[j] - dot.x);
                    dp[j + 1] = s[j + 1] * (dp[j + 1] - dot.y);
                }
            };

            const auto skip = [&](int tiles) {  // that only the other consumer needs
                for (int i = 0; i < tiles; i++, n++) query_ring.skip(n);
            };

            if (before >= count) {
                skip(GROUP * count);
            } else {
                skip(before);

                // Prologue: S^T = K Q^T and dP^T = V dO^T of the first tile, on the diagonal; P and
                // dS.
                const element* tile = tiles + n % DKV_STAGES * 2 * QUERY_TILE;
                query_ring.wait_full(n);
                begin_scores(s, dp, k, v, tile, tile + QUERY_TILE);
                wgmma_wait<1>(s);
                S_to_P(n % DKV_STAGES, true, consumer_row);
                wgmma_wait<0>(dp);
                dP_to_dS(n % DKV_STAGES);
                as_operand(p, s);
                as_operand(ds, dp);

                // Steady state: begin S^T and dP^T of a tile, then dV += P^T dO and dK += dS^T Q of
                // the one before it.
                int i = before;  // number of the tile among the head's
                for (int left = GROUP * (count - before) - 1; left > 0; left--) {
                    const element* previous = tile;
                    const int previous_n = n++;
                    if (++i == count && GROUP > 1) {  // the next head
                        skip(before);
                        i = before;
                    }
                    tile = tiles + n % DKV_STAGES * 2 * QUERY_TILE;
                    query_ring.wait_full(n);
                    fence_operand(s, dp, dk, dv);
                    begin_scores(s, dp, k, v, tile, tile + QUERY_TILE);
                    begin_matmul(dv, p, previous + QUERY_TILE);
                    begin_matmul(dk, ds, previous);
                    wgmma_commit();
                    wgmma_wait<2>(s);  // S is done
                    const int start = item.first + QUERIES * i;
                    // (Heads of 64 without groups need no mask; but without a branch, ptxas moves
                    // exps behind waits.)
                    S_to_P(n % DKV_STAGES, start < consumer_row + 64, start);
                    wgmma_wait<1>(dp);  // dP is done
                    dP_to_dS(n % DKV_STAGES);
                    wgmma_wait<0>(dk, dv);  // dK and dV are done, and tile i - 1 no longer needed
                    query_ring.release(previous_n);
                    as_operand(p, s);
                    as_operand(ds, dp);
                }

                // Drain: dV += P^T dO and dK += dS^T Q of the last tile.
                fence_operand(dk, dv);
                wgmma_fence();
                begin_matmul(dv, p, tile + QUERY_TILE);
                begin_matmul(dk, ds, tile);
                wgmma_commit();
                wgmma_wait<0>(dk, dv);
                query_ring.release(n++);
            }

            // Epilogue: dkey = dK / sqrt(HS), dvalue = dV, and their column sums for the gradient
            // of the bias.
            if (QK_NORM) {
                float rstd_of_rows[2];
                load_rstd(rstd_of_rows, rstd, row, T, item.b, NH + item.h);
                norm_back(dk, k, rstd_of_rows, 1.0f);
            }
            if (!IN_REGISTERS) kv_ring.release(round);
            const int column = Q + item.h * HS;
            rotate_back(dk, rope, row, T);
            store_rows<2>(dinp, staging, dk, SCALE, SCALE, column, warp_row, item.b, T);
            store_rows<2>(dinp, staging + RESIDENT / 4, dv, 1.0f, 1.0f, KV + column, warp_row,
                          item.b, T);
            if (!partials) continue;
            consumer_sync(consumer);  // the previous item's sums have been read
            sum_rows(sums[consumer][0][warp], dk, SCALE);
            sum_rows(sums[consumer][1][warp], dv, 1.0f);
            consumer_sync(consumer);  // all warps have written theirs
            put_partials(partials, sums[consumer][0], column, item.b, consumer_row, T);
            put_partials(partials, sums[consumer][1], KV + column, item.b, consumer_row, T);
        }
        // the block must not exit before TMA has read its shared memory
        if (threadIdx.x % 32 == 0) stores_wait<0>();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv(element* dinp, float* partials, const element* dout, const element* inp,
                       const float* lse,
                       const float* D, const float2* rope, const float* rstd, int T, int B,
                           MAP inp_map, MAP dout_map,
                       MAP dinp_map) {
    backward_dkv(dinp_map, partials, lse, D, rope, rstd, T, B, inp_map, dout_map);
}

#if ATTENTION_FP8
// dinp in 8 bits; scale .. counts: see fp8.cu. Boxes of dinp's map: as in bfloat16.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dquery_fp8(unsigned char* dinp, float* D, float* partials, const element* dout,
                              const element* inp,
                              const element* out, const float* lse, const float2* rope,
                                  const float* rstd,
                              const float* scale, int* largest, int64* counts, int T, int B,
                                  MAP inp_map, MAP dout_map,
                              MAP out_map, MAP dinp_map) {
    backward_dquery(Quantized{dinp_map, scale, largest, counts}, D, partials, lse, rope, rstd, T, B,
                    inp_map,
                    dout_map, out_map);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward_dkv_fp8(unsigned char* dinp, float* partials, const element* dout,
                           const element* inp,
                           const float* lse, const float* D, const float2* rope, const float* rstd,
                               const float* scale,
                           int* largest, int64* counts, int T, int B, MAP inp_map, MAP dout_map,
                               MAP dinp_map) {
    backward_dkv(Quantized{dinp_map, scale, largest, counts}, partials, lse, D, rope, rstd, T, B,
                 inp_map, dout_map);
}
#endif
