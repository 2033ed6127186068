#include "elementwise.h"

#include <cmath>

#include "gated.h"
#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// What one thread takes at a time of rows that are cut.
constexpr int64_t kPiece = 256;

// 1 / sqrt(mean(x^2) + eps), with `squares` summed over a row.
Floats inverse_root_mean(Floats squares, int64_t width, float eps) {
  const float mean = sum_of(squares) / static_cast<float>(width);
  return broadcast(1.0f / std::sqrt(mean + eps));
}

void scale_row(const bf16* x, const bf16* weight, Floats scale, int64_t width, bf16* y) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes lanes = first_lanes(width - i);
    const Floats normed = load(x + i, lanes) * scale;
    store(y + i, normed * load(weight + i, lanes), lanes);
  }
}

// The first lane of `x` that is `largest`, or that is NaN if `largest` is.
int64_t first_index(const float* x, int64_t width, float largest) {
  const Floats sought = broadcast(largest);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes lanes = first_lanes(width - i);
    const Floats values = load(x + i, lanes);
    const Lanes alike = std::isnan(largest) ? is_nan(values) : equal(values, sought);
    const uint32_t found = bits_of(both(lanes, alike));
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

int64_t argmax(const float* x, int64_t width) {
  Floats largest = broadcast(-INFINITY);
  Lanes nans = first_lanes(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes lanes = first_lanes(width - i);
    const Floats values = load(x + i, lanes, largest);
    nans = either(nans, is_nan(values));
    largest = max(largest, values);
  }
  return first_index(x, width, bits_of(nans) ? NAN : largest_of(largest));
}

}  // namespace

void rms_norm(const Team& team, const bf16* x, const bf16* weight, float eps, int64_t rows,
              int64_t width, bf16* y) {
  const Share share = team.share(rows);
  for (int64_t row = share.first; row < share.last; ++row) {
    const bf16* in = x + row * width;
    Floats squares = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats values = load(in + i, first_lanes(width - i));
      squares = fma(values, values, squares);
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
    Floats squares = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
      const Lanes lanes = first_lanes(width - i);
      const Floats sum = rounded(load(sums + i, lanes) + load(added + i, lanes));
      store(sums + i, sum, lanes);
      squares = fma(sum, sum, squares);
    }
    if (weight == nullptr) continue;
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
      const Lanes lanes = first_lanes(width - i);
      store(y + row * width + i, gated(load(gate + i, lanes), load(up + i, lanes)), lanes);
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

}  // namespace trioserve::TRIOSERVE_ISA
