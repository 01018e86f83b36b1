// Flash attention forward. One idea: the softmax of exercise 13 while the values are added up, so that no (T,T) matrix
// is ever in memory. Dao et al. 2022, https://arxiv.org/abs/2205.14135
//
//     S = query @ key^T / sqrt(HS), only keys up to the query;  lse = log(sum over keys of exp(S))
//     out = exp(S - lse) @ value                                                              out =, lse =
//
// inp (B,T,3C): query, key, value side by side, each NH heads of HS; out (B,T,C); lse (B,NH,T) float32. C, NH, HS are
// constants: head h of position t of sequence b has its query at inp + (b * T + t) * 3 * C + h * HS, an int64, its key
// C further, its value 2 * C.

#include "common.cuh"

// A thread has a query, and goes through the keys in tiles in shared memory. Block (32, 64, 128 or 256), grid (T /
// block rounded up, NH, B).
extern "C" __global__ void __launch_bounds__(256)
attention_forward_online(element* out, float* lse, const element* inp, int T) {
    // not written yet: about 40 lines
}
