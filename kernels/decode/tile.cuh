// What ROWS neighbouring lanes do together, each of which has one row of a tile of a weight.

#pragma once

#include "decode/step.cuh"
#include "cap.cuh"

constexpr int ROWS = DECODE_ROWS;  // 16 or 8

// The x of another row, whose number differs in the bit `distance`.
__device__ inline float exchanged(float x, int distance) {
    const uint32 together = ((1u << ROWS) - 1) << threadIdx.x % 32 / ROWS * ROWS;
    return __shfl_xor_sync(together, x, distance);
}

// f(x, y) over the rows.
template <class Combine>
__device__ inline float over_tile(float x, const Combine& f) {
#pragma unroll
    for (int distance = 1; distance < ROWS; distance *= 2) x = f(x, exchanged(x, distance));
    return x;
}

// logits (Vp,) at the row = x, capped; tiles (Vp/ROWS,) at its tile = what TileOfLogits says.
__device__ inline void put_logit(float* logits, TileOfLogits* tiles, int row, float x,
                                 float temperature) {
    const float logit = capped(x);
    logits[row] = logit;
    const bool is_token = row < V;
    const auto add = [](float a, float b) { return a + b; };
    const float largest = over_tile(is_token ? logit : -INFINITE,
                                    [](float a, float b) { return fmaxf(a, b); });
    const float sum = over_tile(is_token ? expf(logit - largest) : 0.0f, add);
    float tempered = sum;  // with a temperature of 0, nobody asks for it
    if (temperature != 1.0f && temperature > 0.0f)
        tempered = over_tile(is_token ? expf((logit - largest) / temperature) : 0.0f, add);
    if (row % ROWS == 0) tiles[row / ROWS] = {largest, sum, tempered, 0.0f};
}
