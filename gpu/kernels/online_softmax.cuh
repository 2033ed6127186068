// online_softmax.cuh - softmax over keys that come tile by tile.
//
// For every query the running reference (a score near the largest so far) and the sum of the
// weights 2^((score - reference) * scale) are kept; when the reference is raised, the sum and the
// output so far are scaled down. Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018; FlashAttention-2, Dao, 2023.
//
// The reference is raised only when the largest score exceeds it by a factor of 2^LAG_LOG2 in
// weight: the final division makes any reference right, weights up to 2^8 fit every type, and after
// the first tiles the output is hardly ever rescaled ("FlashAttention-4", 2025). Only where a weight
// is multiplied by its token's largest value and must fit fp16 may the reference not lag: values use
// up that type's range.
//
// Layout: a warp holds 16 queries as C fragments of mma; a lane has rows lane/4 and lane/4 + 8 and
// shares them with the three other lanes of its quad.
#pragma once
#include "hardware.cuh"

constexpr bool FACTORS_IN_HALF = sizeof(CACHE) == 1 && IS_HALF<TYPE>;
constexpr float LAG_LOG2 = FACTORS_IN_HALF ? 0.f : 8.f;

struct SoftmaxState {
  float reference[2] = {-INFINITY_F, -INFINITY_F};  // unscaled score, the same in a whole quad
  float sum[2] = {0.f, 0.f};                        // of this lane's columns only
};

// Raise the references to the scores at hand, and scale down what was summed before.
// scores [N][4], output [M][4]: C fragments. A score of -infinity is of a masked key.
template <int N, int M>
DEVICE void raise_reference(const float (&scores)[N][4], SoftmaxState& state,
                            float (&output)[M][4], float scale_log2) {
  float largest[2];
  bool raised[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    largest[h] = fmaxf(scores[0][2 * h], scores[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < N; n++)
      largest[h] = fmaxf(largest[h], fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], 2));
    // False where both are -infinity, for their difference is no number.
    raised[h] = (largest[h] - state.reference[h]) * scale_log2 > LAG_LOG2;
  }
  if (!__any_sync(ALL_LANES, raised[0] || raised[1])) return;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float reference = raised[h] ? largest[h] : state.reference[h];
    const float factor =
        raised[h] ? exp2_approx((state.reference[h] - reference) * scale_log2) : 1.f;
    state.reference[h] = reference;
    state.sum[h] *= factor;
#pragma unroll
    for (int m = 0; m < M; m++) {
      output[m][2 * h] *= factor;
      output[m][2 * h + 1] *= factor;
    }
  }
}

// The weights of 16 keys, from the scores of two N tiles: an A fragment for the second product.
// They are added to the sums as they are, and then multiplied by `factors` of their keys, if any:
// this lane's are factors[0], [1], [8] and [9].
template <class T>
DEVICE void weights(u32 (&a)[4], const float (&first)[4], const float (&second)[4],
                    SoftmaxState& state, float scale_log2, const float* factors) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    // A query that has seen no key yet has no reference: any finite one makes its weights 0.
    const float reference = state.reference[h] == -INFINITY_F ? 0.f : state.reference[h];
    const float minus_base = -reference * scale_log2;
    float w[4] = {first[2 * h], first[2 * h + 1], second[2 * h], second[2 * h + 1]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      w[i] = exp2_approx(fmaf(w[i], scale_log2, minus_base));
      state.sum[h] += w[i];
      if (factors) w[i] *= factors[i / 2 * 8 + i % 2];
    }
    a[h] = pack<T>(w[0], w[1]);
    a[h + 2] = pack<T>(w[2], w[3]);
  }
}

// The sum over all keys of row h, in every lane of its quad.
DEVICE float softmax_sum(const SoftmaxState& state, int h) {
  float sum = state.sum[h];
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  return sum;
}

// log2 of the sum of 2^(score * scale) over all keys of row h; -infinity if there were none.
DEVICE float softmax_lse(const SoftmaxState& state, int h, float sum, float scale_log2) {
  return sum > 0.f ? log2_approx(sum) + state.reference[h] * scale_log2 : -INFINITY_F;
}
