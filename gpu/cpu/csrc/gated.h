// The gated activation of a model's MLP.
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

// silu(gate) * up. silu(gate) = gate / (1 + e^-gate) is rounded to bfloat16 before it is multiplied.
inline Floats gated(Floats gate, Floats up) {
  const Floats power = exp2_of(gate * broadcast(-kLog2e));
  return rounded(gate / (broadcast(1.0f) + power)) * up;
}

}  // namespace trioserve::TRIOSERVE_ISA
