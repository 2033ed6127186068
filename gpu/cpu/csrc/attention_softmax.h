// Attention's softmax over one block of keys, and the sum of several blocks' parts.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_plan.h"
#include "operands.h"

namespace trioserve::TRIOSERVE_ISA {

// Weights below e^-80 count as 0: numbers near the smallest are slow.
inline constexpr float kLeastExponent = -80.0f * kLog2e;

// What softmax leaves of a row's scores in one block, apart from the weights: the largest one's
// exponent of 2, and the sum of the weights relative to that.
struct Softmax {
  float peak = -INFINITY;
  float sum = 0.0f;  // 0: the row sees no key
};

// weights[k] = 2^(scores[k] * scale - peak) for the keys first to last - 1, which the row sees, and
// 0 for the others of begin to end - 1; both are multiples of 16. Without kMasks the row sees all of
// them. All rows of a tile go through the same groups, so that the processor foresees every branch.
template <bool kMasks>
Softmax softmax_of(const float* scores, int first, int last, int begin, int end, float scale,
                   Activation* weights) {
  const auto seen = [&](int key) {
    return kMasks ? lanes_between(first - key, last - key) : first_lanes(kLanes);
  };
  Floats peaks = broadcast(-INFINITY);
  for (int key = begin; key < end; key += kGroup)
    peaks = max(peaks, load(scores + key), seen(key));
  Softmax result;
  result.peak = largest_of(peaks) * scale;
  const Floats factor = broadcast(scale), peak = broadcast(result.peak);
  const Floats least = broadcast(kLeastExponent);
  Floats sums = zeros();
  for (int key = begin; key < end; key += kGroup) {
    const Floats x = fms(load(scores + key), factor, peak);
    // A NaN is not less than anything, and stays.
    const Floats power = keep(both(seen(key), not_less(x, least)), exp2_within(x));
    sums = sums + power;
    store(weights + key, power);
  }
  result.sum = sum_of(sums);
  return result;
}

inline Softmax softmax_row(const float* scores, int first, int last, int begin, int end,
                           float scale, Activation* weights) {
  end = (end + kGroup - 1) & ~(kGroup - 1);
  if (first <= begin && last >= end)
    return softmax_of<false>(scores, first, last, begin, end, scale, weights);
  return softmax_of<true>(scores, first, last, begin, end, scale, weights);
}

// Adds a part of later keys to a sum over earlier ones, both relative to a peak of their own.
inline void merge(Softmax& total, float* sums, const Softmax& part, const float* part_sums,
                  int head_dim) {
  if (part.sum == 0.0f) return;
  if (total.sum == 0.0f) {
    total = part;
    std::memcpy(sums, part_sums, head_dim * sizeof(float));
    return;
  }
  const float peak = std::max(total.peak, part.peak);
  const Floats old = exp2_of(broadcast(total.peak - peak));
  const Floats added = exp2_of(broadcast(part.peak - peak));
  for (int i = 0; i < head_dim; i += kLanes) {
    const Floats scaled = load(sums + i) * old;
    store(sums + i, fma(load(part_sums + i), added, scaled));
  }
  total.sum = std::fma(part.sum, first_of(added), total.sum * first_of(old));
  total.peak = peak;
}

}  // namespace trioserve::TRIOSERVE_ISA
