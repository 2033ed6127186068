#include "experts.h"

#include <algorithm>

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// e^(logit - largest).
Floats power(Floats logits, float largest) {
  const Floats below = logits - broadcast(largest);
  return exp2_of(below * broadcast(kLog2e));
}

// The experts of the `wanted` largest of `count` logits. There are always so many, NaN or not.
void find_largest(const bf16* logits, int64_t count, int64_t wanted, int32_t* chosen) {
  int64_t held = 0;
  for (int64_t expert = 0; expert < count; ++expert) {
    const float logit = to_float(logits[expert]);
    int64_t at = held;
    while (at > 0 && logit > to_float(logits[chosen[at - 1]])) --at;
    if (at == wanted) continue;
    held = std::min(held + 1, wanted);
    std::copy_backward(chosen + at, chosen + held - 1, chosen + held);
    chosen[at] = static_cast<int32_t>(expert);
  }
}

void weigh(const ExpertsShape& shape, const bf16* logits, const int32_t* chosen, float* weights) {
  const float largest = to_float(logits[chosen[0]]);
  Floats sums = zeros();
  for (int64_t i = 0; i < shape.count; i += kLanes) {
    const Lanes lanes = first_lanes(shape.count - i);
    sums = sums + keep(lanes, power(load(logits + i, lanes), largest));
  }
  const float all = sum_of(sums);
  float of_chosen = 0;
  for (int64_t i = 0; i < shape.per_token; ++i) {
    const Floats logit = broadcast(to_float(logits[chosen[i]]));
    weights[i] = first_of(power(logit, largest)) / all;
    of_chosen += weights[i];
  }
  if (!shape.normalized) return;
  for (int64_t i = 0; i < shape.per_token; ++i) weights[i] /= of_chosen;
}

template <typename T>
void add_up_pairs(const Team& team, const ExpertsShape& shape, const T* results, const Routing& routing,
                  Share experts, int64_t tokens, int64_t width, T* y) {
  const Share share = team.share(tokens);
  for (int64_t token = share.first; token < share.last; ++token) {
    const float* weights = routing.weights + token * shape.per_token;
    const int32_t* places = routing.places + token * shape.per_token;
    const int32_t* chosen = routing.chosen + token * shape.per_token;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Lanes lanes = first_lanes(width - i);
      Floats sum = zeros();
      for (int64_t pair = 0; pair < shape.per_token; ++pair) {
        if (chosen[pair] < experts.first || chosen[pair] >= experts.last) continue;
        const Floats result = load(results + places[pair] * width + i, lanes);
        sum = fma(broadcast(weights[pair]), result, sum);
      }
      store(y + token * width + i, sum, lanes);
    }
  }
}

}  // namespace

void choose_experts(const Team& team, const ExpertsShape& shape, const bf16* logits, int64_t tokens,
                    const Routing& routing) {
  const Share share = team.share(tokens);
  for (int64_t token = share.first; token < share.last; ++token) {
    const bf16* own = logits + token * shape.count;
    int32_t* chosen = routing.chosen + token * shape.per_token;
    find_largest(own, shape.count, shape.per_token, chosen);
    weigh(shape, own, chosen, routing.weights + token * shape.per_token);
  }
}

void group_by_expert(const ExpertsShape& shape, int64_t tokens, const Routing& routing) {
  const int64_t pairs = tokens * shape.per_token;
  int64_t* first = routing.first;
  std::fill_n(first, shape.count + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++first[routing.chosen[i] + 1];
  for (int64_t expert = 0; expert < shape.count; ++expert) first[expert + 1] += first[expert];
  // An expert's beginning moves on with each of its pairs, to where the next expert's was.
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t place = first[routing.chosen[i]]++;
    routing.places[i] = static_cast<int32_t>(place);
    routing.tokens[place] = static_cast<int32_t>(i / shape.per_token);
  }
  std::copy_backward(first, first + shape.count, first + shape.count + 1);
  first[0] = 0;
}

void add_up(const Team& team, const ExpertsShape& shape, const bf16* results, const Routing& routing,
            int64_t tokens, int64_t width, bf16* y) {
  add_up_pairs(team, shape, results, routing, {0, shape.count}, tokens, width, y);
}

void add_up(const Team& team, const ExpertsShape& shape, const float* results,
            const Routing& routing, Share experts, int64_t tokens, int64_t width, float* y) {
  add_up_pairs(team, shape, results, routing, experts, tokens, width, y);
}

}  // namespace trioserve::TRIOSERVE_ISA
