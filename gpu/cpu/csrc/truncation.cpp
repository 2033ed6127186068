// A quickselect by mass: candidates are split by a pivot, the side in which the cut lies is kept,
// and the mass of what is above is remembered. Nothing is sorted.
#include "truncation.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "vector.h"

namespace trioserve {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kAllTies = std::numeric_limits<int64_t>::max();
constexpr int64_t kBlock = 128;
constexpr int64_t kMostBlocks = 4096;

// Values, and what each of them counts for.
struct Candidates {
  float* x;
  float* weights;
  int64_t size;
};

struct Mass {
  double above, equal;
};

// The sum of many floats in doubles.
class Sum {
 public:
  void add(__m512 x) {
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double value() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

Mass mass_around(const Candidates& all, float pivot) {
  const __m512 pivots = _mm512_set1_ps(pivot);
  Sum above, equal;
  for (int64_t i = 0; i < all.size; i += kLanes) {
    const __mmask16 lanes = first_lanes(all.size - i);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, all.x + i);
    const __m512 weights = _mm512_maskz_loadu_ps(lanes, all.weights + i);
    above.add(_mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(lanes, x, pivots, _CMP_GT_OQ), weights));
    equal.add(_mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(lanes, x, pivots, _CMP_EQ_OQ), weights));
  }
  return {above.value(), equal.value()};
}

// Those of `from` that compare so with `pivot`, packed into `to`, which may be the same memory and
// has room for 16 more.
template <int kComparison>
int64_t pack(const float* x, const float* weights, int64_t size, float pivot, Candidates to) {
  const __m512 pivots = _mm512_set1_ps(pivot);
  int64_t kept = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 values = _mm512_maskz_loadu_ps(first_lanes(size - i), x + i);
    const __m512 masses = _mm512_maskz_loadu_ps(first_lanes(size - i), weights + i);
    const __mmask16 chosen =
        _mm512_mask_cmp_ps_mask(first_lanes(size - i), values, pivots, kComparison);
    // A whole register is stored: what is behind it has been read, or is of no interest.
    _mm512_storeu_ps(to.x + kept, _mm512_maskz_compress_ps(chosen, values));
    _mm512_storeu_ps(to.weights + kept, _mm512_maskz_compress_ps(chosen, masses));
    kept += __builtin_popcount(chosen);
  }
  return kept;
}

// The middle one of some that stand evenly spread.
float pivot_of(const Candidates& all) {
  float sample[9];
  for (int i = 0; i < 9; ++i) sample[i] = all.x[all.size * i / 9];
  std::nth_element(sample, sample + 4, sample + 9);
  return sample[4];
}

// How many of equal weights it takes from `mass` on until `target` is reached, one after the other.
int64_t count_ties(double mass, float weight, double target, int64_t most) {
  int64_t count = 1;
  for (mass += weight; mass < target && count < most; mass += weight) ++count;
  return count;
}

// The first value, from the largest on, at which the sum of weights reaches `target`. Of equal
// values as many are to be kept as it takes. Overwrites the candidates.
Cut find_mass(Candidates all, double target) {
  double above = 0;
  while (all.size > 0) {
    const float pivot = pivot_of(all);
    const Mass mass = mass_around(all, pivot);
    if (above + mass.above >= target) {
      all.size = pack<_CMP_GT_OQ>(all.x, all.weights, all.size, pivot, all);
      continue;
    }
    above += mass.above;
    if (above + mass.equal >= target) {
      all.size = pack<_CMP_EQ_OQ>(all.x, all.weights, all.size, pivot, all);
      return {pivot, count_ties(above, all.weights[0], target, all.size)};
    }
    above += mass.equal;
    all.size = pack<_CMP_LT_OQ>(all.x, all.weights, all.size, pivot, all);
  }
  return {-kInfinity, kAllTies};  // not reached, for rounding: nothing is cut
}

}  // namespace

float bound_of_largest(const float* x, int64_t size, int64_t count) {
  // That many blocks have a number no smaller than the count-th largest of the blocks' largest.
  float largest[kMostBlocks];
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  if (count > blocks || blocks > kMostBlocks) return -kInfinity;
  for (int64_t block = 0; block < blocks; ++block) {
    __m512 most = _mm512_set1_ps(-kInfinity);
    for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, size); i += kLanes)
      most = _mm512_max_ps(most, _mm512_mask_loadu_ps(most, first_lanes(size - i), x + i));
    largest[block] = largest_of(most);
  }
  std::nth_element(largest, largest + count - 1, largest + blocks, std::greater<float>());
  return largest[count - 1];
}

Cut find_cut(const float* x, const float* weights, int64_t vocab_size, double total, int64_t top_k,
             double top_p, float* scratch) {
  Candidates some{scratch, scratch + vocab_size + kLanes, 0};
  Cut cut{-kInfinity, kAllTies};
  if (top_k > 0) {
    const float bound = bound_of_largest(x, vocab_size, top_k);
    // Each counts for one: the cut is where there are top_k, and keeps all that are equal.
    some.size = pack<_CMP_GE_OQ>(x, weights, vocab_size, bound, some);
    std::fill_n(some.weights, some.size, 1.0f);
    cut = {find_mass(some, static_cast<double>(top_k)).threshold, kAllTies};
    if (top_p == 1) return cut;
    some.size = pack<_CMP_GE_OQ>(x, weights, vocab_size, cut.threshold, some);
    Sum sum;
    for (int64_t i = 0; i < some.size; i += kLanes)
      sum.add(_mm512_maskz_loadu_ps(first_lanes(some.size - i), some.weights + i));
    total = sum.value();
  } else {
    // All that weigh less than this weigh less than what top_p leaves out.
    const double least = (1 - top_p) * total / static_cast<double>(vocab_size);
    // The weights decide, so they are what is compared.
    some.size = pack<_CMP_GE_OQ>(weights, x, vocab_size, static_cast<float>(least) * 0.999f,
                                 {some.weights, some.x, 0});
  }
  const Cut nucleus = find_mass(some, top_p * total);
  return nucleus.threshold == -kInfinity && nucleus.ties == kAllTies ? cut : nucleus;
}

}  // namespace trioserve
