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
#include "vector.h"

namespace trioserve {

// Keys stand in groups of 16, as do values, of head_dim * 16 numbers each. They are fetched ahead of
// their use by so many groups.
inline constexpr int kGroups = kKeyBlock / kGroup;
inline constexpr int kAhead = 4;

// Rows and columns of sums that are computed at once.
inline constexpr int kRowsAtOnce = 6;
inline constexpr int kColumnsAtOnce = 4;
// Groups that are read with all rows before the next ones are.
inline constexpr int kGroupsAtOnce = kColumnsAtOnce;

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

inline void prefetch(const bf16* at) { _mm_prefetch(at, _MM_HINT_T0); }

// scores[r][g * 16 + j] = q[r] * key j of group g. A row of q is head_dim numbers, one of scores
// kKeyBlock.
template <int kRows, int kColumns, int kTurns>
void multiply_keys(const bf16* q, int head_dim, const bf16* const* groups, int turn,
                   float* scores) {
  using Fetched = Ahead<kColumns, kTurns>;
  const bf16* const* ahead = groups + kAhead + Fetched::first(turn);
  __m512 sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g) sums[r][g] = _mm512_setzero_ps();
  for (int i = 0; i < head_dim / 2; ++i) {
    __m512bh keys[kColumns];
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g) keys[g] = load_pairs(groups[g] + 2 * kGroup * i);
#pragma GCC unroll 8
    for (int g = 0; g < Fetched::count; ++g) prefetch(ahead[g] + 2 * kGroup * i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh pair = broadcast_pair(q + r * head_dim + 2 * i);
#pragma GCC unroll 8
      for (int g = 0; g < kColumns; ++g) sums[r][g] = _mm512_dpbf16_ps(sums[r][g], pair, keys[g]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g)
      _mm512_storeu_ps(scores + r * kKeyBlock + g * kGroup, sums[r][g]);
}

// out[r] = weights[r][k] * value k, summed over so many keys, for 16 * kColumns numbers; or if it
// `continues`, out[r] += that. A row of weights is kKeyBlock numbers, one of `out` head_dim.
template <int kRows, int kColumns, int kTurns>
void multiply_values(const bf16* weights, const bf16* const* groups, int num_keys, int head_dim,
                     bool continues, int turn, float* out) {
  using Fetched = Ahead<kColumns, kTurns>;
  const int first_ahead = Fetched::first(turn) * 2 * kLanes;
  const __mmask16 before = continues ? 0xffff : 0;
  __m512 sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      sums[r][c] = _mm512_maskz_loadu_ps(before, out + r * head_dim + c * kLanes);
  // The last value may have no other to make a pair with: what stands there isn't a number of ours.
  const auto add = [&](const bf16* values, const bf16* later, int key, __m512i mask) {
    __m512bh pairs[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const __m512i both = _mm512_loadu_si512(values + 2 * kLanes * c);
      pairs[c] = reinterpret_cast<__m512bh>(_mm512_and_si512(both, mask));
    }
#pragma GCC unroll 8
    for (int c = 0; c < Fetched::count; ++c) prefetch(later + first_ahead + 2 * kLanes * c);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh pair = broadcast_pair(weights + r * kKeyBlock + key);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], pair, pairs[c]);
    }
  };
  const __m512i all = _mm512_set1_epi32(-1);
  const int whole = num_keys & ~1;
  for (int key = 0; key < whole;) {
    const bf16 *values = groups[key / kGroup], *later = groups[key / kGroup + kAhead];
    const int stop = std::min(key + kGroup, whole);
    for (; key < stop; key += 2, values += 2 * head_dim, later += 2 * head_dim)
      add(values, later, key, all);
  }
  if (whole < num_keys) {
    const int64_t offset = int64_t{whole % kGroup} * head_dim;
    const int group = whole / kGroup;
    add(groups[group] + offset, groups[group + kAhead] + offset, whole, _mm512_set1_epi32(0xffff));
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      _mm512_storeu_ps(out + r * head_dim + c * kLanes, sums[r][c]);
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
                   bf16* weights) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i from = _mm512_set1_epi32(first), to = _mm512_set1_epi32(last);
  const auto seen = [&](int key) -> __mmask16 {
    if (!kMasks) return 0xffff;
    const __m512i keys = _mm512_add_epi32(lanes, _mm512_set1_epi32(key));
    return _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(keys, from), keys, to);
  };
  __m512 peaks = _mm512_set1_ps(-INFINITY);
  for (int key = begin; key < end; key += kGroup)
    peaks = _mm512_mask_max_ps(peaks, seen(key), peaks, _mm512_loadu_ps(scores + key));
  Softmax result;
  result.peak = largest_of(peaks) * scale;
  const __m512 factor = _mm512_set1_ps(scale), peak = _mm512_set1_ps(result.peak);
  const __m512 least = _mm512_set1_ps(kLeastExponent);
  __m512 sums = _mm512_setzero_ps();
  for (int key = begin; key < end; key += kGroup) {
    const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + key), factor, peak);
    // A NaN is not less than anything, and stays.
    const __mmask16 counts = _mm512_mask_cmp_ps_mask(seen(key), x, least, _CMP_NLT_UQ);
    const __m512 power = _mm512_maskz_mov_ps(counts, exp2_within(x));
    sums = _mm512_add_ps(sums, power);
    store(weights + key, power);
  }
  result.sum = sum_of(sums);
  return result;
}

inline Softmax softmax_row(const float* scores, int first, int last, int begin, int end,
                           float scale, bf16* weights) {
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
  const __m512 old = exp2_of(_mm512_set1_ps(total.peak - peak));
  const __m512 added = exp2_of(_mm512_set1_ps(part.peak - peak));
  for (int i = 0; i < head_dim; i += kLanes) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(sums + i), old);
    _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(_mm512_loadu_ps(part_sums + i), added, scaled));
  }
  total.sum = std::fma(part.sum, _mm512_cvtss_f32(added), total.sum * _mm512_cvtss_f32(old));
  total.peak = peak;
}

}  // namespace trioserve
