#include "adapters.h"

#include "operands.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Tokens that are computed together, so that a weight is loaded once for all of them.
constexpr int64_t kShrinkTokens = kRegisters >= 32 ? 4 : 1, kExpandTokens = kRegisters >= 32 ? 8 : 6;
// Sums that a number of t is made of: one would wait for itself at every addition.
constexpr int kChains = 4;

int64_t strips(int64_t count) { return (count + kLanes - 1) / kLanes; }

// t[i][0..15] = x[i] A^T for a strip `a` of A: [inputs / 2][16][2].
template <int Tokens>
void shrink_tile(const bf16* const* x, const bf16* a, int64_t inputs, float* const* t) {
  Floats sums[Tokens][kChains];
  for (auto& own : sums)
    for (Floats& sum : own) sum = zeros();
  for (int64_t pair = 0; pair < inputs / 2; pair += kChains)
    for (int chain = 0; chain < kChains; ++chain)
      for (int part = 0; part < kParts; ++part) {
        const Operand weights = weight_part(a + (pair + chain) * 2 * kLanes, part);
        for (int i = 0; i < Tokens; ++i) {
          const Operand number = activation_part(x[i] + (pair + chain) * 2, part);
          sums[i][chain] = add_products(sums[i][chain], number, weights);
        }
      }
  for (int i = 0; i < Tokens; ++i)
    store(t[i], (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
}

// y[i][0..15] += t[i] B^T for a strip `b` of B: [rank][16].
template <int Tokens>
void expand_tile(const float* const* t, const bf16* b, int64_t rank, bf16* const* y) {
  Floats sums[Tokens];
  for (Floats& sum : sums) sum = zeros();
  for (int64_t j = 0; j < rank; ++j) {
    const Floats weights = load(b + j * kLanes);
    for (int i = 0; i < Tokens; ++i)
      sums[i] = fma(weights, broadcast(t[i][j]), sums[i]);
  }
  for (int i = 0; i < Tokens; ++i) store(y[i], load(y[i]) + sums[i]);
}

void shrink_some(int64_t count, const bf16* const* x, const bf16* a, int64_t inputs,
                 float* const* t) {
  switch (count) {
    case 1: return shrink_tile<1>(x, a, inputs, t);
    case 2: return shrink_tile<2>(x, a, inputs, t);
    case 3: return shrink_tile<3>(x, a, inputs, t);
    default: return shrink_tile<4>(x, a, inputs, t);
  }
}

void expand_some(int64_t count, const float* const* t, const bf16* b, int64_t rank,
                 bf16* const* y) {
  switch (count) {
    case 1: return expand_tile<1>(t, b, rank, y);
    case 2: return expand_tile<2>(t, b, rank, y);
    case 3: return expand_tile<3>(t, b, rank, y);
    case 4: return expand_tile<4>(t, b, rank, y);
    case 5: return expand_tile<5>(t, b, rank, y);
    case 6: return expand_tile<6>(t, b, rank, y);
    case 7: return expand_tile<7>(t, b, rank, y);
    default: return expand_tile<8>(t, b, rank, y);
  }
}

// Where the numbers of t begin that are those of module `index`.
int64_t place_of(const AdapterProduct& product, int64_t index) {
  int64_t place = 0;
  for (int64_t i = 0; i < index; ++i) place += strips(product.modules[i].rank) * kLanes;
  return place;
}

}  // namespace

int64_t adapter_width(int64_t max_rank) { return 3 * strips(max_rank) * kLanes; }

void shrink(const Team& team, const AdapterStep& step, int64_t layer,
            AdapterProduct AdapterLayer::*product, const bf16* x, int64_t inputs, float* t,
            int64_t width, int64_t slice, int64_t slices) {
  const int64_t summed = inputs / slices, first = slice * summed;
  int64_t item = 0;  // strips of a few tokens, which the threads take in turn
  for (int64_t g = 0; g < step.num_groups; ++g) {
    const AdapterGroup& group = step.groups[g];
    const AdapterProduct& own = group.layers[layer].*product;
    for (int64_t m = 0; m < own.num_modules; ++m) {
      const AdapterModule& module = own.modules[m];
      const int64_t place = place_of(own, m);
      for (int64_t strip = 0; strip < strips(module.rank); ++strip)
        for (int64_t from = 0; from < group.num_tokens; from += kShrinkTokens) {
          if (item++ % team.size() != team.rank()) continue;
          const int64_t count = std::min(group.num_tokens - from, kShrinkTokens);
          const bf16* rows[kShrinkTokens];
          float* sums[kShrinkTokens];
          for (int64_t i = 0; i < count; ++i) {
            const int64_t token = group.tokens[from + i];
            rows[i] = x + token * inputs + first;
            sums[i] = t + token * width + place + strip * kLanes;
          }
          shrink_some(count, rows, module.a + (strip * inputs + first) * kLanes, summed, sums);
        }
    }
  }
}

void expand(const Team& team, const AdapterStep& step, int64_t layer,
            AdapterProduct AdapterLayer::*product, const float* t, int64_t width, bf16* y,
            int64_t outputs) {
  for (int64_t g = 0; g < step.num_groups; ++g) {
    const AdapterGroup& group = step.groups[g];
    const AdapterProduct& own = group.layers[layer].*product;
    for (int64_t m = 0; m < own.num_modules; ++m) {
      const AdapterModule& module = own.modules[m];
      const int64_t place = place_of(own, m);
      const Share share = team.share(module.outputs / kLanes);
      for (int64_t from = 0; from < group.num_tokens; from += kExpandTokens) {
        const int64_t count = std::min(group.num_tokens - from, kExpandTokens);
        for (int64_t strip = share.first; strip < share.last; ++strip) {
          const float* rows[kExpandTokens];
          bf16* results[kExpandTokens];
          for (int64_t i = 0; i < count; ++i) {
            const int64_t token = group.tokens[from + i];
            rows[i] = t + token * width + place;
            results[i] = y + token * outputs + module.first + strip * kLanes;
          }
          expand_some(count, rows, module.b + strip * module.rank * kLanes, module.rank, results);
        }
      }
    }
  }
}

}  // namespace trioserve::TRIOSERVE_ISA
