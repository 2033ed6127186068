// vector.h in AVX2 with FMA and F16C: two registers of eight lanes.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace trioserve::TRIOSERVE_ISA {

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
// All bits of a lane are set, or none.
struct Lanes {
  __m256 low, high;
};

// Pairs of registers.
inline constexpr int kRegisters = 8;

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

inline Lanes first_lanes(int64_t count) {
  const __m256i counts = _mm256_set1_epi32(count >= 16 ? 16 : static_cast<int>(count));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(counts, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))),
          _mm256_castsi256_ps(
              _mm256_cmpgt_epi32(counts, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)))};
}
inline Lanes lanes_of(uint32_t bits) {
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i high = _mm256_slli_epi32(low, 8);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high))};
}
inline uint32_t bits_of(Lanes lanes) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lanes.low)) |
         static_cast<uint32_t>(_mm256_movemask_ps(lanes.high)) << 8;
}
inline Lanes both(Lanes a, Lanes b) {
  return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)};
}
inline Lanes either(Lanes a, Lanes b) {
  return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)};
}

inline Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Floats operator-(Floats a, Floats b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats operator/(Floats a, Floats b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

inline Floats load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline Floats load(const float* at, Lanes lanes) {
  return {_mm256_maskload_ps(at, _mm256_castps_si256(lanes.low)),
          _mm256_maskload_ps(at + 8, _mm256_castps_si256(lanes.high))};
}
inline Floats load(const float* at, Lanes lanes, Floats others) {
  const Floats x = load(at, lanes);
  return {_mm256_blendv_ps(others.low, x.low, lanes.low),
          _mm256_blendv_ps(others.high, x.high, lanes.high)};
}
inline void store(float* at, Floats x) {
  _mm256_storeu_ps(at, x.low);
  _mm256_storeu_ps(at + 8, x.high);
}
inline void store(float* at, Floats x, Lanes lanes) {
  _mm256_maskstore_ps(at, _mm256_castps_si256(lanes.low), x.low);
  _mm256_maskstore_ps(at + 8, _mm256_castps_si256(lanes.high), x.high);
}
inline Ints load_ints(const void* at) {
  const auto* from = static_cast<const __m256i*>(at);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}

inline __m256 widen(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

// Eight numbers, rounded in the upper half of their bits.
inline __m256i nearest_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(nearest), _mm256_castsi256_ps(quiet), nan));
}
inline __m256i narrow(Floats x) {
  const __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(nearest_bf16(x.low), 16),
                                            _mm256_srli_epi32(nearest_bf16(x.high), 16));
  return _mm256_permute4x64_epi64(words, 0xd8);
}

inline Floats load(const bf16* at) {
  const auto* from = reinterpret_cast<const __m128i*>(at);
  return {widen(_mm_loadu_si128(from)), widen(_mm_loadu_si128(from + 1))};
}
inline Floats load(const bf16* at, Lanes lanes) {
  uint32_t bits = bits_of(lanes);
  if (bits == 0xffff) return load(at);
  bf16 some[16] = {};
  for (; bits; bits &= bits - 1) some[__builtin_ctz(bits)] = at[__builtin_ctz(bits)];
  return load(some);
}
inline void store(bf16* at, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), narrow(x));
}
inline void store(bf16* at, Floats x, Lanes lanes) {
  uint32_t bits = bits_of(lanes);
  if (bits == 0xffff) return store(at, x);
  bf16 some[16];
  store(some, x);
  for (; bits; bits &= bits - 1) at[__builtin_ctz(bits)] = some[__builtin_ctz(bits)];
}
inline Floats rounded(Floats x) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(nearest_bf16(x.low), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(nearest_bf16(x.high), upper))};
}
inline void store_two(bf16* at, Floats low, Floats high) {
  store(at, low);
  store(at + 16, high);
}

inline Floats load_halves(const void* at) {
  const auto* from = static_cast<const __m128i*>(at);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }

inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fms(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats max(Floats a, Floats b, Lanes lanes) {
  const Floats x = max(a, b);
  return {_mm256_blendv_ps(a.low, x.low, lanes.low), _mm256_blendv_ps(a.high, x.high, lanes.high)};
}

template <int kComparison>
inline Lanes compare(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, kComparison), _mm256_cmp_ps(a.high, b.high, kComparison)};
}
inline Lanes is_nan(Floats x) { return compare<_CMP_UNORD_Q>(x, x); }
inline Lanes equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Lanes less(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
inline Lanes not_less(Floats a, Floats b) { return compare<_CMP_NLT_UQ>(a, b); }
inline Lanes greater(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
inline Lanes not_below(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline Floats keep(Lanes lanes, Floats x) {
  return {_mm256_and_ps(lanes.low, x.low), _mm256_and_ps(lanes.high, x.high)};
}

// For each set of eight lanes, their numbers one after the other.
struct PackedOrders {
  uint8_t lanes[256][8];
  constexpr PackedOrders() : lanes() {
    for (int set = 0; set < 256; ++set)
      for (int lane = 0, kept = 0; lane < 8; ++lane)
        if (set >> lane & 1) lanes[set][kept++] = static_cast<uint8_t>(lane);
  }
};
inline constexpr PackedOrders kPackedOrders;

inline int store_packed(float* at, Lanes lanes, Floats x) {
  const auto store_eight = [](float* to, int set, __m256 numbers) {
    const auto* order = reinterpret_cast<const __m128i*>(kPackedOrders.lanes[set]);
    const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64(order));
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(numbers, places));
  };
  const int low = _mm256_movemask_ps(lanes.low), high = _mm256_movemask_ps(lanes.high);
  const int kept = __builtin_popcount(static_cast<unsigned>(low));
  store_eight(at, low, x.low);
  store_eight(at + kept, high, x.high);
  return kept + __builtin_popcount(static_cast<unsigned>(high));
}

inline Floats to_whole(Floats x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, nearest), _mm256_round_ps(x.high, nearest)};
}

// In two steps, since the power itself may be too large or too small for a number.
inline __m256 scale_by_power(__m256 x, __m256 whole) {
  const __m256 bounded =
      _mm256_min_ps(_mm256_max_ps(whole, _mm256_set1_ps(-250.0f)), _mm256_set1_ps(250.0f));
  const __m256i power = _mm256_cvtps_epi32(bounded), half = _mm256_srai_epi32(power, 1);
  const auto power_of_2 = [](__m256i exponent) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_2(half)),
                       power_of_2(_mm256_sub_epi32(power, half)));
}
inline Floats scale_by_power(Floats x, Floats whole) {
  return {scale_by_power(x.low, whole.low), scale_by_power(x.high, whole.high)};
}

inline Ints nearest_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints bits_of(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline Floats of_bits(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Ints add(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Ints and_of(Ints a, Ints b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
inline Ints max(Ints a, Ints b) {
  return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
inline Ints shift_left(Ints x, int bits) {
  return {_mm256_slli_epi32(x.low, bits), _mm256_slli_epi32(x.high, bits)};
}
inline Ints shift_right(Ints x, int bits) {
  return {_mm256_srai_epi32(x.low, bits), _mm256_srai_epi32(x.high, bits)};
}
inline Ints widen_words(const void* at) {
  const auto* from = static_cast<const __m128i*>(at);
  return {_mm256_cvtepi16_epi32(_mm_loadu_si128(from)),
          _mm256_cvtepi16_epi32(_mm_loadu_si128(from + 1))};
}
inline void store_bytes(int8_t* at, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline int32_t sum_of(Ints x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t largest_of(Ints x) {
  const __m256i eight = _mm256_max_epi32(x.low, x.high);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline float first_of(Floats x) { return _mm256_cvtss_f32(x.low); }

inline float sum_of(Floats x) {
  const __m256 half = _mm256_add_ps(x.low, x.high);
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float largest_of(Floats x) {
  const __m256 half = _mm256_max_ps(x.low, x.high);
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

class DoubleSums {
 public:
  void add(Floats x) {
    add_four(0, _mm256_castps256_ps128(x.low));
    add_four(1, _mm256_extractf128_ps(x.low, 1));
    add_four(2, _mm256_castps256_ps128(x.high));
    add_four(3, _mm256_extractf128_ps(x.high, 1));
  }
  double value() const {
    const __m256d four =
        _mm256_add_pd(_mm256_add_pd(sums_[0], sums_[1]), _mm256_add_pd(sums_[2], sums_[3]));
    const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
  }

 private:
  void add_four(int at, __m128 x) { sums_[at] = _mm256_add_pd(sums_[at], _mm256_cvtps_pd(x)); }

  __m256d sums_[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                      _mm256_setzero_pd()};
};

}  // namespace trioserve::TRIOSERVE_ISA
