// top_logprobs.cu - the most probable tokens of the rows that ask for them, with log-probabilities.
//
// Of the distribution that draw_tokens.cu left a RowReport of: the model's own, or the one drawn
// from. Tokens come by falling probability, equals by id; those of probability 0 are left out, and
// -1 stands behind the last one. Candidates are found as for top_k (candidates.cuh).
//
// This is the last launch of a step, so it also clears the marks that keep raw logits.
//
// Tiling: one thread block per row, that of a row that asks for nothing leaves at once. Bytes: 8
// per 128 tokens and 512 for each of about max_logprobs blocks. Expected on an H200: 6 us, 1.5 us
// where no row asks.
#include "candidates.cuh"

DEVICE void report_top(const Parameters& p, int row, const RowReport& report, const Logits& logits,
                       const float2* stats, const SharedParts& parts) {
  Candidates candidates =
      parts.candidates(logits, Scale(report.peak, report.temperature), p.num_blocks);
  candidates.rank_blocks(stats);
  const u64 bound = candidates.bound_tokens(report.count, report.end);
  const u64 end = candidates.select(TOKENS, report.count, report.end, bound) + 1;
  // They fit, for there are `count` of them at most.
  if (!candidates.lists_all(end)) candidates.collect(0, end);
  for (int i = threadIdx.x; i < p.max_logprobs; i += NUM_THREADS) {
    int id = -1;
    float value = __uint_as_float(NAN_BITS);
    if (i < candidates.listed && candidates.list[i] < end) {
      const u64 rank = candidates.list[i];
      id = static_cast<int>(id_of(rank));
      value = -__uint_as_float(size_of(rank)) - report.log_total;
    }
    p.top_ids[static_cast<i64>(row) * p.max_logprobs + i] = id;
    p.top_values[static_cast<i64>(row) * p.max_logprobs + i] = value;
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) top_logprobs(const Parameters p) {
  const int row = blockIdx.x, slot = p.slots[row];
  if (slot < 0) return;
  const SlotRecord& record = p.records[slot];
  if (record.logprobs < 0) return;
  DYNAMIC_SHARED(shared);
  const SharedParts parts(shared, p.num_blocks);
  const RowReport report = p.reports[row];
  const Adjustments done(record, p.lengths[row]);
  const bool raw = reports_raw(record);
  if (report.count == 0) {  // none asked for, or no token could be drawn
    for (int i = threadIdx.x; i < p.max_logprobs; i += NUM_THREADS) {
      p.top_ids[static_cast<i64>(row) * p.max_logprobs + i] = -1;
    }
  } else {
    const Logits logits = raw ? raw_logits(p, row, done) : adjusted_logits(p, row);
    const float2* stats = (raw ? p.raw_stats : p.stats) + static_cast<i64>(row) * p.num_blocks;
    report_top(p, row, report, logits, stats, parts);
  }
  if (raw && done.any()) {
    __syncthreads();
    u32* marks = p.marks + row * p.marks_stride;
    // Atomic, for a token may occur twice.
    for_each_touched(p, record, done, slot, 0, 1,
                     [&](int token, int) { atomicExch(marks + token, 0u); });
  }
}
