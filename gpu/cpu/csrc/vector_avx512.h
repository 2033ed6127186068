// vector.h in AVX-512, with BF16 where it is compiled for that.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "bf16.h"

// g++ 12 finds fault with the vectors that its own header leaves undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace trioserve::TRIOSERVE_ISA {

using Floats = __m512;
using Ints = __m512i;
using Lanes = __mmask16;

inline constexpr int kRegisters = 32;

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Ints broadcast(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats zeros() { return _mm512_setzero_ps(); }

inline Lanes first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<Lanes>((1u << count) - 1);
}
inline Lanes lanes_of(uint32_t bits) { return static_cast<Lanes>(bits); }
inline uint32_t bits_of(Lanes lanes) { return lanes; }
inline Lanes both(Lanes a, Lanes b) { return a & b; }
inline Lanes either(Lanes a, Lanes b) { return a | b; }

inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load(const float* at, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, at); }
inline Floats load(const float* at, Lanes lanes, Floats others) {
  return _mm512_mask_loadu_ps(others, lanes, at);
}
inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
inline void store(float* at, Floats x, Lanes lanes) { _mm512_mask_storeu_ps(at, lanes, x); }
inline Ints load_ints(const void* at) { return _mm512_loadu_si512(at); }

inline Floats widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

#ifdef __AVX512BF16__
inline __m256i narrow(Floats x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
#else
inline __m256i narrow(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(nearest, nan, quiet), 16));
}
#endif

inline Floats load(const bf16* at) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline Floats load(const bf16* at, Lanes lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, at)); }
inline void store(bf16* at, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), narrow(x));
}
inline void store(bf16* at, Floats x, Lanes lanes) { _mm256_mask_storeu_epi16(at, lanes, narrow(x)); }
inline Floats rounded(Floats x) { return widen(narrow(x)); }
inline void store_two(bf16* at, Floats low, Floats high) {
#ifdef __AVX512BF16__
  _mm512_storeu_si512(at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
#else
  store(at, low);
  store(at + 16, high);
#endif
}

inline Floats load_halves(const void* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
}
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats max(Floats a, Floats b, Lanes lanes) { return _mm512_mask_max_ps(a, lanes, a, b); }

inline Lanes is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Lanes equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Lanes less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Lanes not_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Lanes greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Lanes not_below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Floats keep(Lanes lanes, Floats x) { return _mm512_maskz_mov_ps(lanes, x); }

inline int store_packed(float* at, Lanes lanes, Floats x) {
  _mm512_storeu_ps(at, _mm512_maskz_compress_ps(lanes, x));
  return __builtin_popcount(lanes);
}

inline Floats to_whole(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats scale_by_power(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }

inline Ints nearest_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints bits_of(Floats x) { return _mm512_castps_si512(x); }
inline Floats of_bits(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints and_of(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints shift_left(Ints x, int bits) { return _mm512_slli_epi32(x, bits); }
inline Ints shift_right(Ints x, int bits) { return _mm512_srai_epi32(x, bits); }
inline Ints widen_words(const void* at) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
}
inline void store_bytes(int8_t* at, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtsepi32_epi8(x));
}
inline int32_t sum_of(Ints x) { return _mm512_reduce_add_epi32(x); }
inline int32_t largest_of(Ints x) { return _mm512_reduce_max_epi32(x); }

// The halves of x. gcc 12 takes its own functions for these to use something uninitialized.
inline __m256 lower_half(Floats x) {
  __m256 half;
  std::memcpy(&half, &x, sizeof half);
  return half;
}
inline __m256 upper_half(Floats x) { return _mm512_maskz_extractf32x8_ps(0xff, x, 1); }

inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }

inline float sum_of(Floats x) {
  const __m256 half = _mm256_add_ps(lower_half(x), upper_half(x));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

inline float largest_of(Floats x) {
  const __m256 half = _mm256_max_ps(lower_half(x), upper_half(x));
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

class DoubleSums {
 public:
  void add(Floats x) {
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double value() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

}  // namespace trioserve::TRIOSERVE_ISA
