// draw_tokens.cu - steps 6 to 11 of trioserve/protocol/sampling.py: one token for every row.
//
// From the blocks' statistics that scan_logits.cu left. A greedy row takes the first largest logit.
// For the others, candidates.cuh finds where top_k, top_p and min_p cut, as the `end` of the kept
// ranks. Then two exponential races are run (see trioserve/protocol/sampling.py), between the blocks
// by the sums of their kept tokens and between the tokens of the winner. The token is appended to
// the slot's history, where the next step finds it.
//
// The vocabulary isn't sorted, and most of it not read again. Sampling by rejection, as FlashInfer
// has it, does without a sort too, but draws anew in each round: here the draw is one race, with
// the random numbers of gpu/sampling/sampler.py.
//
// Tiling: one thread block per row. Shared memory: the blocks' ranks and sums, a list of
// LIST_CAPACITY candidates, sums over them or over intervals.
//
// Bytes: 8 per 128 tokens always; 512 for each block that may hold a kept token, about k of them
// for top_k. Where the kept tokens don't fit the list (a flat distribution), two or three passes
// over the row. 256 plain rows of 128,256 are 2 MB; latency bounds them: expected on an H200 are
// 6 us plain or greedy, 10 us with top_k or top_p (20 us for 256 rows, which are two waves), 40 us
// for one flat row and 110 us for 256.
#include "candidates.cuh"
#include "philox.cuh"

// e^-87 is about the smallest normal float: less probable tokens are dropped.
constexpr float LEAST_SIZE = 87.f;

// Orders logits: the larger, the smaller the number; NaN comes first; both zeros are equal.
DEVICE u32 falling(float x) {
  if (x != x) return 0;
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

struct Peak {
  float logit;
  int block;  // the first that has it
};

DEVICE Peak find_peak(const float2* stats, int num_blocks, u64* scratch) {
  u64 best = ~0ull;
  for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) {
    const u64 order = static_cast<u64>(falling(stats[b].x)) << 32 | b;
    best = order < best ? order : best;
  }
  const int block = static_cast<int>(static_cast<u32>(min_over_block(best, scratch)));
  return {stats[block].x, block};
}

// The sum of exp(logit - peak) over the row, from statistics of temperature 1.
DEVICE double total_weight(const float2* stats, int num_blocks, float peak, u64* scratch) {
  double sum = 0;
  for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) {
    const float2 block = stats[b];
    if (block.x > -INFINITY_F) {
      const float weight = block.x == peak ? 1.f : exp2_approx((block.x - peak) * LOG2_E);
      sum += static_cast<double>(block.y) * weight;
    }
  }
  return sum_over_block(sum, scratch);
}

// The smallest of the times of all threads' candidates, the first of equals: its `id`.
DEVICE u32 first_to_arrive(double time, u32 id, u64* scratch) {
  // No time is negative, so their bits are ordered as they are.
  const u64 bits = static_cast<u64>(__double_as_longlong(time));
  const u64 least = min_over_block(bits, scratch);
  return static_cast<u32>(min_over_block(bits == least ? id : ~0ull, scratch));
}

// 1 / x for a normal float's range: two Newton steps from a float's, good to a few units in the
// last place. A division's rare branches cost more registers than the whole race.
DEVICE double reciprocal(double x) {
  double y = reciprocal_approx(static_cast<float>(x));
  y = y * (2.0 - x * y);
  return y * (2.0 - x * y);
}

constexpr int NO_TOKEN = -1;  // in place of a token, as trioserve.sampling has them
constexpr int NAN_LOGITS = -2;
constexpr double NEVER = 0x1p1023;  // not infinite: a candidate of weight 0 may not win

// Past the ranks of all tokens with a weight of at least min_p, from 0 to 1.
DEVICE u64 end_of_min_p(float min_p) {
  u32 kept = 0, dropped = __float_as_uint(LEAST_SIZE);
  if (min_p == 0.f) return end_after(dropped);
  while (dropped - kept > 1) {
    const u32 middle = (kept + dropped) / 2;
    if (weight_of_size(middle) >= min_p) {
      kept = middle;
    } else {
      dropped = middle;
    }
  }
  return end_after(kept);
}

// Steps 8 to 10: the end of the kept ranks. sums[b] becomes the mass of block b's kept tokens, and
// `total` that of all.
DEVICE u64 truncate(Candidates& candidates, const SlotRecord& record, const float2* stats,
                    int vocab_size, u64& total) {
  const int num_blocks = candidates.num_blocks;
  const bool top_k = record.top_k < vocab_size, top_p = record.top_p < 1.0;
  __syncthreads();
  u64 sum = 0;
  for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) {
    const float2 block = stats[b];
    const float weight = weight_of_size(candidates.scale.size_at(block.x));
    candidates.sums[b] = block.x > -INFINITY_F ? fixed_point(block.y * weight) : 0;
    sum += candidates.sums[b];
  }
  total = sum_over_block(sum, candidates.scratch);
  const u64 end_of_10 = end_of_min_p(record.min_p);
  u64 end = end_of_10;
  if (!top_k && !top_p && record.min_p == 0.f) return end;

  candidates.rank_blocks(stats);
  // With both on, tokens that min_p drops count for the share of top_p.
  if (top_k && top_p) end = end_of_min_p(0.f);
#pragma unroll 1
  for (int step = 8; step <= 10; step++) {
    if (step == 8 ? !top_k : step == 9 ? !top_p : end <= end_of_10 && (top_k || top_p)) continue;
    if (step < 10) {
      const Amount amount = step == 8 ? TOKENS : MASS;
      u64 target = record.top_k, guess = end;
      if (step == 8) {
        guess = end = candidates.bound_tokens(record.top_k, end);
      } else {
        target = static_cast<u64>(ceil(record.top_p * static_cast<double>(total)));
        target = target ? target : 1;
        if (!top_k) guess = candidates.guess_mass(target, end);
      }
      const u64 last = candidates.select(amount, target, end, guess);
      end = step == 8 ? end_after(size_of(last)) : last + 1;  // top_k keeps ties
    }
    if (step == 10) end = end_of_10;
    total = candidates.sum_blocks(end);
  }
  return end;
}

// The race between blocks, then that between the tokens of the winner.
DEVICE int draw(const Candidates& candidates, const RandomNumbers& numbers, u64 end,
                int vocab_size) {
  u32 winner = 0;
#pragma unroll 1
  for (u32 purpose = FOR_BLOCK; purpose <= FOR_TOKEN; purpose++) {
    const u32 first = purpose == FOR_BLOCK ? 0 : winner * BLOCK;
    const u32 last = purpose == FOR_BLOCK ? candidates.num_blocks : min(first + BLOCK, vocab_size);
    double soonest = NEVER;
    winner = first;
#pragma unroll 1
    for (u32 lane = first + threadIdx.x; lane < last; lane += NUM_THREADS) {
      double weight;
      if (purpose == FOR_BLOCK) {
        weight = static_cast<double>(candidates.sums[lane]);
      } else {
        const u64 rank = rank_of(candidates.scale.size_at(candidates.logits.at(lane)), lane);
        weight = rank < end ? weight_of(rank) : 0.f;
      }
      if (!(weight > 0)) continue;
      const double time = numbers.exponential(purpose, lane) * reciprocal(weight);
      if (time < soonest) soonest = time, winner = lane;
    }
    winner = first_to_arrive(soonest, winner, candidates.scratch);
  }
  return static_cast<int>(winner);
}

// The first token of `block` with the largest logit.
DEVICE int first_largest(const Logits& logits, const Peak& peak, u64* scratch) {
  int first = logits.vocab_size;
  for (int i = threadIdx.x; i < BLOCK; i += NUM_THREADS) {
    const int id = peak.block * BLOCK + i;
    if (id < first && logits.at(id) == peak.logit) first = id;
  }
  return static_cast<int>(min_over_block(first, scratch));
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) draw_tokens(const Parameters p) {
  const int row = blockIdx.x, slot = p.slots[row];
  if (slot < 0) return;
  const SlotRecord& record = p.records[slot];
  const int length = p.lengths[row];
  DYNAMIC_SHARED(shared);
  const SharedParts parts(shared, p.num_blocks);
  u64* const scratch = parts.scratch;
  const float2* stats = p.stats + static_cast<i64>(row) * p.num_blocks;
  const bool greedy = record.temperature == 0.f;

  const Peak peak = find_peak(stats, p.num_blocks, scratch);
  RowReport report{0, peak.logit, greedy ? 1.f : record.temperature, 0.f, 0};
  if (!(peak.logit > -INFINITY_F)) {  // or NaN
    if (threadIdx.x == 0) {
      p.tokens[row] = peak.logit == -INFINITY_F ? NO_TOKEN : NAN_LOGITS;
      p.logprobs[row] = __uint_as_float(NAN_BITS);
      p.reports[row] = report;
    }
    return;
  }

  const Logits logits = adjusted_logits(p, row);
  int token;
  u64 kept_mass = 0;
  if (greedy) {
    token = first_largest(logits, peak, scratch);
    report.end = FINITE_END;
  } else {
    const Scale scale(peak.logit, record.temperature);
    Candidates candidates = parts.candidates(logits, scale, p.num_blocks);
    report.end = truncate(candidates, record, stats, p.vocab_size, kept_mass);
    const RandomNumbers numbers{record.seed, static_cast<u32>(length), record.sequence_index};
    token = draw(candidates, numbers, report.end, p.vocab_size);
  }

  float logprob = __uint_as_float(NAN_BITS);
  if (record.logprobs >= 0) {
    report.count = min(min(record.logprobs, p.max_logprobs), p.vocab_size);
    float logit;
    double total;
    if (reports_raw(record)) {
      const float2* raw_stats = p.raw_stats + static_cast<i64>(row) * p.num_blocks;
      const Adjustments done(record, length);
      report.peak = find_peak(raw_stats, p.num_blocks, scratch).logit;
      report.temperature = 1.f;
      total = total_weight(raw_stats, p.num_blocks, report.peak, scratch);
      report.end = FINITE_END;
      logit = raw_logits(p, row, done).at(token);
    } else {
      logit = logits.at(token);
      if (greedy) {
        total = total_weight(stats, p.num_blocks, peak.logit, scratch);
      } else {
        total = static_cast<double>(kept_mass) * FIXED_POINT_UNIT;
      }
    }
    report.log_total = logf(static_cast<float>(total));
    logprob = Scale(report.peak, report.temperature)(logit) - report.log_total;
  }
  if (threadIdx.x == 0) {
    p.tokens[row] = token;
    p.logprobs[row] = logprob;
    p.reports[row] = report;
    if (p.appends && length < p.history_stride) p.history[slot * p.history_stride + length] = token;
  }
}
