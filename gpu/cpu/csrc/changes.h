// What is done to a row's logits before a token is drawn: steps 2 to 5 of trioserve/protocol/sampling.py.
#pragma once

#include <cstdint>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

// What steps 2 to 4 do to one row's logits. Ids past the vocabulary are ignored.
struct Change {
  double repetition_penalty, frequency_penalty, presence_penalty;
  const int32_t* tokens;  // the sequence: `num_tokens`, the first `prompt_length` its prompt
  int64_t num_tokens, prompt_length;
  const int32_t* biased;  // ids, and what is added to each
  const double* biases;
  int64_t num_biased;
  const int32_t* masked;  // ids
  int64_t num_masked;
};

// What step 5 does to all rows. Either may be null.
struct Adjustment {
  const float* bias;      // [rows, vocab_size], added
  const uint32_t* words;  // [rows, words_stride]: a token with bit 0 is masked
  int64_t words_stride;
};

// Those of a row, or null.
struct RowChanges {
  const Change* change;
  const float* bias;
  const uint32_t* words;
};

// The logits of a row as they are drawn from: themselves if nothing changes them, or `changed`,
// which has room for all. `counts` are zeros for every token, before and after.
const float* change_row(const float* logits, int64_t vocab_size, RowChanges changes,
                        float* changed, int32_t* counts);

}  // namespace trioserve::TRIOSERVE_ISA
