// dots.h in AVX2: by products of 16 bits, or where AVX-VNNI is there, by its instruction for four
// products of bytes.
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr int kExcess = 128;

struct RoundedNumbers {
  int8_t bytes[32];
  int16_t words[32];  // of every four numbers the first and the third, then the others

  void set(Ints low, Ints high) {
    store_bytes(bytes, low);
    store_bytes(bytes + 16, high);
    for (int i = 0; i < 32; ++i) words[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = bytes[i];
  }
};

// AVX2's own products of bytes are added up in 16 bits, which don't hold them.
struct WordDots {
  static constexpr int kParts = 2;

  static Ints weights(const uint8_t* quads, int part) {
    const Ints four = load_ints(quads);
    if (part == 0) return and_of(four, broadcast(0x00ff00ff));
    return {_mm256_srli_epi16(four.low, 8), _mm256_srli_epi16(four.high, 8)};
  }
  static Ints activations(const RoundedNumbers& x, int quad, int part) {
    int32_t two;
    std::memcpy(&two, x.words + quad * 4 + part * 2, sizeof two);
    return broadcast(two);
  }
  static Ints add(Ints sums, Ints weights, Ints x) {
    sums = {_mm256_add_epi32(sums.low, _mm256_madd_epi16(weights.low, x.low)),
            _mm256_add_epi32(sums.high, _mm256_madd_epi16(weights.high, x.high))};
    // A compiler would add up products first, and have no registers for all of them.
    asm("" : "+x"(sums.low), "+x"(sums.high));
    return sums;
  }
};

struct ByteDots {
  static constexpr int kParts = 1;

  static Ints weights(const uint8_t* quads, int) { return load_ints(quads); }
  static Ints activations(const RoundedNumbers& x, int quad, int) {
    int32_t four;
    std::memcpy(&four, x.bytes + quad * 4, sizeof four);
    return broadcast(four);
  }
};

// Assembly in place of the compiler's own function, which needs an option for the whole file.
struct VnniDots : ByteDots {
  static Ints add(Ints sums, Ints weights, Ints x) {
    asm("%{vex%} vpdpbusd %1, %2, %0" : "+x"(sums.low) : "x"(x.low), "x"(weights.low));
    asm("%{vex%} vpdpbusd %1, %2, %0" : "+x"(sums.high) : "x"(x.high), "x"(weights.high));
    return sums;
  }
};

// The same instruction as AVX-512 encodes it, for tests on processors without AVX-VNNI.
struct TwinDots : ByteDots {
  static Ints add(Ints sums, Ints weights, Ints x) {
    asm("%{evex%} vpdpbusd %1, %2, %0" : "+x"(sums.low) : "x"(x.low), "x"(weights.low));
    asm("%{evex%} vpdpbusd %1, %2, %0" : "+x"(sums.high) : "x"(x.high), "x"(weights.high));
    return sums;
  }
};

using RoundedDots = DotsOf<WordDots, VnniDots, TwinDots>;

}  // namespace trioserve::TRIOSERVE_ISA
