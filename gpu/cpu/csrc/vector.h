// Sixteen numbers at a time: what the kernels need beyond the instructions themselves.
//
// Sums of products are written as fused multiply-adds, so that no compiler decides where to round.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "bf16.h"

namespace trioserve {

inline constexpr int kLanes = 16;

// The lanes below `count`.
inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// To the nearest, ties to even; NaN stays NaN, and what is below the normal numbers becomes 0.
inline __m256i narrow(__m512 x) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
}

inline __m512 load(const bf16* at) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

inline __m512 load(const bf16* at, __mmask16 lanes) {
  return widen(_mm256_maskz_loadu_epi16(lanes, at));
}

inline void store(bf16* at, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), narrow(x));
}

inline void store(bf16* at, __m512 x, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(at, lanes, narrow(x));
}

// x as bfloat16 holds it.
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// 32 numbers of bfloat16, as the instruction for their products wants them.
inline __m512bh load_pairs(const bf16* at) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
}

// Two numbers of bfloat16, sixteen times.
inline __m512bh broadcast_pair(const bf16* at) {
  int32_t pair;
  std::memcpy(&pair, at, sizeof pair);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// The first and the second number of each pair, widened.
inline __m512 first_of_pairs(__m512bh pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(reinterpret_cast<__m512i>(pairs), 16));
}
inline __m512 second_of_pairs(__m512bh pairs) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(reinterpret_cast<__m512i>(pairs), upper));
}

// The halves of x. gcc 12 takes its own functions for these to use something uninitialized.
inline __m256 lower_half(__m512 x) {
  __m256 half;
  std::memcpy(&half, &x, sizeof half);
  return half;
}
inline __m256 upper_half(__m512 x) { return _mm512_maskz_extractf32x8_ps(0xff, x, 1); }

inline float sum_of(__m512 x) {
  const __m256 half = _mm256_add_ps(lower_half(x), upper_half(x));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

inline float largest_of(__m512 x) {
  const __m256 half = _mm256_max_ps(lower_half(x), upper_half(x));
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

// 2^x with a relative error below 2e-7, for x between -126 and 126; NaN for NaN.
inline __m512 exp2_within(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);  // within 1/2 of 0
  // The polynomial of Cephes' exp2f.
  __m512 sum = _mm512_set1_ps(1.535336188e-4f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.339887440e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.618437357e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.550332471e-2f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.402264791e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.931472028e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

// The same for any x: 0 far below, infinity far above.
inline __m512 exp2_of(__m512 x) {
  // An operand that is NaN comes through if it is the second.
  return exp2_within(_mm512_max_ps(_mm512_set1_ps(-200.0f), x));
}

inline constexpr float kLog2e = 1.44269504f;

}  // namespace trioserve
