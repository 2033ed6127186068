// bfloat16 in memory, float32 in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

using bf16 = uint16_t;

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace trioserve::TRIOSERVE_ISA
