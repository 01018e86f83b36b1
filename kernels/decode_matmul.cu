// The matmuls of a layer for up to X_ROWS rows of x (see decode.cu).

#include "decode_matmul.cuh"
#include "gelu.cuh"

MATMUL decode_qkv(element* query, element* keys, element* values, float* residual, const float* inp,
                  const float* branches, const element* branch_bias, const element* normed, const element* ln_weight,
                  const element* ln_bias, const element* weight, const element* bias, const Control* control, int maxT,
                  int T, int N, int stages) {
    const Group rows(N);
    const QkvResult result = {query, keys, values, control->position, maxT, T};
    normalized_matmul<4>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias, weight, bias, 3 * C, rows,
                         N, stages, [&](int row, int i, float x) {
        if (i < rows.N) from_float(*result.at(row, rows.begin + i), x);
    });
}

MATMUL decode_fc(element* fch_gelu, float* residual, const float* inp, const float* branches,
                 const element* branch_bias, const element* normed, const element* ln_weight, const element* ln_bias,
                 const element* weight, const element* bias, int N, int stages) {
    const Group rows(N);
    normalized_matmul<1>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias, weight, bias, 4 * C, rows,
                         N, stages, [&](int row, int i, float x) {
        if (i < rows.N) from_float(fch_gelu[int64(rows.begin + i) * 4 * C + row], gelu(x));
    });
}

// branches (gridDim.z,N,C) = inp (N,gridDim.z*C) @ weight^T, the sum over each C of the inner dimension apart.
MATMUL decode_project(float* branches, const element* inp, const element* weight, int N, int stages) {
    const Group rows(N);
    const int inner = gridDim.z * C, part = blockIdx.z;
    const auto begin = [&] {
        wait_for_inputs();
        return inp + int64(rows.begin) * inner + part * C;
    };
    matmul_rows(weight + part * C, inner, nullptr, C, rows.N, stages, inner, begin, [&](int row, int i, float x) {
        if (i < rows.N) branches[(int64(part) * N + rows.begin + i) * C + row] = x;
    });
}
