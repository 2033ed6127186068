#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "philox.h"
#include "truncation.h"
#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Tokens in a block of the draw's first stage. Part of what a seed means: it never changes.
constexpr int64_t kBlock = 128;
// Below this every other token's probability is 0 anyway, and 1 / temperature overflows.
constexpr float kLowestTemperature = 1e-30f;

int64_t blocks_of(int64_t vocab_size) { return (vocab_size + kBlock - 1) / kBlock; }

// e^x for x <= 0, within one unit in the last place; 0 for -inf.
Floats exp_of(Floats x) {
  x = max(x, broadcast(-200.0f));
  const Floats whole = to_whole(x * broadcast(kLog2e));
  // ln 2 in two parts, so that nothing is lost in the difference.
  Floats rest = fnma(whole, broadcast(0.693359375f), x);
  rest = fnma(whole, broadcast(-2.12194440e-4f), rest);
  // The polynomial of Cephes' expf.
  Floats sum = broadcast(1.9875691500e-4f);
  sum = fma(sum, rest, broadcast(1.3981999507e-3f));
  sum = fma(sum, rest, broadcast(8.3334519073e-3f));
  sum = fma(sum, rest, broadcast(4.1665795894e-2f));
  sum = fma(sum, rest, broadcast(1.6666665459e-1f));
  sum = fma(sum, rest, broadcast(5.0000001201e-1f));
  sum = fma(sum, rest * rest, rest);
  return scale_by_power(sum + broadcast(1.0f), whole);
}

// The largest of x; NaN if there is one.
float peak_of(const float* x, int64_t size) {
  Floats most = broadcast(-kInfinity);
  Lanes nans = first_lanes(0);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    const Floats values = load(x + i, lanes);
    nans = either(nans, is_nan(values));
    most = max(most, values, lanes);
  }
  return bits_of(nans) ? std::numeric_limits<float>::quiet_NaN() : largest_of(most);
}

int64_t first_equal(const float* x, int64_t size, float value) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    const uint32_t found = bits_of(both(lanes, equal(load(x + i, lanes), broadcast(value))));
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

void share_among_infinite(const float* logits, int64_t size, float* x) {
  for (int64_t i = 0; i < size; ++i) x[i] = logits[i] == kInfinity ? 0.0f : -kInfinity;
}

// x = (logits - peak) / temperature and weights = e^x.
void weigh(const float* logits, int64_t size, float peak, float temperature, float* x,
           float* weights) {
  const Floats peaks = broadcast(peak), temperatures = broadcast(temperature);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    Floats scaled = load(logits + i, lanes) - peaks;
    if (temperature != 1) scaled = scaled / temperatures;
    store(x + i, scaled, lanes);
    store(weights + i, exp_of(scaled), lanes);
  }
}

// sums[b] = the sum of block b of the weights.
void add_blocks(const float* weights, int64_t size, double* sums) {
  for (int64_t begin = 0, block = 0; begin < size; begin += kBlock, ++block) {
    Floats sum = zeros();
    for (int64_t i = begin; i < std::min(begin + kBlock, size); i += kLanes)
      sum = sum + load(weights + i, first_lanes(size - i));
    sums[block] = sum_of(sum);
  }
}

// Zeros the weights of what the cut and min_p leave out.
void drop(const float* x, float* weights, int64_t size, const Cut& cut, float min_p) {
  const Floats thresholds = broadcast(cut.threshold), least = broadcast(min_p);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    const Floats weight = load(weights + i, lanes);
    const Lanes kept =
        both(not_below(load(x + i, lanes), thresholds), not_below(weight, least));
    store(weights + i, keep(kept, weight), lanes);
  }
  if (cut.ties >= size) return;
  int64_t ties = cut.ties;
  for (int64_t i = 0; i < size; ++i)
    if (x[i] == cut.threshold && --ties < 0) weights[i] = 0;
}

// The winner of an exponential race between candidates of these weights, at least one above 0.
template <typename T>
int64_t race(const Draw& draw, Purpose purpose, const T* weights, int64_t size,
             uint32_t first_lane) {
  int64_t winner = 0;
  double earliest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; ++i) {
    if (!(weights[i] > 0)) continue;
    const double number = uniform(draw.seed, draw.position, draw.index, purpose,
                                  first_lane + static_cast<uint32_t>(i));
    const double time = -std::log1p(-number) / static_cast<double>(weights[i]);
    if (time < earliest) {
      earliest = time;
      winner = i;
    }
  }
  return winner;
}

// What a thread works with; each part has room for the whole vocabulary.
struct Scratch {
  Scratch(void* memory, int64_t size)
      : sums(static_cast<double*>(memory)),
        counts(reinterpret_cast<int32_t*>(sums + blocks_of(size))),
        x(reinterpret_cast<float*>(counts + size)),
        weights(x + size),
        rest(weights + size) {}

  double* sums;     // of blocks
  int32_t* counts;  // zeros between uses
  float *x, *weights;
  float* rest;  // for find_cut
};

// Steps 7 to 10: fills x, weights and sums of the scratch.
void weigh_and_cut(const float* logits, int64_t size, float peak, const Draw& draw,
                   const Scratch& scratch) {
  const auto& [sums, counts, x, weights, rest] = scratch;
  weigh(logits, size, peak, std::max(draw.temperature, kLowestTemperature), x, weights);
  add_blocks(weights, size, sums);
  const int64_t top_k = draw.top_k < size ? std::max(draw.top_k, 0) : 0;
  const bool cuts = top_k > 0 || draw.top_p < 1;
  if (!cuts && draw.min_p <= 0) return;
  Cut cut{-kInfinity, size};
  if (cuts) {
    double total = 0;
    for (int64_t block = 0; block < blocks_of(size); ++block) total += sums[block];
    cut = find_cut(x, weights, size, total, top_k, draw.top_p, rest);
  }
  drop(x, weights, size, cut, draw.min_p);
  add_blocks(weights, size, sums);
}

int64_t draw_row(float* logits, int64_t size, const Draw& draw, RowChanges changes,
                 const Scratch& scratch) {
  const float* row = change_row(logits, size, changes, scratch.x, scratch.counts);
  float peak = peak_of(row, size);
  const bool is_finite = std::isfinite(peak);
  if (peak == kInfinity) {
    share_among_infinite(row, size, scratch.x);
    row = scratch.x;
    peak = 0;
  }
  const bool is_greedy = !(draw.temperature > 0);
  if (draw.keeps_logits && (is_greedy || !is_finite) && row != logits)
    std::copy_n(row, size, logits);
  if (std::isnan(peak)) return kNanLogits;
  if (peak == -kInfinity) return kNoToken;
  if (is_greedy) return first_equal(row, size, peak);
  weigh_and_cut(row, size, peak, draw, scratch);
  if (draw.keeps_logits)
    for (int64_t i = 0; i < size; ++i)
      logits[i] = scratch.weights[i] > 0 ? scratch.x[i] : -kInfinity;
  const int64_t begin =
      kBlock * race(draw, Purpose::kBlock, scratch.sums, blocks_of(size), 0);
  return begin + race(draw, Purpose::kToken, scratch.weights + begin,
                      std::min(kBlock, size - begin), static_cast<uint32_t>(begin));
}

double sum_of_exponentials(const float* x, int64_t size, float peak) {
  DoubleSums sums;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    const Floats less = load(x + i, lanes) - broadcast(peak);
    sums.add(keep(lanes, exp_of(less)));
  }
  return sums.value();
}

// Writes the ids of the `count` largest above -inf, in the order of x - normalizer as that is
// rounded, and says how many there are.
int32_t find_largest(const float* x, int64_t size, float normalizer, int64_t count,
                     std::vector<int32_t>& candidates, int32_t* ids) {
  const Floats bounds = broadcast(bound_of_largest(x, size, count));
  const Floats nothing = broadcast(-kInfinity);
  candidates.clear();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes lanes = first_lanes(size - i);
    const Floats values = load(x + i, lanes, nothing);
    uint32_t found = bits_of(both(not_below(values, bounds), greater(values, nothing)));
    for (; found; found &= found - 1)
      candidates.push_back(static_cast<int32_t>(i) + __builtin_ctz(found));
  }
  const int64_t number = std::min<int64_t>(count, static_cast<int64_t>(candidates.size()));
  const auto is_before = [x, normalizer](int32_t a, int32_t b) {
    const float first = x[a] - normalizer, second = x[b] - normalizer;
    return first != second ? first > second : a < b;
  };
  std::partial_sort_copy(candidates.begin(), candidates.end(), ids, ids + number, is_before);
  return static_cast<int32_t>(number);
}

}  // namespace

int64_t draw_scratch_bytes(int64_t vocab_size) {
  const int64_t bytes =
      blocks_of(vocab_size) * sizeof(double) + (5 * vocab_size + 2 * kLanes) * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

void draw_tokens(const Team& team, float* logits, int64_t rows, int64_t vocab_size,
                 const Draw* draws, const Change* changes, const Adjustment& adjustment,
                 int32_t* tokens, void* scratch) {
  const int64_t bytes = draw_scratch_bytes(vocab_size);
  const Scratch mine(static_cast<std::byte*>(scratch) + team.rank() * bytes, vocab_size);
  const auto [bias, words, stride] = adjustment;
  // Rows differ in what they cost, and neighbours are often alike.
  for (int64_t i = team.rank(); i < rows; i += team.size()) {
    const RowChanges own{draws[i].change < 0 ? nullptr : changes + draws[i].change,
                         bias == nullptr ? nullptr : bias + i * vocab_size,
                         words == nullptr ? nullptr : words + i * stride};
    const int64_t token = draw_row(logits + i * vocab_size, vocab_size, draws[i], own, mine);
    tokens[i] = static_cast<int32_t>(token);
  }
}

void report_rows(const Team& team, const float* logits, int64_t vocab_size, const Report* reports,
                 int64_t num_reports, int64_t most, float* normalizers, int32_t* ids,
                 float* logprobs, int32_t* found) {
  std::vector<int32_t> candidates;
  for (int64_t i = team.rank(); i < num_reports; i += team.size()) {
    const float* x = logits + reports[i].row * vocab_size;
    const float peak = peak_of(x, vocab_size);
    found[i] = 0;
    if (!std::isfinite(peak)) {
      normalizers[i] = peak;
      continue;
    }
    normalizers[i] =
        peak + static_cast<float>(std::log(sum_of_exponentials(x, vocab_size, peak)));
    if (reports[i].count == 0) continue;
    int32_t* own = ids + i * most;
    found[i] = find_largest(x, vocab_size, normalizers[i], reports[i].count, candidates, own);
    for (int32_t k = 0; k < found[i]; ++k) logprobs[i * most + k] = x[own[k]] - normalizers[i];
  }
}

}  // namespace trioserve::TRIOSERVE_ISA
