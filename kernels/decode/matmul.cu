// The matmuls of a layer, and the classifier (see matmul.cuh). In place of x they have the residual stream, as Residual
// says it, and its layernorm: normed (N,C) or, if that is null, what each block computes.

#include "decode/matmul.cuh"
#include "gelu.cuh"

// query (N,C) and, at their positions, keys and values (B,NH,maxT,HS) = x @ weight (3C,C)^T + bias.
MATMUL decode_qkv(element* query, element* keys, element* values, float* residual, const float* inp,
                  const float* branches, const element* branch_bias, const element* normed, const element* ln_weight,
                  const element* ln_bias, const element* weight, const element* bias, const Control* control, int maxT,
                  int T, int N, int stages) {
    const int position = control->position;
    normalized_matmul<4>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias, weight, bias, 3 * C, N,
                         stages, [&](int row, int n, float x) {
        const int b = T == 1 ? n : n / T, c = row % C;  // a division by T takes long
        const int64 cached = (int64(b * NH + c / HS) * maxT + position + n - b * T) * HS + c % HS;
        from_float(row < C ? query[int64(n) * C + c] : row < 2 * C ? keys[cached] : values[cached], x);
    });
}

// branches (gridDim.z,N,C) = inp (N,gridDim.z*C) @ weight^T, the sum over each C of the inner dimension apart.
MATMUL decode_project(float* branches, const element* inp, const element* weight, int N, int stages) {
    const Group rows(N);
    const int inner = gridDim.z * C, part = blockIdx.z;
    matmul_rows(weight + part * C, inner, nullptr, C, rows, stages, inner, [&] {
        wait_for_inputs();
        return inp + int64(rows.begin) * inner + part * C;
    }, [&](int row, int n, float x) { branches[(int64(part) * N + n) * C + row] = x; });
}

// fch_gelu (N,4C) = GELU(x @ weight (4C,C)^T + bias).
MATMUL decode_fc(element* fch_gelu, float* residual, const float* inp, const float* branches,
                 const element* branch_bias, const element* normed, const element* ln_weight, const element* ln_bias,
                 const element* weight, const element* bias, int N, int stages) {
    normalized_matmul<1>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias, weight, bias, 4 * C, N,
                         stages, [&](int row, int n, float x) {
        from_float(fch_gelu[int64(n) * 4 * C + row], gelu(x));
    });
}

// logits (N,Vp) = x @ wte (Vp,C)^T.
MATMUL decode_logits(float* logits, float* residual, const float* inp, const float* branches,
                     const element* branch_bias, const element* normed, const element* ln_weight,
                     const element* ln_bias, const element* wte, int N, int stages) {
    normalized_matmul<4>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias, wte, nullptr, Vp, N,
                         stages, [&](int row, int n, float x) {
        logits[int64(n) * Vp + row] = x;
    });
}
