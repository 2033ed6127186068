// dots.h in NEON: an instruction adds up four products of bytes.
#pragma once

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {

struct RoundedNumbers {
  int8_t bytes[32];

  void set(Ints low, Ints high) {
    store_bytes(bytes, low);
    store_bytes(bytes + 16, high);
  }
};

#ifdef __ARM_FEATURE_MATMUL_INT8
// Bytes without a sign by bytes with one.
inline constexpr int kExcess = 128;
inline Ints weight_bytes(Ints x) { return x; }
inline int32x4_t add_dots(int32x4_t sums, int32x4_t weights, int32x4_t x) {
  return vusdotq_s32(sums, vreinterpretq_u8_s32(weights), vreinterpretq_s8_s32(x));
}
#else
// Both bytes have a sign: the weights, which are too large by 128, get theirs by one bit.
inline constexpr int kExcess = 0;
inline Ints weight_bytes(Ints x) {
  const int32x4_t signs = vreinterpretq_s32_s8(vdupq_n_s8(-128));
  return each<Ints>([signs](int32x4_t x) { return veorq_s32(x, signs); }, x);
}
inline int32x4_t add_dots(int32x4_t sums, int32x4_t weights, int32x4_t x) {
  return vdotq_s32(sums, vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(x));
}
#endif

struct NeonDots {
  static constexpr int kParts = 1;

  static Ints weights(const uint8_t* quads, int) { return weight_bytes(load_ints(quads)); }
  static Ints activations(const RoundedNumbers& x, int quad, int) {
    int32_t four;
    std::memcpy(&four, x.bytes + quad * 4, sizeof four);
    return broadcast(four);
  }
  static Ints add(Ints sums, Ints weights, Ints x) {
    return each<Ints>(
        [](int32x4_t sums, int32x4_t weights, int32x4_t x) { return add_dots(sums, weights, x); }, sums,
        weights, x);
  }
};

using RoundedDots = DotsOf<NeonDots>;

}  // namespace trioserve::TRIOSERVE_ISA
