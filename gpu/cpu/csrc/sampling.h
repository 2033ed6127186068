// Logits to tokens: steps 2 to 11 of trioserve/protocol/sampling.py, and the log-probabilities.
//
// gpu/sampling/sampler.py is the reference. Every row is computed by one thread, by itself, so what it gives
// doesn't depend on the batch or on the number of threads.
#pragma once

#include <cstdint>

#include "changes.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// What is asked of one row's draw; trioserve/protocol/sampling.py explains.
struct Draw {
  uint64_t seed;
  double top_p;          // 1: off
  float temperature;     // 0: the most probable token
  float min_p;           // 0: off
  int32_t top_k;         // 0, or the vocabulary's size and more: off
  uint32_t position;     // in the sequence, of the token to be drawn
  uint32_t index;        // of the sequence in its request
  int32_t change;        // which of the changes is the row's; -1 for none
  int32_t keeps_logits;  // whether the row's logits are to become those of what was drawn from
};

// Bytes of scratch that draw_tokens needs for each thread. They must be zeros at first, and are
// not to be touched from one call to the next.
int64_t draw_scratch_bytes(int64_t vocab_size);

// In place of a token: NO_TOKEN and NAN_LOGITS of trioserve.sampling.
inline constexpr int64_t kNoToken = -1;
inline constexpr int64_t kNanLogits = -2;

// tokens[i] = what is drawn from row i of `logits`, [rows, vocab_size]; kNanLogits where they hold
// NaN, kNoToken where nothing is above -inf. Tokens of logit +inf share all probability. Only a row that keeps its
// logits is changed: it has, afterwards, the logarithms of its final weights.
void draw_tokens(const Team& team, float* logits, int64_t rows, int64_t vocab_size,
                 const Draw* draws, const Change* changes, const Adjustment& adjustment,
                 int32_t* tokens, void* scratch);

// What is asked about a row: the first `count` of its tokens, most probable first.
struct Report {
  int32_t row;
  int32_t count;
};

// For each of `num_reports`: the logarithm of the sum of the exponentials of a row's logits, and
// the ids and log-probabilities of its most probable tokens, the first of equals first; `most` have
// room, and found[i] says how many there are. Those of probability 0 are left out.
void report_rows(const Team& team, const float* logits, int64_t vocab_size, const Report* reports,
                 int64_t num_reports, int64_t most, float* normalizers, int32_t* ids,
                 float* logprobs, int32_t* found);

}  // namespace trioserve::TRIOSERVE_ISA
