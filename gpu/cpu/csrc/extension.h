// An instruction set's extension: instructions for products that only some of its processors have.
//
// That of avx512_bf16 is the matrix unit, AMX. The bits of products and of attention depend on whether it
// is used, except in w8a8. That of avx2 is AVX-VNNI, which changes no bit. Each has a twin: the same
// arithmetic in other instructions, for tests on processors without the extension.
#pragma once

#include <cstdint>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

enum class Extension : int32_t { kNone = 0, kOwn = 1, kTwin = 2 };

// What all products are computed with: none, unless one was chosen.
Extension current_extension();

// Chooses for all products of the process. Returns false, and changes nothing, where the processor or the
// operating system lacks what it needs. No product may be under way.
bool choose_extension(Extension extension);

// What the current extension is computed with, of one for each.
template <typename T>
const T& of_extension(const T& none, const T& own, const T& twin) {
  switch (current_extension()) {
    case Extension::kOwn:
      return own;
    case Extension::kTwin:
      return twin;
    default:
      return none;
  }
}

}  // namespace trioserve::TRIOSERVE_ISA
