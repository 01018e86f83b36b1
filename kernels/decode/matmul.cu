// The matmuls of a layer, and the classifier (see matmul.cuh). In place of x they have the residual
// stream, as Residual says it, and its layernorm: normed (N,C) or, if that is null, what each block
// computes.

#include "decode/matmul.cuh"
#include "gelu.cuh"
#include "rope.cuh"
#include "swiglu.cuh"

// query (N,Q) and, at their positions, keys and values (B,NKV,maxT,HS) = x @ weight (QKV,C)^T +
// bias. With ROPE, queries and keys are rotated: rope (maxT,HS/2) has the angles. Where they are
// normalized, attention does it, for the channels of a head are in several tiles; a rotation leaves
// its length as it is.
MATMUL decode_qkv(element* query, element* keys, element* values, float* residual, const float* inp,
                  const float* branches, const element* branch_bias, const element* normed,
                  const element* ln_weight, const element* ln_bias, const element* weight,
                  const element* bias, const float2* rope, const Control* control, int maxT, int T,
                  int N, int stages) {
    const int position = control->position;
    // the row of x of this thread's sums
    const int own = min(blockIdx.x * X_ROWS + threadIdx.x / ROWS, N - 1);
    const int b = T == 1 ? own : own / T, t = own - b * T;  // a division by T takes long
    normalized_matmul<FC_PARTS>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias,
                                weight, QKV, N, stages, [&](int row) -> Ahead {
        return {BIASES ? bias[row] : element{},
                ROPE ? rope[(position + t) * (HS / 2) + row % HS / 2] : float2{}};
    }, [&](int row, int n, float x, float2 angle) {
        if constexpr (ROPE) {
            const float other = exchanged(x, 1);  // the pair's
            const float2 pair = row % 2 ? rotated(other, x, angle) : rotated(x, other, angle);
            if (row < Q + KV) x = row % 2 ? pair.y : pair.x;
        }
        const int c = row < Q ? row : (row - Q) % KV;
        const int64 cached = (int64(b * NKV + c / HS) * maxT + position + t) * HS + c % HS;
        from_float(row < Q ? query[int64(n) * Q + c] : row < Q + KV ? keys[cached] : values[cached],
                   x);
    });
}

// The inner dimension, Q or F, has parts of ATT_WIDTH or FC_WIDTH, of which the last one may be
// shorter.
constexpr int ATT_WIDTH = DECODE_ATT_WIDTH, ATT_LAST = Q - (ATT_PARTS - 1) * ATT_WIDTH;
constexpr int FC_WIDTH = DECODE_FC_WIDTH, FC_LAST = F - (FC_PARTS - 1) * FC_WIDTH;
constexpr int MOST = ATT_WIDTH > FC_WIDTH ? ATT_WIDTH : FC_WIDTH,
    LEAST = ATT_LAST < FC_LAST ? ATT_LAST : FC_LAST;
static_assert(MOST <= C && LEAST > 0, "a tile has room for a part, and all parts have elements");

// branches (gridDim.z,N,C) = inp (N,inner) @ weight (C,inner)^T, each part of `width` of the inner
// dimension apart.
MATMUL decode_project(float* branches, const element* inp, const element* weight, int inner,
                      int width, int N, int stages) {
    const Group rows(N);
    const int part = blockIdx.z;
    const Inner<MOST, LEAST> own = {min(width, inner - part * width)};
    matmul_rows<false>(own, weight + part * width, inner, C, rows, stages, inner,
                       [](int) { return Ahead{}; }, [&] {
        wait_for_inputs();
        return inp + int64(rows.begin) * inner + part * width;
    }, [&](int row, int n, float x, float2) { branches[(int64(part) * N + n) * C + row] = x; });
}

// act (N,F) = GELU(x @ weight (F,C)^T + bias) or, with SWIGLU, that of x @ weight (2F,C)^T, up and
// gate: a tile of the weight has the rows of both.
MATMUL decode_fc(element* act, float* residual, const float* inp, const float* branches,
                 const element* branch_bias, const element* normed, const element* ln_weight,
                 const element* ln_bias, const element* weight, const element* bias, int N,
                 int stages) {
    normalized_matmul<ATT_PARTS, SWIGLU>({residual, inp, branches}, branch_bias, normed, ln_weight,
                                         ln_bias, weight, SWIGLU ? 2 * F : F, N, stages,
                                         [&](int row) -> Ahead {
        return {BIASES ? bias[row] : element{}, {}};
    }, [&](int row, int n, float x, float2) {
        if constexpr (SWIGLU) {
            const float gate = exchanged(x, ROWS / 2);
            if (row % ROWS >= ROWS / 2) return;  // the gate's own
            from_float(act[int64(n) * F + row / ROWS * (ROWS / 2) + row % ROWS], swiglu(x, gate));
        } else {
            from_float(act[int64(n) * F + row], gelu(x));
        }
    });
}

// logits (N,Vp) = x @ weight (Vp,C)^T, with the speed run's model + bias (Vp,), capped; tiles
// (N,Vp/ROWS): of the V tokens.
MATMUL decode_logits(float* logits, TileOfLogits* tiles, float* residual, const float* inp,
                     const float* branches, const element* branch_bias, const element* normed,
                     const element* ln_weight, const element* ln_bias, const element* weight,
                     const element* bias, const Control* control, int N, int stages) {
    const float temperature = control->temperature;
    normalized_matmul<FC_PARTS>({residual, inp, branches}, branch_bias, normed, ln_weight, ln_bias,
                                weight, Vp, N, stages, [&](int row) -> Ahead {
        return {bias ? bias[row] : element{}, {}};
    }, [&](int row, int n, float x, float2) {
        put_logit(logits + int64(n) * Vp, tiles + int64(n) * (Vp / ROWS), row, x, temperature);
    });
}
