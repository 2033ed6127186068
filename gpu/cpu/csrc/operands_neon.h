// operands.h for processors that multiply pairs of bfloat16: NEON with BF16.
//
// The two products of a pair are added, and then their sum, each rounded to odd; numbers below the normal
// ones count as 0 (Arm Architecture Reference Manual, BFDOT).
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr bool kMultipliesPairs = true;
inline constexpr int kParts = 1;

using Activation = bf16;
using Operand = Ints;  // pairs by their bits

inline Operand activation_part(const bf16* pair, int) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return broadcast(both);
}
inline Operand weight_part(const bf16* pairs, int) { return load_ints(pairs); }
inline Operand first_weight_part(const bf16* pairs, int) {
  return and_of(load_ints(pairs), broadcast(0xffff));
}
inline Floats add_products(Floats sums, Operand x, Operand weights) {
  return each<Floats>(
      [](float32x4_t sums, int32x4_t x, int32x4_t weights) {
        return vbfdotq_f32(sums, vreinterpretq_bf16_s32(x), vreinterpretq_bf16_s32(weights));
      },
      sums, x, weights);
}

inline Operand load_operand(const uint8_t* at) { return load_ints(at); }
inline void store_operand(uint8_t* at, Operand x) { store(reinterpret_cast<float*>(at), of_bits(x)); }

inline Operand byte_part(const uint8_t* pairs, int) {
  const auto four = [&](int i) {
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vld1_u8(pairs + 8 * i)));
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
    const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(words));
    return vreinterpretq_s32_u16(narrow(low, high));
  };
  return {four(0), four(1), four(2), four(3)};
}

// What each number stands for: the lower bytes, then the upper ones.
template <int Zero>
struct NibbleTable {
  alignas(32) uint8_t bytes[32];
  constexpr NibbleTable() : bytes() {
    for (int i = 0; i < 16; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, static_cast<float>(i - Zero));
      bytes[i] = static_cast<uint8_t>(bits >> 16);
      bytes[16 + i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
template <int Zero>
inline constexpr NibbleTable<Zero> kNibbleTable;

template <int Zero>
inline Operand nibble_part(const uint8_t* words, int p, int) {
  const uint8x16x2_t table = {vld1q_u8(kNibbleTable<Zero>.bytes), vld1q_u8(kNibbleTable<Zero>.bytes + 16)};
  return each<Ints>(
      [&](int32x4_t words) {
        const uint16x8_t shifted = vshlq_u16(vreinterpretq_u16_s32(words), vdupq_n_s16(static_cast<int16_t>(-4 * p)));
        const uint16x8_t number = vandq_u16(shifted, vdupq_n_u16(15));
        // The number in both bytes, the upper of them beyond the first sixteen of the table.
        const uint16x8_t index = vorrq_u16(vsliq_n_u16(number, number, 8), vdupq_n_u16(0x1000));
        return vreinterpretq_s32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u16(index)));
      },
      load_ints(words));
}

// Copies activations.
inline void to_activations(const bf16* from, int64_t count, bf16* to) {
  std::memcpy(to, from, count * sizeof(bf16));
}

}  // namespace trioserve::TRIOSERVE_ISA
