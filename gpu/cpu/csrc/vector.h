// Sixteen numbers at a time: what the kernels need beyond the instructions themselves.
//
// A header for each instruction set has the types and the functions below, and no kernel names an
// instruction itself. Sums of products are written as fused multiply-adds, so that no compiler decides
// where to round. The sums of one instruction set needn't be those of another.
//
//   Floats, Ints, Lanes      sixteen numbers of 32 bits; which of them are meant
//   kRegisters               Floats that registers hold at once
//   broadcast, zeros         the same number in all lanes
//   first_lanes(n)           those below n
//   lanes_of, bits_of        lanes from bits and back
//   both, either             lanes in two sets, in one of two
//   load(at)                 from float or bfloat16; with lanes, memory behind the others isn't read, and
//                            they become 0 or those of a third argument
//   store(at, x)             the same; bfloat16 to the nearest, ties to even, and NaN stays NaN
//   store_two                32 numbers of bfloat16
//   rounded                  x as bfloat16 holds it
//   load_ints                the 64 bytes at an address
//   load_halves              from float16; to_half and from_half convert one number
//   + - * /                  of Floats
//   fma, fms, fnma           a * b + c, a * b - c, c - a * b, rounded once
//   min(a, b), max(a, b)     b where either is NaN. max also of Ints, and with lanes: a in the others
//   is_nan, equal, less, greater, not_below (>=), not_less (also where either is NaN)
//   keep(lanes, x)           0 in the others
//   store_packed             the numbers of some lanes one after the other; returns how many, and writes
//                            up to 16
//   to_whole                 the nearest whole number
//   scale_by_power(x, n)     x * 2^n for whole n, also where 2^n is no number
//   nearest_ints, to_floats  between Floats and Ints
//   bits_of, of_bits         the same bits
//   add, and_of, shift_left, shift_right    of Ints; the last keeps the sign
//   widen_words              sixteen numbers of 16 bits
//   store_bytes              as 8 bits, the nearest of them
//   sum_of, largest_of, first_of     of all lanes; the first lane
//   DoubleSums               sums in double precision
#pragma once

#include "isa.h"

#if defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "vector_neon.h"
#else
#error "no such header for this instruction set"
#endif

namespace trioserve::TRIOSERVE_ISA {

inline constexpr int kLanes = 16;
inline constexpr float kLog2e = 1.44269504f;

// Those from `first` to `last` - 1.
inline Lanes lanes_between(int first, int last) {
  const auto below = [](int count) { return count <= 0 ? 0u : count >= kLanes ? 0xffffu : (1u << count) - 1; };
  return lanes_of(below(last) & ~below(first));
}

// 2^x with a relative error below 2e-7, for x between -126 and 126; NaN for NaN.
inline Floats exp2_within(Floats x) {
  const Floats whole = to_whole(x);
  const Floats rest = x - whole;  // within 1/2 of 0
  // The polynomial of Cephes' exp2f.
  Floats sum = broadcast(1.535336188e-4f);
  sum = fma(sum, rest, broadcast(1.339887440e-3f));
  sum = fma(sum, rest, broadcast(9.618437357e-3f));
  sum = fma(sum, rest, broadcast(5.550332471e-2f));
  sum = fma(sum, rest, broadcast(2.402264791e-1f));
  sum = fma(sum, rest, broadcast(6.931472028e-1f));
  sum = fma(sum, rest, broadcast(1.0f));
  return scale_by_power(sum, whole);
}

// The same for any x: 0 far below, infinity far above.
inline Floats exp2_of(Floats x) {
  // An operand that is NaN comes through if it is the second.
  return exp2_within(min(broadcast(200.0f), max(broadcast(-200.0f), x)));
}

}  // namespace trioserve::TRIOSERVE_ISA
