#include "rope.h"

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

void norm_head(bf16* x, const bf16* weight, float eps, int head_dim) {
  Floats squares = zeros();
  for (int i = 0; i < head_dim; i += kLanes) {
    const Floats values = load(x + i);
    squares = fma(values, values, squares);
  }
  const float mean = sum_of(squares) / static_cast<float>(head_dim);
  const Floats scale = broadcast(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < head_dim; i += kLanes) {
    const Floats normed = rounded(load(x + i) * scale);
    store(x + i, normed * load(weight + i));
  }
}

// Turns number i with number i + head_dim / 2.
void rotate_head(bf16* x, const float* cos_sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const Floats cosines = load(cos_sin + i);
    const Floats sines = load(cos_sin + half + i);
    const Floats a = load(x + i), b = load(x + half + i);
    store(x + i, fms(a, cosines, b * sines));
    store(x + half + i, fma(b, cosines, a * sines));
  }
}

void write_key(const bf16* from, const PageLayout& layout, int slot, bf16* head) {
  bf16* to = head + layout.key(slot);
  for (int i = 0; i < layout.head_dim; i += 2, to += layout.key_step())
    std::memcpy(to, from + i, 2 * sizeof(bf16));
}

void write_value(const bf16* from, const PageLayout& layout, int slot, bf16* head) {
  bf16* to = head + layout.value(slot);
  for (int i = 0; i < layout.head_dim; ++i, to += layout.value_step()) *to = from[i];
}

}  // namespace

void rope_and_write(const Team& team, const AttentionShape& shape, const AttentionStep& step,
                    const float* cos_sin, const QkNorm& norm, bf16* qkv, bf16* pages) {
  const PageLayout layout(shape);
  const int rotated = shape.num_heads + shape.num_kv_heads;
  const int heads = rotated + shape.num_kv_heads;
  const Share share = team.share(step.num_tokens() * heads);
  int64_t row = -1, next_row_at = 0;
  for (int64_t item = share.first; item < share.last; ++item) {
    const int64_t token = item / heads;
    const int head = static_cast<int>(item % heads);
    if (token >= next_row_at) {
      const int64_t* ends = step.query_start + 1;
      row = std::upper_bound(ends, ends + step.num_rows, token) - ends;
      next_row_at = ends[row];
    }
    const int64_t position = step.context_lens[row] - (step.query_start[row + 1] - token);
    bf16* x = qkv + token * shape.qkv_width() + int64_t{head} * shape.head_dim;
    if (head < rotated) {
      if (norm.weight) norm_head(x, norm.weight + head * shape.head_dim, norm.eps, shape.head_dim);
      if (cos_sin) {
        const float* angles = step.angles ? step.angles + token * shape.head_dim
                                          : cos_sin + position * shape.head_dim;
        rotate_head(x, angles, shape.head_dim);
      }
    }
    if (head < shape.num_heads) continue;
    const int64_t page = step.block_tables[row * step.table_stride + position / shape.page_size];
    const int slot = static_cast<int>(position % shape.page_size);
    const int kv_head = (head - shape.num_heads) % shape.num_kv_heads;
    bf16* to = pages + page * shape.page_stride() + kv_head * shape.head_stride();
    if (head < rotated)
      write_key(x, layout, slot, to);
    else
      write_value(x, layout, slot, to);
  }
}

}  // namespace trioserve::TRIOSERVE_ISA
