// adjust_logits.cu - steps 2 to 4 of trioserve/sampling.py: bias, penalties and masked stop ids.
//
// Every token that mark_tokens.cu marked is met at least once on the same walk; whoever meets it
// first takes the mark (an atomic compare and swap) and does all that is to be done to its logit, in
// the order written down, so that the launch needs no order of its own. Where the row reports raw
// log-probabilities, the raw logit stays behind in the mark's place until top_logprobs.cu.
//
// Arithmetic as in gpu/sampler.py: each step in float64, rounded to float32.
//
// Tiling, bytes and time as in mark_tokens.cu, and 8 bytes of a logit for each distinct token.
#include "sampling.cuh"

// Where `token` is in the ascending `ids`; it is there.
DEVICE int index_of(const int* ids, int count, int token) {
  int low = 0;
  while (count > 1) {
    const int half = count / 2;
    if (ids[low + half] <= token) low += half;
    count -= half;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) adjust_logits(const Parameters p) {
  const int row = blockIdx.y, slot = p.slots[row];
  if (slot < 0) return;
  const SlotRecord& record = p.records[slot];
  const Adjustments todo(record, p.lengths[row]);
  if (!todo.any()) return;
  u32* marks = p.marks + row * p.marks_stride;
  float* logits = p.logits + row * p.logits_stride;
  const bool raw_wanted = reports_raw(p, record);
  for_each_touched(p, record, todo, slot, blockIdx.x, gridDim.x, [&](int token, int) {
    const u32 mark = load_relaxed(marks + token);
    if (mark == 0 || mark >= MARKS_END) return;  // somebody took it
    float x = logits[token];
    if (atomicCAS(marks + token, mark, raw_wanted ? keep_raw(x) : 0u) != mark) return;
    const u32 count = mark & COUNT_MASK;
    if (mark & HAS_BIAS) {
      const int i = index_of(record.bias_ids, record.num_bias, token);
      x = static_cast<float>(x + record.bias_values[i]);
    }
    if (todo.repetition && (count || mark & OCCURS_IN_PROMPT)) {
      x = static_cast<float>(x * (x > 0.f ? record.inverse_repetition_penalty
                                          : record.repetition_penalty));
    }
    if (todo.counts && count) {
      const double amount = record.frequency_penalty * count + record.presence_penalty;
      x = static_cast<float>(x - amount);
    }
    if (mark & IS_MASKED) x = -INFINITY_F;
    logits[token] = x;
  });
}
