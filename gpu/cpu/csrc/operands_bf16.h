// operands.h for processors that multiply pairs of bfloat16: AVX-512 with BF16.
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr bool kMultipliesPairs = true;
inline constexpr int kParts = 1;

using Activation = bf16;
using Operand = __m512bh;

inline Operand activation_part(const bf16* pair, int) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return reinterpret_cast<Operand>(_mm512_set1_epi32(both));
}
inline Operand weight_part(const bf16* pairs, int) { return reinterpret_cast<Operand>(load_ints(pairs)); }
inline Operand first_weight_part(const bf16* pairs, int) {
  return reinterpret_cast<Operand>(and_of(load_ints(pairs), broadcast(0xffff)));
}
inline Floats add_products(Floats sums, Operand x, Operand weights) {
  return _mm512_dpbf16_ps(sums, x, weights);
}

inline Operand load_operand(const uint8_t* at) { return reinterpret_cast<Operand>(load_ints(at)); }
inline void store_operand(uint8_t* at, Operand x) {
  _mm512_storeu_si512(at, reinterpret_cast<__m512i>(x));
}

inline Operand byte_part(const uint8_t* pairs, int) {
  const auto half = [&](int at) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs + at));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  };
  return _mm512_cvtne2ps_pbh(half(16), half(0));
}

// Looked up in a table of what they stand for: the instruction takes an index's low five bits, so the
// table is there twice.
template <int Zero>
struct NibbleTable {
  alignas(64) bf16 numbers[32];
  constexpr NibbleTable() : numbers() {
    for (int i = 0; i < 32; ++i)
      numbers[i] = static_cast<bf16>(__builtin_bit_cast(uint32_t, static_cast<float>(i % 16 - Zero)) >> 16);
  }
};
template <int Zero>
inline constexpr NibbleTable<Zero> kNibbleTable;

template <int Zero>
inline Operand nibble_part(const uint8_t* words, int p, int) {
  const __m512i table = _mm512_load_si512(kNibbleTable<Zero>.numbers);
  return reinterpret_cast<Operand>(
      _mm512_permutexvar_epi16(_mm512_srli_epi16(load_ints(words), p * 4), table));
}

// Copies activations.
inline void to_activations(const bf16* from, int64_t count, bf16* to) {
  std::memcpy(to, from, count * sizeof(bf16));
}

// The first and the second number of each pair, widened.
inline Floats first_of_pairs(Operand pairs) {
  return of_bits(shift_left(reinterpret_cast<__m512i>(pairs), 16));
}
inline Floats second_of_pairs(Operand pairs) {
  return of_bits(and_of(reinterpret_cast<__m512i>(pairs), broadcast(static_cast<int32_t>(0xffff0000))));
}

}  // namespace trioserve::TRIOSERVE_ISA
