// dots.h in AVX-512: an instruction adds up four products of bytes.
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr int kExcess = 128;

struct RoundedNumbers {
  int8_t bytes[32];

  void set(Ints low, Ints high) {
    store_bytes(bytes, low);
    store_bytes(bytes + 16, high);
  }
};

struct WideDots {
  static constexpr int kParts = 1;

  static Ints weights(const uint8_t* quads, int) { return load_ints(quads); }
  static Ints activations(const RoundedNumbers& x, int quad, int) {
    int32_t four;
    std::memcpy(&four, x.bytes + quad * 4, sizeof four);
    return broadcast(four);
  }
  static Ints add(Ints sums, Ints weights, Ints x) { return _mm512_dpbusd_epi32(sums, weights, x); }
};

using RoundedDots = DotsOf<WideDots>;

}  // namespace trioserve::TRIOSERVE_ISA
