// Where top_k and top_p cut a distribution.
#pragma once

#include <cstdint>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

// Keep what is above `threshold`, and the first `ties` of those equal to it.
struct Cut {
  float threshold;
  int64_t ties;
};

// The cut of one row.
//
// x is [vocab_size], logits less their largest, by temperature; weights are their exponentials and
// `total` is the sum of those. top_k is from 1 to vocab_size - 1, or 0 for off; top_p is below 1,
// or 1 for off. `scratch` has room for 2 * (vocab_size + 16) numbers.
Cut find_cut(const float* x, const float* weights, int64_t vocab_size, double total, int64_t top_k,
             double top_p, float* scratch);

// A number that the `count`-th largest of x isn't below; -inf where none is easily found.
float bound_of_largest(const float* x, int64_t size, int64_t count);

}  // namespace trioserve::TRIOSERVE_ISA
