// The rows of a step, and the paged cache of keys and values that they read and write.
//
// A layer's cache is [num_pages][num_kv_heads][2 * page_size * head_dim]: of each page and head the keys,
// and right behind them the values, so that memory is read in long pieces. What stands where inside of
// them is for the kernels' good, and known to this file and gpu/cpu/page_format.py alone:
//   keys    16 tokens at a time, by pairs of numbers: [page_size / 16][head_dim / 2][16][2], so
//           that one load holds the same pair of 16 keys, and a query's pair is multiplied with
//           all. Of pages that aren't a multiple of 16 tokens, 8, 4, 2 or 1 stand together.
//   values  by pairs of tokens: [page_size / 2][head_dim][2], so that one load holds 16 numbers of
//           two values, which are multiplied with the weights of both. With an odd page size,
//           [page_size][head_dim].
#pragma once

#include <cstdint>
#include <numeric>

#include "bf16.h"

namespace trioserve::TRIOSERVE_ISA {

// Of one model, the same for all of its layers. head_dim is a multiple of 32, at most 256.
struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int page_size;
  float scale;  // of a query's products with keys: 1 / sqrt(head_dim)

  int group() const { return num_heads / num_kv_heads; }
  // Numbers that a token has in the fused product of queries, keys and values.
  int64_t qkv_width() const { return int64_t{num_heads + 2 * num_kv_heads} * head_dim; }
  // Numbers between two heads of a page, and between two pages of a layer.
  int64_t head_stride() const { return int64_t{2} * page_size * head_dim; }
  int64_t page_stride() const { return num_kv_heads * head_stride(); }
};

// The rows of one step, as gpu.attention.StepLayout has them. Row i's queries are the tokens
// query_start[i] to query_start[i + 1] - 1, the last of which is at position context_lens[i] - 1 of
// its sequence; the page of position p is block_tables[i * table_stride + p / page_size].
struct AttentionStep {
  int64_t num_rows;
  const int64_t* query_start;   // [num_rows + 1]
  const int64_t* context_lens;  // [num_rows]
  const int32_t* block_tables;  // [num_rows, table_stride]
  int64_t table_stride;
  const float* angles;  // [num_tokens, head_dim], as gpu.rope has them; null: those of positions

  int64_t num_tokens() const { return query_start[num_rows]; }
  int64_t query_len(int64_t row) const { return query_start[row + 1] - query_start[row]; }
};

// Where a head's numbers are in its part of a page.
struct PageLayout {
  int head_dim, page_size;
  int together;  // so many keys stand together

  explicit PageLayout(const AttentionShape& shape)
      : head_dim(shape.head_dim),
        page_size(shape.page_size),
        together(std::gcd(shape.page_size, 16)) {}

  // Of number 0 of a token's key; numbers 2 i and 2 i + 1 stand i * key_step() behind it.
  int64_t key(int slot) const {
    return int64_t{slot / together} * together * head_dim + slot % together * 2;
  }
  int64_t key_step() const { return 2 * together; }

  // Of the first value.
  int64_t values() const { return int64_t{page_size} * head_dim; }
  // Of number 0 of a token's value; number i stands i * value_step() behind it.
  int64_t value(int slot) const {
    const bool pairs = page_size % 2 == 0;
    return values() + (pairs ? int64_t{slot / 2} * 2 * head_dim + slot % 2 : int64_t{slot} * head_dim);
  }
  int64_t value_step() const { return page_size % 2 ? 1 : 2; }
};

}  // namespace trioserve::TRIOSERVE_ISA
