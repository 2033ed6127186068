// operands.h for processors that multiply float32: the two numbers of a pair one after the other.
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr bool kMultipliesPairs = false;
inline constexpr int kParts = 2;

using Activation = float;
using Operand = Floats;

inline Operand activation_part(const float* pair, int part) { return broadcast(pair[part]); }
inline Operand activation_part(const bf16* pair, int part) { return broadcast(to_float(pair[part])); }
inline Operand weight_part(const bf16* pairs, int part) {
  const Ints both = load_ints(pairs);
  return of_bits(part == 0 ? shift_left(both, 16) : and_of(both, broadcast(static_cast<int32_t>(0xffff0000))));
}
inline Operand first_weight_part(const bf16* pairs, int part) {
  return part == 0 ? weight_part(pairs, 0) : zeros();
}
inline Floats add_products(Floats sums, Operand x, Operand weights) { return fma(x, weights, sums); }

inline Operand load_operand(const uint8_t* at) { return load(reinterpret_cast<const float*>(at)); }
inline void store_operand(uint8_t* at, Operand x) { store(reinterpret_cast<float*>(at), x); }

inline Operand byte_part(const uint8_t* pairs, int part) {
  const Ints both = widen_words(pairs);
  return to_floats(shift_right(part == 0 ? shift_left(both, 24) : both, part == 0 ? 24 : 8));
}

#if defined(__AVX512F__)
// What numbers of 4 bits stand for. The instruction takes an index's low four bits.
template <int Zero>
struct NibbleTable {
  alignas(64) float numbers[16];
  constexpr NibbleTable() : numbers() {
    for (int i = 0; i < 16; ++i) numbers[i] = static_cast<float>(i - Zero);
  }
};
template <int Zero>
inline constexpr NibbleTable<Zero> kNibbleTable;
#endif

template <int Zero>
inline Operand nibble_part(const uint8_t* words, int p, int part) {
  const Ints shifted = shift_right(load_ints(words), part * 16 + p * 4);
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(shifted, _mm512_load_ps(kNibbleTable<Zero>.numbers));
#else
  const Ints numbers = and_of(shifted, broadcast(15));
  return to_floats(Zero == 0 ? numbers : add(numbers, broadcast(-Zero)));
#endif
}

// Widens activations. `count` is a multiple of 16.
inline void to_activations(const bf16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i));
}

}  // namespace trioserve::TRIOSERVE_ISA
