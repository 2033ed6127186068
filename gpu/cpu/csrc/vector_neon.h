// vector.h in NEON of ARMv8.2: four registers of four lanes.
//
// Sums and maxima of all lanes take the same order as in AVX2, and so give the same bits.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace trioserve::TRIOSERVE_ISA {

struct Floats {
  float32x4_t a, b, c, d;
};
struct Ints {
  int32x4_t a, b, c, d;
};
// All bits of a lane are set, or none.
struct Lanes {
  uint32x4_t a, b, c, d;
};

// Sets of four registers.
inline constexpr int kRegisters = 8;

// The results of f for each register of some operands.
template <class Result, class Function, class... Operands>
[[gnu::always_inline]] inline Result each(Function f, Operands... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

inline Floats same(float32x4_t x) { return {x, x, x, x}; }
inline Floats broadcast(float x) { return same(vdupq_n_f32(x)); }
inline Ints broadcast(int32_t x) {
  const int32x4_t all = vdupq_n_s32(x);
  return {all, all, all, all};
}
inline Floats zeros() { return broadcast(0.0f); }

// The numbers first to first + 3.
inline int32x4_t numbers_from(int32_t first) {
  const int32x4_t numbers = {0, 1, 2, 3};
  return vaddq_s32(numbers, vdupq_n_s32(first));
}

inline Lanes first_lanes(int64_t count) {
  const int32x4_t counts = vdupq_n_s32(count >= 16 ? 16 : static_cast<int32_t>(count));
  return {vcgtq_s32(counts, numbers_from(0)), vcgtq_s32(counts, numbers_from(4)),
          vcgtq_s32(counts, numbers_from(8)), vcgtq_s32(counts, numbers_from(12))};
}

// The bits of lanes first to first + 3.
inline uint32x4_t lane_bits(int first) {
  return vshlq_u32(vdupq_n_u32(1), numbers_from(first));
}
inline Lanes lanes_of(uint32_t bits) {
  const uint32x4_t all = vdupq_n_u32(bits);
  return {vtstq_u32(all, lane_bits(0)), vtstq_u32(all, lane_bits(4)), vtstq_u32(all, lane_bits(8)),
          vtstq_u32(all, lane_bits(12))};
}
inline uint32_t bits_of(Lanes x) {
  return vaddvq_u32(vorrq_u32(
      vorrq_u32(vandq_u32(x.a, lane_bits(0)), vandq_u32(x.b, lane_bits(4))),
      vorrq_u32(vandq_u32(x.c, lane_bits(8)), vandq_u32(x.d, lane_bits(12)))));
}
inline Lanes both(Lanes x, Lanes y) {
  return each<Lanes>([](uint32x4_t x, uint32x4_t y) { return vandq_u32(x, y); }, x, y);
}
inline Lanes either(Lanes x, Lanes y) {
  return each<Lanes>([](uint32x4_t x, uint32x4_t y) { return vorrq_u32(x, y); }, x, y);
}
// x in some lanes, y in the others.
inline Floats choose(Lanes lanes, Floats x, Floats y) {
  return each<Floats>(
      [](uint32x4_t lanes, float32x4_t x, float32x4_t y) { return vbslq_f32(lanes, x, y); }, lanes, x, y);
}

inline Floats operator+(Floats x, Floats y) {
  return each<Floats>([](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); }, x, y);
}
inline Floats operator-(Floats x, Floats y) {
  return each<Floats>([](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); }, x, y);
}
inline Floats operator*(Floats x, Floats y) {
  return each<Floats>([](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); }, x, y);
}
inline Floats operator/(Floats x, Floats y) {
  return each<Floats>([](float32x4_t x, float32x4_t y) { return vdivq_f32(x, y); }, x, y);
}

inline Floats load(const float* at) {
  return {vld1q_f32(at), vld1q_f32(at + 4), vld1q_f32(at + 8), vld1q_f32(at + 12)};
}
inline void store(float* at, Floats x) {
  vst1q_f32(at, x.a);
  vst1q_f32(at + 4, x.b);
  vst1q_f32(at + 8, x.c);
  vst1q_f32(at + 12, x.d);
}
inline Ints load_ints(const void* at) {
  const auto* from = static_cast<const int8_t*>(at);
  const auto four = [&](int i) { return vreinterpretq_s32_s8(vld1q_s8(from + 16 * i)); };
  return {four(0), four(1), four(2), four(3)};
}

inline float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 16)); }

// Rounded in the upper half of their bits.
inline uint32x4_t nearest_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t nearest = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vbslq_u32(vceqq_f32(x, x), nearest, quiet);
}
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
inline uint16x8_t narrow(float32x4_t low, float32x4_t high) {
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
#else
inline uint16x8_t narrow(float32x4_t low, float32x4_t high) {
  return vuzp2q_u16(vreinterpretq_u16_u32(nearest_bf16(low)), vreinterpretq_u16_u32(nearest_bf16(high)));
}
#endif

inline Floats load(const bf16* at) {
  return {widen(vld1_u16(at)), widen(vld1_u16(at + 4)), widen(vld1_u16(at + 8)), widen(vld1_u16(at + 12))};
}
inline void store(bf16* at, Floats x) {
  vst1q_u16(at, narrow(x.a, x.b));
  vst1q_u16(at + 8, narrow(x.c, x.d));
}
inline Floats rounded(Floats x) {
  return each<Floats>(
      [](float32x4_t x) {
        return vreinterpretq_f32_u32(vandq_u32(nearest_bf16(x), vdupq_n_u32(0xffff0000)));
      },
      x);
}
inline void store_two(bf16* at, Floats low, Floats high) {
  store(at, low);
  store(at + 16, high);
}

// float or bfloat16, one number after the other.
template <class Number>
inline Floats load(const Number* at, Lanes lanes) {
  uint32_t bits = bits_of(lanes);
  if (bits == 0xffff) return load(at);
  Number some[16] = {};
  for (; bits; bits &= bits - 1) some[__builtin_ctz(bits)] = at[__builtin_ctz(bits)];
  return load(some);
}
inline Floats load(const float* at, Lanes lanes, Floats others) {
  return choose(lanes, load(at, lanes), others);
}
template <class Number>
inline void store(Number* at, Floats x, Lanes lanes) {
  uint32_t bits = bits_of(lanes);
  if (bits == 0xffff) return store(at, x);
  Number some[16];
  store(some, x);
  for (; bits; bits &= bits - 1) at[__builtin_ctz(bits)] = some[__builtin_ctz(bits)];
}

inline Floats load_halves(const void* at) {
  const auto* from = static_cast<const uint8_t*>(at);
  const auto four = [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i))); };
  return {four(0), four(1), four(2), four(3)};
}
inline uint16_t to_half(float x) {
  return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}
inline float from_half(uint16_t x) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0);
}

inline Floats fma(Floats x, Floats y, Floats z) {
  return each<Floats>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }, x, y, z);
}
inline Floats fms(Floats x, Floats y, Floats z) {
  return each<Floats>(
      [](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(vnegq_f32(z), x, y); }, x, y, z);
}
inline Floats fnma(Floats x, Floats y, Floats z) {
  return each<Floats>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmsq_f32(z, x, y); }, x, y, z);
}
// ARM's own minimum and maximum are NaN if either operand is.
inline float32x4_t min(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline float32x4_t max(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline Floats min(Floats x, Floats y) {
  return each<Floats>([](float32x4_t x, float32x4_t y) { return min(x, y); }, x, y);
}
inline Floats max(Floats x, Floats y) {
  return each<Floats>([](float32x4_t x, float32x4_t y) { return max(x, y); }, x, y);
}
inline Floats max(Floats x, Floats y, Lanes lanes) { return choose(lanes, max(x, y), x); }

inline Lanes opposite(Lanes x) {
  return each<Lanes>([](uint32x4_t x) { return vmvnq_u32(x); }, x);
}
inline Lanes equal(Floats x, Floats y) {
  return each<Lanes>([](float32x4_t x, float32x4_t y) { return vceqq_f32(x, y); }, x, y);
}
inline Lanes greater(Floats x, Floats y) {
  return each<Lanes>([](float32x4_t x, float32x4_t y) { return vcgtq_f32(x, y); }, x, y);
}
inline Lanes not_below(Floats x, Floats y) {
  return each<Lanes>([](float32x4_t x, float32x4_t y) { return vcgeq_f32(x, y); }, x, y);
}
inline Lanes is_nan(Floats x) { return opposite(equal(x, x)); }
inline Lanes less(Floats x, Floats y) { return greater(y, x); }
inline Lanes not_less(Floats x, Floats y) { return opposite(less(x, y)); }
inline Floats keep(Lanes lanes, Floats x) { return choose(lanes, x, zeros()); }

// For each set of four lanes, the bytes of their numbers one after the other.
struct PackedOrders {
  uint8_t bytes[16][16];
  constexpr PackedOrders() : bytes() {
    for (int set = 0; set < 16; ++set)
      for (int lane = 0, kept = 0; lane < 4; ++lane)
        if (set >> lane & 1)
          for (int i = 0; i < 4; ++i) bytes[set][kept++] = static_cast<uint8_t>(lane * 4 + i);
  }
};
inline constexpr PackedOrders kPackedOrders;

inline int store_packed(float* at, Lanes lanes, Floats x) {
  const uint32_t bits = bits_of(lanes);
  int kept = 0;
  const auto store_four = [&](uint32_t set, float32x4_t numbers) {
    const uint8x16_t order = vld1q_u8(kPackedOrders.bytes[set & 15]);
    vst1q_f32(at + kept, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(numbers), order)));
    kept += __builtin_popcount(set & 15);
  };
  store_four(bits, x.a);
  store_four(bits >> 4, x.b);
  store_four(bits >> 8, x.c);
  store_four(bits >> 12, x.d);
  return kept;
}

inline Floats to_whole(Floats x) {
  return each<Floats>([](float32x4_t x) { return vrndnq_f32(x); }, x);
}

// In two steps, since the power itself may be too large or too small for a number.
inline float32x4_t scale_by_power(float32x4_t x, float32x4_t whole) {
  const float32x4_t bounded = min(max(whole, vdupq_n_f32(-250.0f)), vdupq_n_f32(250.0f));
  const int32x4_t power = vcvtnq_s32_f32(bounded), half = vshrq_n_s32(power, 1);
  const auto power_of_2 = [](int32x4_t exponent) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23));
  };
  return vmulq_f32(vmulq_f32(x, power_of_2(half)), power_of_2(vsubq_s32(power, half)));
}
inline Floats scale_by_power(Floats x, Floats whole) {
  return each<Floats>([](float32x4_t x, float32x4_t whole) { return scale_by_power(x, whole); }, x, whole);
}

inline Ints nearest_ints(Floats x) {
  return each<Ints>([](float32x4_t x) { return vcvtnq_s32_f32(x); }, x);
}
inline Floats to_floats(Ints x) {
  return each<Floats>([](int32x4_t x) { return vcvtq_f32_s32(x); }, x);
}
inline Ints bits_of(Floats x) {
  return each<Ints>([](float32x4_t x) { return vreinterpretq_s32_f32(x); }, x);
}
inline Floats of_bits(Ints x) {
  return each<Floats>([](int32x4_t x) { return vreinterpretq_f32_s32(x); }, x);
}
inline Ints add(Ints x, Ints y) {
  return each<Ints>([](int32x4_t x, int32x4_t y) { return vaddq_s32(x, y); }, x, y);
}
inline Ints and_of(Ints x, Ints y) {
  return each<Ints>([](int32x4_t x, int32x4_t y) { return vandq_s32(x, y); }, x, y);
}
inline Ints max(Ints x, Ints y) {
  return each<Ints>([](int32x4_t x, int32x4_t y) { return vmaxq_s32(x, y); }, x, y);
}
inline Ints shift_left(Ints x, int bits) {
  return each<Ints>([bits](int32x4_t x) { return vshlq_s32(x, vdupq_n_s32(bits)); }, x);
}
inline Ints shift_right(Ints x, int bits) { return shift_left(x, -bits); }
inline Ints widen_words(const void* at) {
  const auto* from = static_cast<const uint8_t*>(at);
  const auto four = [&](int i) { return vmovl_s16(vreinterpret_s16_u8(vld1_u8(from + 8 * i))); };
  return {four(0), four(1), four(2), four(3)};
}
inline void store_bytes(int8_t* at, Ints x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b));
  const int16x8_t high = vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d));
  vst1q_s8(at, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

inline int32_t sum_of(Ints x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }
inline int32_t largest_of(Ints x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d))); }

inline float first_of(Floats x) { return vgetq_lane_f32(x.a, 0); }

inline float sum_of(Floats x) {
  const float32x4_t quarter = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t pair = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
inline float largest_of(Floats x) {
  const float32x4_t quarter = max(max(x.a, x.c), max(x.b, x.d));
  const float32x4_t pair = max(quarter, vextq_f32(quarter, quarter, 2));
  return vgetq_lane_f32(max(pair, vextq_f32(pair, pair, 1)), 0);
}

class DoubleSums {
 public:
  void add(Floats x) {
    add_four(0, x.a);
    add_four(1, x.b);
    add_four(2, x.c);
    add_four(3, x.d);
  }
  double value() const {
    const auto all = [&](int half) {
      return vaddq_f64(vaddq_f64(sums_[0][half], sums_[1][half]), vaddq_f64(sums_[2][half], sums_[3][half]));
    };
    return vaddvq_f64(vaddq_f64(all(0), all(1)));
  }

 private:
  void add_four(int at, float32x4_t x) {
    sums_[at][0] = vaddq_f64(sums_[at][0], vcvt_f64_f32(vget_low_f32(x)));
    sums_[at][1] = vaddq_f64(sums_[at][1], vcvt_high_f64_f32(x));
  }

  float64x2_t sums_[4][2] = {};
};

}  // namespace trioserve::TRIOSERVE_ISA
