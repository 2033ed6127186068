// arithmetic.cpp - approximate operations as inexact as the PTX ISA lets them be.
//
// "ex2.approx.ftz.f32", "lg2", "rcp" and "rsqrt" have errors of up to 2^-22 (of the result, for a
// logarithm between 1/2 and 2 absolute); subnormal operands and results become 0.
#include <cmath>

#include "machine.h"

namespace emu {
namespace {

constexpr float SMALLEST_NORMAL = 0x1p-126f;

// One of -2, -1, 0, 1, 2, drawn by the bits of x (the finalizer of MurmurHash3, Appleby).
int draw(float x) {
  auto bits = static_cast<uint32_t>(to_word(x));
  bits = (bits ^ bits >> 16) * 0x85ebca6bu;
  bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
  return static_cast<int>((bits ^ bits >> 16) % 5) - 2;
}

}  // namespace

float flushed(float x) {
  return here->launch->rough && std::fabs(x) < SMALLEST_NORMAL ? std::copysign(0.f, x) : x;
}

float approximated(float exact, float x) {
  if (!here->launch->rough || !std::isfinite(exact)) return exact;
  if (std::fabs(exact) < SMALLEST_NORMAL) return flushed(exact);
  const auto bits = static_cast<uint32_t>(to_word(exact)) + static_cast<uint32_t>(draw(x));
  const float y = flushed(from_word<float>(bits));
  return std::isfinite(y) ? y : exact;
}

float approximated_log(float exact, float x) {
  if (!here->launch->rough || std::fabs(exact) >= 1.f) return approximated(exact, x);
  return exact + static_cast<float>(draw(x)) * 0x1p-23f;
}

}  // namespace emu
