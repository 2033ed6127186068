#include "elementwise.h"

#include <cmath>

#include "vector.h"

namespace trioserve {
namespace {

// What one thread takes at a time of rows that are cut.
constexpr int64_t kPiece = 256;

// 1 / sqrt(mean(x^2) + eps), with `squares` summed over a row.
__m512 inverse_root_mean(__m512 squares, int64_t width, float eps) {
  const float mean = sum_of(squares) / static_cast<float>(width);
  return _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
}

void scale_row(const bf16* x, const bf16* weight, __m512 scale, int64_t width, bf16* y) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = first_lanes(width - i);
    const __m512 normed = _mm512_mul_ps(load(x + i, lanes), scale);
    store(y + i, _mm512_mul_ps(normed, load(weight + i, lanes)), lanes);
  }
}

__m512 silu(__m512 x) {
  const __m512 power = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2e)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

// The first lane of `x` that is `largest`, or that is NaN if `largest` is.
int64_t first_index(const float* x, int64_t width, float largest) {
  const __m512 sought = _mm512_set1_ps(largest);
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = first_lanes(width - i);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, x + i);
    const __mmask16 found = std::isnan(largest)
                                ? _mm512_mask_cmp_ps_mask(lanes, values, values, _CMP_UNORD_Q)
                                : _mm512_mask_cmp_ps_mask(lanes, values, sought, _CMP_EQ_OQ);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

int64_t argmax(const float* x, int64_t width) {
  __m512 largest = _mm512_set1_ps(-INFINITY);
  __mmask16 unordered = 0;
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = first_lanes(width - i);
    const __m512 values = _mm512_mask_loadu_ps(largest, lanes, x + i);
    unordered |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    largest = _mm512_max_ps(largest, values);
  }
  return first_index(x, width, unordered ? NAN : largest_of(largest));
}

}  // namespace

void rms_norm(const Team& team, const bf16* x, const bf16* weight, float eps, int64_t rows,
              int64_t width, bf16* y) {
  const Share share = team.share(rows);
  for (int64_t row = share.first; row < share.last; ++row) {
    const bf16* in = x + row * width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += kLanes) {
      const __m512 values = load(in + i, first_lanes(width - i));
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    scale_row(in, weight, inverse_root_mean(squares, width, eps), width, y + row * width);
  }
}

void add_rms_norm(const Team& team, const bf16* x, bf16* residual, const bf16* weight, float eps,
                  int64_t rows, int64_t width, bf16* y) {
  const Share share = team.share(rows);
  for (int64_t row = share.first; row < share.last; ++row) {
    const bf16* added = x + row * width;
    bf16* sums = residual + row * width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += kLanes) {
      const __mmask16 lanes = first_lanes(width - i);
      const __m512 sum = rounded(_mm512_add_ps(load(sums + i, lanes), load(added + i, lanes)));
      store(sums + i, sum, lanes);
      squares = _mm512_fmadd_ps(sum, sum, squares);
    }
    scale_row(sums, weight, inverse_root_mean(squares, width, eps), width, y + row * width);
  }
}

void silu_mul(const Team& team, const bf16* gate_up, int64_t rows, int64_t width, bf16* y) {
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const Share share = team.share(rows * pieces);
  for (int64_t item = share.first; item < share.last; ++item) {
    const int64_t row = item / pieces, begin = item % pieces * kPiece;
    const bf16 *gate = gate_up + row * 2 * width, *up = gate + width;
    for (int64_t i = begin; i < std::min(begin + kPiece, width); i += kLanes) {
      const __mmask16 lanes = first_lanes(width - i);
      const __m512 gated = rounded(silu(load(gate + i, lanes)));
      store(y + row * width + i, _mm512_mul_ps(gated, load(up + i, lanes)), lanes);
    }
  }
}

void gather_rows(const Team& team, const bf16* table, const int32_t* ids, int64_t rows,
                 int64_t width, bf16* y) {
  const Share share = team.share(rows);
  for (int64_t row = share.first; row < share.last; ++row)
    std::memcpy(y + row * width, table + ids[row] * width, width * sizeof(bf16));
}

void argmax_rows(const Team& team, const float* x, int64_t rows, int64_t width, int32_t* best) {
  const Share share = team.share(rows);
  for (int64_t row = share.first; row < share.last; ++row)
    best[row] = static_cast<int32_t>(argmax(x + row * width, width));
}

}  // namespace trioserve
