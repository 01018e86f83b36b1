#include <cmath>
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <vector>
#include <ucontext.h>
#include <time.h>
using std::min; using std::max;
#define __device__
#define __shared__ static thread_local
#define __align__(n) alignas(n)
typedef long long int64; typedef unsigned int uint32; typedef unsigned long long uint64;
struct uint3 { int x; };
static thread_local uint3 threadIdx, blockIdx;
struct alignas(16) uint4 { uint32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) TileOfLogits { float largest, sum, weight, unused; };
typedef unsigned short u16;
struct element { u16 bits; };
#define INFINITE INFINITY
constexpr float LOG2E = 1.4426950408889634f;
constexpr int PACK = 8;
constexpr int C = MODEL_C, NH = MODEL_NH, NKV = MODEL_NKV, HS = MODEL_HS, Q = NH * HS, KV = NKV * HS,
    QKV = Q + 2 * KV, F = MODEL_F, V = MODEL_V, Vp = MODEL_VP;
#ifdef MODEL_QK_SCALE
#define QK_NORM 1
#else
#define QK_NORM 0
#define MODEL_QK_SCALE 1.0f
#endif
constexpr bool RMS = DECODE_RMS, ROPE = DECODE_ROPE, SWIGLU = DECODE_SWIGLU, BIASES = !RMS || MODEL_BIASES;
struct Control { int position, step, arrived, top_k; float temperature, top_p; };
struct Floats { float x[8]; };
inline float __uint_as_float(uint32 x) { float f; memcpy(&f, &x, 4); return f; }
inline uint32 __float_as_uint(float x) { uint32 f; memcpy(&f, &x, 4); return f; }
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline float to_float(element e) { return __uint_as_float(uint32(e.bits) << 16); }
inline u16 bf(float x) { uint32 b = __float_as_uint(x); if (x != x) return 0x7fff; return (b + 0x7fff + ((b >> 16) & 1)) >> 16; }
inline float2 as_floats(uint32 p) { return {__uint_as_float(p << 16), __uint_as_float(p & 0xffff0000)}; }
inline uint32 as_pair(float l, float h) { return bf(l) | uint32(bf(h)) << 16; }
template <class T> inline uint4 load_bits(const T* at) { if (size_t(at) % 16) abort(); return *(const uint4*)at; }
inline Floats unpack(uint4 b) { Floats f; uint32 w[4] = {b.x, b.y, b.z, b.w}; for (int k = 0; k < 4; k++) { float2 p = as_floats(w[k]); f.x[2*k] = p.x; f.x[2*k+1] = p.y; } return f; }
inline Floats load(const element* at) { return unpack(load_bits(at)); }
inline void put_pair(float* o, float l, float r) { if (size_t(o) % 8) abort(); o[0] = l; o[1] = r; }
inline void put_pair(element* o, float l, float r) { if (size_t(o) % 4) abort(); *(uint32*)o = as_pair(l, r); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float inverse(float x) { return 1.0f / x; }
inline float __ll2float_rn(int64 x) { return x; }
inline int64 __float2ll_rn(float x) { return llrintf(x); }
inline int64 clock64() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (t.tv_sec * 1000000000ll + t.tv_nsec) / 8; }
// fibers
struct Fiber { ucontext_t context; bool done = false; int id = 0; int cluster_gen = 0; std::vector<char> stack; };
struct Meet { int count = 0, gen = 0; };
struct BlockState { std::vector<Fiber> fibers; ucontext_t main; Fiber* now = nullptr; std::map<uint32, Meet> warps[64]; Meet named, all; uint64 area[64][32]; uint32 a[64][32][4], b[64][32][2]; };
static thread_local BlockState* S;
inline void yield() { Fiber* f = S->now; swapcontext(&f->context, &S->main); }
inline void meet(Meet& m, int total) { int gen = m.gen; if (++m.count == total) m.count = 0, m.gen++; else while (m.gen == gen) yield(); }
inline void sync_warp(uint32 mask) { if (!(mask >> threadIdx.x % 32 & 1)) abort(); meet(S->warps[threadIdx.x / 32][mask], __builtin_popcount(mask)); }
inline void __syncwarp() { sync_warp(0xffffffff); }
inline float shfl(uint32 mask, float x, int from) { int w = threadIdx.x / 32; if (!(mask >> (from & 31) & 1)) from = threadIdx.x % 32; S->area[w][threadIdx.x % 32] = __float_as_uint(x); sync_warp(mask); float r = __uint_as_float(S->area[w][from & 31]); sync_warp(mask); return r; }
inline float __shfl_xor_sync(uint32 mask, float x, int d) { return shfl(mask, x, threadIdx.x % 32 ^ d); }
inline float __shfl_down_sync(uint32 mask, float x, int d) { int from = threadIdx.x % 32 + d; return shfl(mask, x, from > 31 ? threadIdx.x % 32 : from); }
inline float warp_sum(float x) { for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffff, x, d); return x; }
typedef float FragmentD[4]; typedef uint32 FragmentA[4]; typedef uint32 FragmentB[2];
inline void mma(FragmentD& d, const FragmentA& a, const FragmentB& b) {
    int w = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    memcpy(S->a[w][lane], a, 16); memcpy(S->b[w][lane], b, 8);
    sync_warp(0xffffffff);
    for (int i = 0; i < 4; i++) {
        int m = g + (i / 2) * 8, n = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 4; k++) for (int r = 0; r < 2; r++) {
            float2 x = as_floats(S->a[w][(m % 8) * 4 + k][m / 8 + 2 * r]), y = as_floats(S->b[w][n * 4 + k][r]);
            sum += x.x * y.x + x.y * y.y;
        }
        d[i] += sum;
    }
    sync_warp(0xffffffff);
}
static std::mutex lock;
// mbarriers
typedef unsigned long long Mbarrier;
struct Bar { unsigned char phase, pending, init, pad; int tx; };
inline void settle(Bar* b) { if (b->pending == 0 && b->tx == 0) b->phase ^= 1, b->pending = b->init; }
inline void mbarrier_init(Mbarrier* m, int n) { std::lock_guard<std::mutex> l(lock); *(Bar*)m = {0, (unsigned char)n, (unsigned char)n, 0, 0}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(Mbarrier* m) { std::lock_guard<std::mutex> l(lock); Bar* b = (Bar*)m; if (!b->pending) abort(); b->pending--; settle(b); }
inline void mbarrier_arrive_expect_tx(Mbarrier* m, int n) { std::lock_guard<std::mutex> l(lock); Bar* b = (Bar*)m; if (!b->pending) abort(); b->tx += n; b->pending--; settle(b); }
inline bool phase_ended(Mbarrier* m, int parity) { yield(); std::lock_guard<std::mutex> l(lock); return ((Bar*)m)->phase != parity; }
inline void wait_for(Mbarrier* m, int parity) { while (!phase_ended(m, parity)) {} }
inline void complete(Mbarrier* m, int n) { Bar* b = (Bar*)m; b->tx -= n; settle(b); }
inline void load_bytes(void* to, const void* from, Mbarrier* m, int n) { if (size_t(to) % 16 || size_t(from) % 16 || n % 16 || n <= 0) { printf("bad copy %d\n", n); abort(); } std::lock_guard<std::mutex> l(lock); memcpy(to, from, n); complete(m, n); }
inline void wait_for_inputs() {} inline void let_next_begin() {}
// clusters
constexpr int CL = 8;
static thread_local char tls_base;
static char* bases[256];
inline int rank_in_cluster() { return blockIdx.x % CL; }
inline char* address_in(const void* p, int rank) { return (char*)p - &tls_base + bases[blockIdx.x / CL * CL + rank]; }
inline void send(void* to, uint32 x, Mbarrier* m, int rank) { std::lock_guard<std::mutex> l(lock); char* a = address_in(to, rank); if (size_t(a) % 4) abort(); memcpy(a, &x, 4); complete((Mbarrier*)address_in(m, rank), 4); }
inline void send(void* to, float4 x, Mbarrier* m, int rank) { std::lock_guard<std::mutex> l(lock); char* a = address_in(to, rank); if (size_t(a) % 16) abort(); memcpy(a, &x, 16); complete((Mbarrier*)address_in(m, rank), 16); }
static int cluster_count[64], cluster_gen[64];
constexpr int ALL_THREADS = 32 * (TOKEN_WARPS + 1);
inline void cluster_arrive() { std::lock_guard<std::mutex> l(lock); int c = blockIdx.x / CL; S->now->cluster_gen = cluster_gen[c]; if (++cluster_count[c] == CL * ALL_THREADS) cluster_count[c] = 0, cluster_gen[c]++; }
inline void cluster_wait() { while (true) { { std::lock_guard<std::mutex> l(lock); if (cluster_gen[blockIdx.x / CL] != S->now->cluster_gen) return; } yield(); } }
inline void cluster_sync() { cluster_arrive(); cluster_wait(); }
inline void workers_sync() { meet(S->named, 32 * TOKEN_WARPS); }
inline void __syncthreads() { meet(S->all, ALL_THREADS); }
inline void red(uint64* at, uint64 x) { std::lock_guard<std::mutex> l(lock); *at += x; }
inline void load_sums(uint64 (&w)[2], const uint64* s) { if (size_t(s) % 16) abort(); yield(); std::lock_guard<std::mutex> l(lock); w[0] = s[0], w[1] = s[1]; }

inline uint32 cycles() { static thread_local uint32 now; return now += 97; } inline void trap_if_late(uint32) {}
struct TensorMap { const element* base; int columns, rows, layers, box_rows; };
#define MAP const TensorMap&
inline void load_box(void* to, const TensorMap* map, Mbarrier* m, int column, int row, int layer) {
    if (size_t(to) % 1024) { printf("bad box\n"); abort(); }
    std::lock_guard<std::mutex> l(lock);
    for (int r = 0; r < map->box_rows; r++) for (int u = 0; u < 8; u++) for (int e = 0; e < 8; e++) {
        int x = column + u * 8 + e, y = row + r;
        element v = {0};
        if (x < map->columns && y < map->rows) v = map->base[(size_t(layer) * map->rows + y) * map->columns + x];
        ((element*)to)[r * 64 + (u ^ (r % 8)) * 8 + e] = v;
    }
    complete(m, map->box_rows * 128);
}
