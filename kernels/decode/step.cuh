// Text generation: a forward pass over T more positions of each of B sequences, whose keys and
// values are kept, and the next token of each.
//
//     decode_embed      wte[token] + wpe[position]                   residual, branches =
//     decode_layernorm  residual, layernorm, if the matmul does not  residual, normed =
//     decode_qkv        residual, layernorm, matmul                 residual, query, keys, values =
//     decode_attention  softmax(query @ keys^T / sqrt(HS)) @ values  atty =
//     decode_project    matmul, of atty or act                       branches =
//     decode_fc         residual, layernorm, matmul, GELU            residual, act =
//     decode_logits     residual, layernorm, matmul; sums of tiles   residual, logits, tiles =
//     decode_sample     draws the next token                         tokens, randoms, control =
//
// Llama 3 has RMSNorm for layernorm (RMS), no biases, queries and keys rotated for wpe (ROPE),
// SwiGLU for GELU (SWIGLU). The speed run's model has RMSNorm, also after the embedding, rotation,
// squared ReLU, normalized queries and keys (MODEL_QK_SCALE), a bias of the logits and their cap.
// Arguments that a model lacks are null. The pages' Decoders are the specification,
// llmc/sampler.py's Choice that of decode_sample. There are N = B*T rows. residual (N,C) and logits
// (B,Vp) are float32; query and atty (N,Q), act (N,F), keys and values (B,NKV,maxT,HS) are
// elements. "residual" above: branches, which decode_project wrote, is added to the residual
// stream. The position is in GPU memory, so that one graph is every step. In this chain, a row has
// the same bits whatever the other rows are.
//
// A step reads all weights once; the rest of its time is the latency of the chain. So each kernel
// begins before the previous one ends, requests its weights, and only then waits for its inputs
// (programmatic dependent launch).
//
// For one sequence in bfloat16 on Hopper, decode_token (token.cu) takes the place of all but
// decode_sample, where it fits. There, sums are in another order.

#pragma once

#include "common.cuh"

constexpr int WARPS = DECODE_WARPS, THREADS = 32 * WARPS;  // of a block; decode_sample has more
constexpr bool RMS = DECODE_RMS, ROPE = DECODE_ROPE, SWIGLU = DECODE_SWIGLU;  // else as in GPT-2
constexpr bool BIASES = !RMS || MODEL_BIASES;                                 // of linear layers
// in which attproj, fcproj are summed
constexpr int ATT_PARTS = DECODE_ATT_PARTS, FC_PARTS = DECODE_FC_PARTS;

typedef unsigned long long uint64;

// The state of a step beside its tensors; the host sets it before the first one.
struct Control {
    int position;  // of the token that is about to be read, the first one of each sequence
    int step;      // how many tokens were drawn so far
    int arrived;   // blocks of decode_sample that are done
    int top_k;     // these three: llmc/sampler.py's Choice
    float temperature, top_p;
};

// Of the logits of a tile, DECODE_ROWS tokens: the largest, and the sums of exp(logit - largest)
// and of exp((logit - largest) / temperature).
struct __align__(16) TileOfLogits {
    float largest, sum, weight, unused;
};

// The next kernel may begin, as soon as all blocks of this one have.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until then, nothing that this pass writes may be read, and nothing written. Control may be read:
// only a step's last kernel writes it, and a step begins when the one before has ended.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
