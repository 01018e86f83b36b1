// Attention's backward pass. One idea: what the forward pass did not keep, the softmax, is computed
// again from lse; a loop over keys sums a query's gradient, one over queries a key's and a value's,
// so that no two threads add to the same number. Dao et al. 2022, https://arxiv.org/abs/2205.14135
//
//     P = exp(query @ key^T / sqrt(HS) - lse);  D = sum over HS of dout * out      D is there already
//     dP = dout @ value^T;  dS = P * (dP - D) / sqrt(HS)                 only keys up to the query
//     dquery = dS @ key;  dkey = dS^T @ query;  dvalue = P^T @ dout                           dinp =
//
// inp, dinp (B,T,3C): query, key, value side by side, each NH heads of HS; dout (B,T,C); lse, D
// (B,NH,T) float32. C, NH, HS are constants: head h of position t of sequence b has its query at
// inp + (b * T + t) * 3 * C + h * HS, an int64, its key C further, its value 2 * C; its dout at
// (b * T + t) * C + h * HS.

#include "common.cuh"

// A thread has a query. Both: block (any size up to 256), grid (T / block rounded up, NH, B).
extern "C" __global__ void __launch_bounds__(256)
attention_backward_dquery_thread_a_row(element* dinp, const element* dout, const element* inp,
                                       const float* lse,
                                       const float* D, int T) {
    // not written yet: about 20 lines
}

// A thread has a key and its value.
extern "C" __global__ void __launch_bounds__(256)
attention_backward_dkv_thread_a_row(element* dinp, const element* dout, const element* inp,
                                    const float* lse,
                                    const float* D, int T) {
    // not written yet: about 25 lines
}
