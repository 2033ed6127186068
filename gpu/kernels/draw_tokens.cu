// draw_tokens.cu - steps 5 to 10 of trioserve/sampling.py: one token for every row.
//
// From the blocks' statistics that scan_logits.cu left. A greedy row takes the first largest logit.
// For the others, candidates.cuh finds where top_k and top_p cut, as the `end` of the kept ranks;
// min_p is a least weight beside it. Then two exponential races are run (see trioserve/sampling.py),
// between the blocks by the sums of their kept tokens and between the tokens of the winner. The
// token is appended to the slot's history, where the next step finds it.
//
// No sort of the vocabulary and no look at most of it: the k-th largest of the blocks' maxima bounds
// the k-th largest logit, and the blocks' maxima alone often hold top_p's share. Compare "sorting-free
// sampling" by rejection (FlashInfer, Ye et al. 2025, arXiv:2501.01005): there each round draws anew;
// here the draw is one race, so that the random numbers are the reference's.
//
// Tiling: one thread block per row. Shared memory: the blocks' ranks and sums, a list of
// LIST_CAPACITY candidates, sums over them or over intervals.
//
// Bytes: 8 per 128 tokens always; 512 for each block that may hold a kept token: about k of them for
// top_k. Where the kept tokens don't fit the list (a flat distribution), four passes over such a row
// instead. 256 plain rows of 128,256 are 2 MB; latency bounds them: expected on an H200 5 us plain or
// greedy, 9 us with top_k or top_p, and 40 us for one flat row or 150 us for 256.
#include "candidates.cuh"
#include "philox.cuh"

// Smaller weights than a normal float holds count as none.
constexpr float SMALLEST_WEIGHT = 0x1p-126f;

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
      sum += static_cast<double>(block.y) * (block.x == peak ? 1.f : expf(block.x - peak));
    }
  }
  return sum_over_block(sum, scratch);
}

// The smallest of the times of all threads' candidates, the first of equals: its `id`.
DEVICE int first_to_arrive(double time, u32 id, u64* scratch) {
  const u64 bits = static_cast<u64>(__double_as_longlong(time));  // ordered, for no time is negative
  const u64 least = min_over_block(bits, scratch);
  return static_cast<int>(min_over_block(bits == least ? id : ~0ull, scratch));
}

// 1 / x for a normal float's range: two Newton steps from a float's, good to a few units in the last
// place. A division's rare branches cost more registers than the whole race.
DEVICE double reciprocal(double x) {
  double y = reciprocal_approx(static_cast<float>(x));
  y = y * (2.0 - x * y);
  return y * (2.0 - x * y);
}

constexpr double NEVER = 0x1p1023;  // not infinite: a candidate of weight 0 may not win

struct Kept {
  u64 end;
  float least_weight;
};

// Steps 7 to 9: which tokens are kept; sums[b] becomes the weight of those of block b.
DEVICE Kept truncate(Candidates& candidates, const SlotRecord& record, const float2* stats,
                     u64* sums, int vocab_size) {
  const int num_blocks = candidates.num_blocks;
  const bool top_k = record.top_k < vocab_size, top_p = record.top_p < 1.0;
  const float least_weight = fmaxf(record.min_p, SMALLEST_WEIGHT);
  // The weight of each whole block, and of all.
  __syncthreads();
  u64 total = 0;
  for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) {
    const float2 block = stats[b];
    const float weight = weight_of(rank_of(candidates.scale.size_at(block.x), 0));
    sums[b] = block.x > -INFINITY_F ? fixed_point(block.y * weight) : 0;
    total += sums[b];
  }
  if (!top_k && !top_p && record.min_p == 0.f) {
    __syncthreads();
    return {FINITE_END, least_weight};
  }
  total = sum_over_block(total, candidates.scratch);
  candidates.rank_blocks(stats);

  u64 end = FINITE_END;
  if (record.min_p > 0.f && !(top_k && top_p)) {
    // A little past min_p; the weights themselves are compared in the end. Only where both others
    // are on, tokens below count, for the share of top_p.
    end = end_after(__float_as_uint(-logf(record.min_p) * 1.0001f + 0.0001f) & 0x7fffffffu);
  }
  if (top_k) {
    if (record.top_k <= num_blocks) {
      const u32 bound = size_of(candidates.blocks[record.top_k - 1]);
      if (bound < INFINITE && end_after(bound) < end) end = end_after(bound);
    }
    end = end_after(size_of(candidates.select<COUNT>(record.top_k, end)));
  }
  if (top_p) {
    const u64 whole = top_k ? candidates.mass_before(end) : total;
    const u64 target = static_cast<u64>(ceil(record.top_p * static_cast<double>(whole)));
    u64 bound = end;
    if (!top_k) bound = candidates.bound_mass(target, end);
    end = candidates.select<MASS>(target ? target : 1, bound) + 1;
  }
  candidates.sum_blocks(sums, end, least_weight);
  return {end, least_weight};
}

// The race between blocks, then that between the tokens of the winner.
DEVICE int draw(const Candidates& candidates, const RandomNumbers& numbers, const u64* sums,
                const Kept& kept, int vocab_size) {
  double soonest = NEVER;
  u32 winner = 0;
#pragma unroll 1
  for (int b = threadIdx.x; b < candidates.num_blocks; b += NUM_THREADS) {
    if (sums[b] == 0) continue;
    const double time = numbers.exponential(FOR_BLOCK, b) * reciprocal(static_cast<double>(sums[b]));
    if (time < soonest) soonest = time, winner = b;
  }
  const int block = first_to_arrive(soonest, winner, candidates.scratch);
  soonest = NEVER, winner = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < BLOCK; i += NUM_THREADS) {
    const int id = block * BLOCK + i;
    if (id >= vocab_size) continue;
    const u64 rank = rank_of(candidates.scale.size_at(candidates.logits.at(id)), id);
    const float weight = weight_of(rank);
    if (rank >= kept.end || weight < kept.least_weight) continue;
    const double time = numbers.exponential(FOR_TOKEN, id) * reciprocal(weight);
    if (time < soonest) soonest = time, winner = id;
  }
  return first_to_arrive(soonest, winner, candidates.scratch);
}

// The first token of `block` whose logit is the largest.
DEVICE int first_largest(const Logits& logits, const Peak& peak, u64* scratch) {
  int first = logits.vocab_size;
  for (int i = threadIdx.x; i < BLOCK; i += NUM_THREADS) {
    const int id = peak.block * BLOCK + i;
    if (id < first && logits.at(id) == peak.logit) first = id;
  }
  return static_cast<int>(min_over_block(first, scratch));
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) draw_tokens(const Parameters p) {
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
  RowReport report{0, peak.logit, greedy ? 1.f : record.temperature, 0.f, 0.f, 0};
  if (!(peak.logit > -INFINITY_F)) {  // or NaN
    if (threadIdx.x == 0) {
      p.tokens[row] = -1;
      p.logprobs[row] = __uint_as_float(NAN_BITS);
      p.reports[row] = report;
    }
    return;
  }

  const Logits logits = adjusted_logits(p, row);
  int token;
  if (greedy) {
    token = first_largest(logits, peak, scratch);
    report.end = FINITE_END;
  } else {
    Candidates candidates = parts.candidates(logits, Scale(peak.logit, record.temperature), p.num_blocks);
    const Kept kept = truncate(candidates, record, stats, parts.sums, p.vocab_size);
    const RandomNumbers numbers{record.seed, static_cast<u32>(length), record.sequence_index};
    token = draw(candidates, numbers, parts.sums, kept, p.vocab_size);
    report.end = kept.end, report.least_weight = kept.least_weight;
  }

  float logprob = __uint_as_float(NAN_BITS);
  if (record.logprobs >= 0) {
    report.count = min(min(record.logprobs, p.max_logprobs), p.vocab_size);
    float logit;
    double total;
    if (reports_raw(p, record)) {
      const float2* raw_stats = p.raw_stats + static_cast<i64>(row) * p.num_blocks;
      const Adjustments done(record, length);
      report.peak = find_peak(raw_stats, p.num_blocks, scratch).logit;
      report.temperature = 1.f;
      total = total_weight(raw_stats, p.num_blocks, report.peak, scratch);
      report.end = FINITE_END, report.least_weight = 0.f;
      logit = raw_logits(p, row, done).at(token);
    } else {
      logit = logits.at(token);
      if (greedy) {
        total = total_weight(stats, p.num_blocks, peak.logit, scratch);
      } else {
        u64 sum = 0;
        for (int b = threadIdx.x; b < p.num_blocks; b += NUM_THREADS) sum += parts.sums[b];
        total = static_cast<double>(sum_over_block(sum, scratch)) * 0x1p-44;
      }
    }
    report.log_total = logf(static_cast<float>(total));
    logprob = Scale(report.peak, report.temperature)(logit) - report.log_total;
  }
  if (threadIdx.x == 0) {
    p.tokens[row] = token;
    p.logprobs[row] = logprob;
    p.reports[row] = report;
    if (length < p.history_stride) p.history[slot * p.history_stride + length] = token;
  }
}
