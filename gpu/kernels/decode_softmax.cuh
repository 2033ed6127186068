// decode_softmax.cuh - decode_attention's online softmax: scores of a tile to weights.
#pragma once
#include "decode_products.cuh"

// A lane's share of one warp's result. Index 0 is for row lane / 4, 1 for row lane / 4 + 8.
struct Sums {
  float output[D / 8][4];  // sum of weight * value
  float top[2];            // the maximum that exponents are relative to, in units of the scores
  float weight[2];         // sum of weights over this lane's positions
};

// Scales of an e4m3 cache, for positions 8n + lane % 4 * 2 + {0, 1} of a tile.
struct Scales {
  float keys[2][2], values[2][2];
};

// Scores to weights (as A operand), with the running sums brought to the new maximum. A weight is
// 2^(unit * (score - maximum)). valid is a bit for each position of the tile.
DEVICE void softmax(float (&scores)[2][4], u32 (&weights)[4], Sums& sums, float unit, u32 valid,
                    Scales& scales) {
  if (valid != ALL_ROWS) {
    valid >>= threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (!(valid & 1u << (8 * n + j))) {
          scores[n][j] = scores[n][2 + j] = -INFINITY_F;
          scales.keys[n][j] = 1.f;  // what was read may be NaN
          scales.values[n][j] = 0.f;
        }
  }
  float top[2] = {sums.top[0], sums.top[1]};
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      if constexpr (QUANTIZED) {
        // The bound keeps the sum of weights finite where a value's scale is next to nothing.
        const float shift = fmaxf(log2_approx(scales.values[n][j]), -64.f);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          scores[n][2 * h + j] *= scales.keys[n][j];
          top[h] = fmaxf(top[h], scores[n][2 * h + j] + shift);
        }
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = fmaxf(top[h], scores[n][2 * h + j]);
      }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    top[h] = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], 2));
  }
  // After the first tiles the maximum seldom moves, and then there is nothing to rescale.
  if (__any_sync(ALL_LANES, top[0] != sums.top[0] || top[1] != sums.top[1])) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float factor = exp2_approx(unit * (sums.top[h] - top[h]));
      sums.top[h] = top[h];
      sums.weight[h] *= factor;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        sums.output[n][2 * h] *= factor;
        sums.output[n][2 * h + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float offset = unit * top[h];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float w[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        w[j] = exp2_approx(unit * scores[n][2 * h + j] - offset);
        sums.weight[h] += w[j];
        if constexpr (QUANTIZED) w[j] *= scales.values[n][j];
      }
      weights[2 * n + h] = pack<Multiplied>(w[0], w[1]);
    }
  }
}
