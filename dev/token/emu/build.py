"""Builds the kernel for the CPU: blocks are threads, CUDA threads are fibers."""
import re, subprocess, ctypes
K='kernels/'
def strip(text):
    return re.sub(r'#include "[^"]*"|#pragma once|#pragma unroll.*','',text)
def drop(text,names):
    for n in names:
        m=re.search(r'__device__ inline [\w ]+ '+n+r'\(',text)
        while m:
            end=text.index('\n}\n',m.start())+3
            text=text[:m.start()]+text[end:]
            m=re.search(r'__device__ inline [\w ]+ '+n+r'\(',text)
    return text
def build(constants,out):
    defs=''.join(f'#define {k} {v}\n' for k,v in constants.items() if k!='BFLOAT16')
    small=''.join(strip(open(K+f).read()) for f in ('cap.cuh','gelu.cuh','rope.cuh','swiglu.cuh'))
    cuh=strip(open(K+'decode/token.cuh').read())
    cuh=drop(cuh,['rank_in_cluster','cluster_sync','workers_sync','wait_for','load_sums','address_in','send','cycles','trap_if_late'])
    cuh=re.sub(r'asm volatile\("red[^;]*;" *::[^;]*;','red(sum, word);',cuh)
    cuh=re.sub(r'extern __shared__ __align__\(1024\) uint4 ring_slots\[\];','alignas(1024) static thread_local uint4 ring_slots[SLOTS * SLOT / 8];',cuh)
    cuh=cuh.replace('mbarrier_arrive_expect_tx(&ring_full[next.slot], bytes);','memset(next.data(), 0xff, SLOT * 2); mbarrier_arrive_expect_tx(&ring_full[next.slot], bytes);')
    cu=strip(open(K+'decode/token_steps.cuh').read())+strip(open(K+'decode/token.cu').read())
    cu=re.sub(r'asm volatile\("fence.proxy[^;]*;"[^;]*;','',cu)
    cu=re.sub(r'extern "C" __global__ void __cluster_dims__\(CLUSTER, 1, 1\)\s*__launch_bounds__\(WORKER_THREADS \+ 32, 1\)','static void',cu)
    cu=cu.replace('__shared__ Shared shared;','__shared__ Shared shared; ')
    tail='''
struct Arguments { float* logits; TileOfLogits* tiles; uint64* sums; element *keys, *values; const int* tokens; const Weights* w; const TensorMap *att, *fcp; const float2* rope; const Control* control; int maxT; };
static Arguments A;
static void enter() { decode_token(A.logits, A.tiles, A.sums, A.keys, A.values, A.tokens, *A.w, *A.att, *A.fcp, A.rope, A.control, A.maxT); S->now->done = true; swapcontext(&S->now->context, &S->main); }
static std::mutex ready; static int started;
extern "C" __attribute__((visibility("default"))) void run(float* logits, TileOfLogits* tiles, uint64* sums, element* keys, element* values, const int* tokens, const Weights* w, const TensorMap* att, const TensorMap* fcp, const float2* rope, const Control* control, int maxT) {
    A = {logits, tiles, sums, keys, values, tokens, w, att, fcp, rope, control, maxT};
    memset(cluster_count, 0, sizeof cluster_count); started = 0;
    std::vector<std::thread> blocks;
    for (int b = 0; b < BLOCKS; b++) blocks.emplace_back([b] {
        memset(ring_slots, 0xff, sizeof ring_slots);
        blockIdx.x = b; bases[b] = &tls_base;
        { std::lock_guard<std::mutex> l(ready); started++; }
        while (true) { { std::lock_guard<std::mutex> l(ready); if (started == BLOCKS) break; } std::this_thread::yield(); }
        BlockState* s = new BlockState; S = s; s->fibers.resize(ALL_THREADS);
        for (int i = 0; i < ALL_THREADS; i++) { Fiber& f = s->fibers[i]; f.id = i; f.stack.resize(512 << 10); getcontext(&f.context); f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = nullptr; makecontext(&f.context, enter, 0); }
        int left = ALL_THREADS; unsigned turn = b * 7919;
        while (left) { left = 0; turn = turn * 1664525 + 1013904223; int off = (turn >> 16) % ALL_THREADS;
            for (int i = 0; i < ALL_THREADS; i++) { Fiber& f = s->fibers[(i + off) % ALL_THREADS]; if (f.done) continue; left++; s->now = &f; threadIdx.x = f.id; swapcontext(&s->main, &f.context); }
            std::this_thread::yield(); }
        delete s;
    });
    for (auto& t : blocks) t.join();
}
'''
    src=defs+'#define BFLOAT16 0\n#include "dev/token/emu/prims.h"\n'+small+cuh+cu+tail
    src=src.replace('__device__ constexpr','constexpr').replace('__shared__ alignas(16)','alignas(16) __shared__')
    open(out+'.cpp','w').write(src)
    subprocess.check_call(['g++','-O1','-g','-std=c++17','-shared','-fno-gnu-unique','-fvisibility=hidden','-fPIC','-pthread','-w','-o',out+'.so',out+'.cpp'])
    return ctypes.CDLL(out+'.so')
