// A quickselect by mass: candidates are split by a pivot, the side in which the cut lies is kept,
// and the mass of what is above is remembered. Nothing is sorted.
#include "truncation.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
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

Mass mass_around(const Candidates& all, float pivot) {
  const Floats pivots = broadcast(pivot);
  DoubleSums above, alike;
  for (int64_t i = 0; i < all.size; i += kLanes) {
    const Lanes lanes = first_lanes(all.size - i);
    const Floats x = load(all.x + i, lanes);
    const Floats weights = load(all.weights + i, lanes);
    above.add(keep(both(lanes, greater(x, pivots)), weights));
    alike.add(keep(both(lanes, equal(x, pivots)), weights));
  }
  return {above.value(), alike.value()};
}

// Those of `from` that compare so with `pivot`, packed into `to`, which may be the same memory and
// has room for 16 more.
template <Lanes (*kCompare)(Floats, Floats)>
int64_t pack(const float* x, const float* weights, int64_t size, float pivot, Candidates to) {
  const Floats pivots = broadcast(pivot);
  int64_t kept = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    const Floats values = load(x + i, lanes), masses = load(weights + i, lanes);
    const Lanes chosen = both(lanes, kCompare(values, pivots));
    // Up to 16 numbers are written: what is behind the chosen has been read, or is of no interest.
    store_packed(to.x + kept, chosen, values);
    kept += store_packed(to.weights + kept, chosen, masses);
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
      all.size = pack<greater>(all.x, all.weights, all.size, pivot, all);
      continue;
    }
    above += mass.above;
    if (above + mass.equal >= target) {
      all.size = pack<equal>(all.x, all.weights, all.size, pivot, all);
      return {pivot, count_ties(above, all.weights[0], target, all.size)};
    }
    above += mass.equal;
    all.size = pack<less>(all.x, all.weights, all.size, pivot, all);
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
    Floats most = broadcast(-kInfinity);
    for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, size); i += kLanes)
      most = max(most, load(x + i, first_lanes(size - i), most));
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
    some.size = pack<not_below>(x, weights, vocab_size, bound, some);
    std::fill_n(some.weights, some.size, 1.0f);
    cut = {find_mass(some, static_cast<double>(top_k)).threshold, kAllTies};
    if (top_p == 1) return cut;
    some.size = pack<not_below>(x, weights, vocab_size, cut.threshold, some);
    DoubleSums sum;
    for (int64_t i = 0; i < some.size; i += kLanes)
      sum.add(load(some.weights + i, first_lanes(some.size - i)));
    total = sum.value();
  } else {
    // All that weigh less than this weigh less than what top_p leaves out.
    const double least = (1 - top_p) * total / static_cast<double>(vocab_size);
    // The weights decide, so they are what is compared.
    some.size = pack<not_below>(weights, x, vocab_size, static_cast<float>(least) * 0.999f,
                                 {some.weights, some.x, 0});
  }
  const Cut nucleus = find_mass(some, top_p * total);
  return nucleus.threshold == -kInfinity && nucleus.ties == kAllTies ? cut : nucleus;
}

}  // namespace trioserve::TRIOSERVE_ISA
