// sampling.cuh - what the kernels of the sampler share: their parameters, a slot's record, the
// words that mark tokens, and how a logit is read.
//
// The sampler of one step is four launches over the same Parameters, in this order:
//   mark_tokens   note which tokens a bias, a penalty or a mask touches, and count them
//   scan_logits   steps 2 to 4 of trioserve/protocol/sampling.py; largest and sum of each block
//   draw_tokens   steps 6 to 11, from the blocks' statistics and the few blocks that matter
//   top_logprobs  the most probable tokens of the rows that ask for them
// Step 5 is an optional bias for every token (added) and an optional bitmask (a 0 bit is -inf),
// which belong to the row and not to the slot's parameters.
#pragma once
#include "hardware.cuh"

// Tokens in a block of the draw's first race; part of what a seed means, so it never changes. It is
// also what a warp loads at once, four logits a lane.
constexpr int BLOCK = 128;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 NAN_BITS = 0x7fc00000u;

// How the tokens of a slot are sampled; written when the slot is opened.
struct SlotRecord {
  double repetition_penalty;  // multiplies negative logits; its inverse, the others
  double inverse_repetition_penalty;
  double frequency_penalty, presence_penalty, top_p;
  u64 seed;
  const int* bias_ids;        // [num_bias], ascending, all in the vocabulary
  const double* bias_values;  // [num_bias]
  const int* stop_ids;        // [num_stop], all in the vocabulary
  float temperature;          // 0 for greedy
  float min_p;
  int top_k;  // the vocabulary's size if off
  int min_tokens, prompt_length;
  u32 sequence_index;
  int logprobs;  // -1: none; n: the chosen token's, and those of the n most probable
  int processed_logprobs;  // 1: they are of the distribution drawn from; 0: the model's own
  int num_bias, num_stop;
};
static_assert(sizeof(SlotRecord) == SLOT_RECORD_BYTES);

// The distribution of a row's reported log-probabilities: that of the tokens with ranks before
// `end` (see candidates.cuh), each with log-probability (logit - peak) / temperature - log_total.
struct RowReport {
  u64 end;
  float peak, temperature, log_total;
  int count;  // how many of the most probable tokens are asked for
};
static_assert(sizeof(RowReport) == ROW_REPORT_BYTES);

struct Parameters {
  float* logits;              // [rows, logits_stride], vocab_size of them used; overwritten
  const float* bias;          // [rows, vocab_size] or null
  const u32* bitmask;         // [rows, ceil(vocab_size / 32)] or null; bit t % 32 of word t / 32
  const int* slots;           // [rows]; -1: a row of padding, left alone
  const int* lengths;         // [rows] tokens so far: the position of the token to draw
  int* history;               // [num_slots, history_stride]
  const SlotRecord* records;  // [num_slots]
  u32* marks;                 // [rows, marks_stride], zero between steps
  float2* stats;              // [rows, num_blocks] (largest logit, sum of exp((x - largest) / T))
  float2* raw_stats;          // the same of the unmodified logits with T = 1; rows that report them
  RowReport* reports;         // [rows]
  int* tokens;                // [rows]; -1: the logits leave no token to draw
  float* logprobs;            // [rows]; NaN if not asked for
  int* top_ids;               // [rows, max_logprobs]; -1 after the last one
  float* top_values;          // [rows, max_logprobs]
  i64 logits_stride, history_stride, marks_stride;
  int vocab_size, num_blocks, max_logprobs;
  int appends;  // 1: what is drawn is appended to the history; with 0 a slot may have several rows
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

// ---- marks --------------------------------------------------------------------------------------
// A word for each token of the vocabulary. 0: nothing touches the token. 1 to MARKS_END - 1: a
// mark, which is how often the output holds the token, and flags. Above: the token has been
// adjusted, and the word is the complement of its raw logit's bits, kept for log-probabilities. The
// three don't overlap: the complement of a word below MARKS_END would be a NaN with its sign set,
// and NaN is stored without.
constexpr u32 OCCURS_IN_PROMPT = 1u << 20;  // counts stay below: so does history_stride
constexpr u32 HAS_BIAS = 1u << 21;
constexpr u32 IS_MASKED = 1u << 22;
constexpr u32 COUNT_MASK = OCCURS_IN_PROMPT - 1;
constexpr u32 MARKS_END = (1u << 23) - 1;

DEVICE u32 keep_raw(float logit) { return ~(logit != logit ? NAN_BITS : __float_as_uint(logit)); }
DEVICE bool holds_raw(u32 word) { return word >= MARKS_END; }
DEVICE float raw_of(u32 word) { return __uint_as_float(~word); }

// Which of steps 2 to 4 a row needs.
struct Adjustments {
  bool bias, repetition, counts, mask;
  int first, last;  // the part of the history that matters

  DEVICE Adjustments(const SlotRecord& record, int length) {
    bias = record.num_bias > 0;
    repetition = record.repetition_penalty != 1.0;
    counts = record.frequency_penalty != 0.0 || record.presence_penalty != 0.0;
    mask = record.num_stop > 0 && length - record.prompt_length < record.min_tokens;
    first = repetition ? 0 : record.prompt_length;
    last = repetition || counts ? length : 0;
  }
  DEVICE bool any() const { return bias || mask || first < last; }
};

// Calls visit(token, position) for the tokens of the history that count, visit(token, -1) for those
// with a bias and visit(token, -2) for masked ones, shared among the threads of `num_chunks`
// blocks. Tokens outside of the vocabulary are passed by.
template <class Visit>
DEVICE void for_each_touched(const Parameters& p, const SlotRecord& record, const Adjustments& todo,
                             int slot, int chunk, int num_chunks, Visit visit) {
  const int* history = p.history + slot * p.history_stride;
  const int start = chunk * NUM_THREADS + threadIdx.x, step = num_chunks * NUM_THREADS;
  for (int i = todo.first + start; i < todo.last; i += step) {
    const int token = history[i];
    if (token >= 0 && token < p.vocab_size) visit(token, i);
  }
  if (todo.bias) {
    for (int i = start; i < record.num_bias; i += step) visit(record.bias_ids[i], -1);
  }
  if (todo.mask) {
    for (int i = start; i < record.num_stop; i += step) visit(record.stop_ids[i], -2);
  }
}

// ---- logits -------------------------------------------------------------------------------------

DEVICE bool reports_raw(const SlotRecord& record) {
  return record.logprobs >= 0 && !record.processed_logprobs;
}

// One row's logits: unmodified, or adjusted and with the row's bias and bitmask.
struct Logits {
  const float* row;
  const float* bias;   // or null
  const u32* bitmask;  // or null
  const u32* marks;    // unmodified logits: words that may hold them; or null
  int vocab_size;
  bool aligned;  // four at a time

  DEVICE float at(int id) const {
    float x = row[id];
    if (marks && holds_raw(marks[id])) x = raw_of(marks[id]);
    if (bias) x += bias[id];
    if (bitmask && !(bitmask[id / 32] >> id % 32 & 1)) x = -INFINITY_F;
    return x;
  }
  // Four neighbors as they are in memory, from `first` on, a multiple of 4; -inf behind the
  // vocabulary.
  DEVICE void load4(int first, float (&x)[4]) const {
    if (aligned && first + 4 <= vocab_size) {
      const float4 four = *reinterpret_cast<const float4*>(row + first);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      for (int i = 0; i < 4; i++) x[i] = first + i < vocab_size ? row[first + i] : -INFINITY_F;
    }
  }
  // What the marks, the bias and the bitmask make of them.
  DEVICE void shift4(int first, float (&x)[4]) const {
    if (!marks && !bias && !bitmask) return;
    const u32 allowed = bitmask && first < vocab_size ? bitmask[first / 32] >> first % 32 : ~0u;
    for (int i = 0; i < 4; i++) {
      if (first + i >= vocab_size) break;
      if (marks && holds_raw(marks[first + i])) x[i] = raw_of(marks[first + i]);
      if (bias) x[i] += bias[first + i];
      if (!(allowed >> i & 1)) x[i] = -INFINITY_F;
    }
  }
};

DEVICE Logits adjusted_logits(const Parameters& p, int row) {
  const float* logits = p.logits + row * p.logits_stride;
  const i64 words = (p.vocab_size + 31) / 32;
  return {logits,
          p.bias ? p.bias + static_cast<i64>(row) * p.vocab_size : nullptr,
          p.bitmask ? p.bitmask + row * words : nullptr,
          nullptr,
          p.vocab_size,
          reinterpret_cast<u64>(logits) % 16 == 0};
}

DEVICE Logits raw_logits(const Parameters& p, int row, const Adjustments& done) {
  const float* logits = p.logits + row * p.logits_stride;
  return {logits, nullptr, nullptr, done.any() ? p.marks + row * p.marks_stride : nullptr,
          p.vocab_size, reinterpret_cast<u64>(logits) % 16 == 0};
}
