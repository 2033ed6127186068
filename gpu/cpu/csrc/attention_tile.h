// The two products of attention over one block of keys, and the softmax between them.
//
// The rows of a tile are multiplied with 16 keys at a time, and their weights with 16 numbers of
// two values at a time. Each sum is added up by itself, from the first pair to the last, so it is
// the same however many rows and columns are computed side by side; these are so many that the sums
// fill the registers, for an addition waits for the one before it, and others fill the time.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "attention_plan.h"
#include "operands.h"
#include "processor.h"

namespace trioserve::TRIOSERVE_ISA {

// Keys stand in groups of 16, as do values, of head_dim * 16 numbers each. They are fetched ahead of
// their use by so many groups.
inline constexpr int kGroups = kKeyBlock / kGroup;
inline constexpr int kAhead = 4;

// Rows and columns of sums that are computed at once. Columns of values come by two where registers are
// many, as head_dim is a multiple of 32.
inline constexpr int kRowsAtOnce = 6;
inline constexpr int kColumnsAtOnce = 4;
inline constexpr int kValueColumns = kRegisters >= 32 ? 2 : 1;
// Groups that are read with all rows before the next ones are.
inline constexpr int kGroupsAtOnce = 4;

// The columns that are computed at once with so many rows: registers hold the sums, a number of each
// column, and one of a row.
constexpr int columns_for(int rows) { return std::min(kColumnsAtOnce, (kRegisters - 1) / (rows + 1)); }

// Weights below e^-80 count as 0: numbers near the smallest are slow.
inline constexpr float kLeastExponent = -80.0f * kLog2e;

// The same columns are computed with the rows of a tile in several turns, and in each turn some of the
// columns are fetched ahead, so that memory is always at work. This is the first one; they are
// kColumns / kTurns, rounded up, and where that makes more than there are, some are fetched again.
template <int kColumns, int kTurns>
struct Ahead {
  static constexpr int count = (kColumns + kTurns - 1) / kTurns;
  static int first(int turn) { return std::min(turn * count, kColumns - count); }
};

// scores[r][g * 16 + j] = q[r] * key j of group g. A row of q is head_dim numbers, one of scores
// kKeyBlock.
template <int kRows, int kColumns, int kTurns>
void multiply_keys(const Activation* q, int head_dim, const bf16* const* groups, int turn,
                   float* scores) {
  using Fetched = Ahead<kColumns, kTurns>;
  const bf16* const* ahead = groups + kAhead + Fetched::first(turn);
  Floats sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g) sums[r][g] = zeros();
  for (int i = 0; i < head_dim / 2; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < Fetched::count; ++g) prefetch(ahead[g] + 2 * kGroup * i);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Operand keys[kColumns];
#pragma GCC unroll 8
      for (int g = 0; g < kColumns; ++g) keys[g] = weight_part(groups[g] + 2 * kGroup * i, part);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Operand number = activation_part(q + r * head_dim + 2 * i, part);
#pragma GCC unroll 8
        for (int g = 0; g < kColumns; ++g) sums[r][g] = add_products(sums[r][g], number, keys[g]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g)
      store(scores + r * kKeyBlock + g * kGroup, sums[r][g]);
}

// out[r] = weights[r][k] * value k, summed over so many keys, for 16 * kColumns numbers; or if it
// `continues`, out[r] += that. A row of weights is kKeyBlock numbers, one of `out` head_dim.
template <int kRows, int kColumns, int kTurns>
void multiply_values(const Activation* weights, const bf16* const* groups, int num_keys,
                     int head_dim, bool continues, int turn, float* out) {
  using Fetched = Ahead<kColumns, kTurns>;
  const int first_ahead = Fetched::first(turn) * 2 * kLanes;
  const Lanes before = first_lanes(continues ? kLanes : 0);
  Floats sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      sums[r][c] = load(out + r * head_dim + c * kLanes, before);
  // The last value may have no other to make a pair with: what stands there isn't a number of ours.
  const auto add = [&]<bool kPair>(const bf16* values, const bf16* later, int key) {
#pragma GCC unroll 8
    for (int c = 0; c < Fetched::count; ++c) prefetch(later + first_ahead + 2 * kLanes * c);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Operand pairs[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const bf16* at = values + 2 * kLanes * c;
        pairs[c] = kPair ? weight_part(at, part) : first_weight_part(at, part);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Operand number = activation_part(weights + r * kKeyBlock + key, part);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sums[r][c] = add_products(sums[r][c], number, pairs[c]);
      }
    }
  };
  const int whole = num_keys & ~1;
  for (int key = 0; key < whole;) {
    const bf16 *values = groups[key / kGroup], *later = groups[key / kGroup + kAhead];
    const int stop = std::min(key + kGroup, whole);
    for (; key < stop; key += 2, values += 2 * head_dim, later += 2 * head_dim)
      add.template operator()<true>(values, later, key);
  }
  if (whole < num_keys) {
    const int64_t offset = int64_t{whole % kGroup} * head_dim;
    const int group = whole / kGroup;
    add.template operator()<false>(groups[group] + offset, groups[group + kAhead] + offset, whole);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      store(out + r * head_dim + c * kLanes, sums[r][c]);
}

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
