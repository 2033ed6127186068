// scan_logits.cu - the sampler's one pass over all logits. It adjusts them (steps 2 to 4 of
// trioserve/protocol/sampling.py: bias, penalties, masked stop ids), and leaves for every block of
// 128 tokens the largest logit and the sum of exp((x - largest) / temperature).
//
// These statistics are all that a plain draw needs, and tell a truncated one which few blocks to
// look at. Rows that report raw log-probabilities get the same of their unmodified logits, with
// temperature 1. "Online softmax" (Milakov and Gimelshein 2018, arXiv:1805.02867) in its blocked
// form: every block has a maximum of its own, so nothing waits for the row's.
//
// What mark_tokens.cu marked is adjusted in float64, each step rounded to float32 as in
// gpu/sampling/sampler.py, written back, and its mark cleared; in rows that report raw
// log-probabilities the raw logit takes the mark's place until top_logprobs.cu. Other rows don't
// read their marks.
//
// Tiling: grid (ceil(num_blocks / BLOCKS_PER_GROUP), rows), 4 warps. A warp has PER_WARP blocks of
// tokens in flight, four logits a lane and block, and reduces each over its lanes in a fixed order:
// no shared memory, no barrier. A block that holds a NaN has the largest NaN.
//
// Bytes: the logits once; 8 of 512 bytes are written; the marks of rows that have any, as many
// again. 256 rows of 128,256 are 131 MB: 31 us on an H200 at 4.3 TB/s, 62 us if all have penalties;
// about 45 instructions per warp and block are 20 us of issue beside it. One row is 63 thread
// blocks and latency: 3.5 us.
#include "sampling.cuh"
#include "vectors.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(BLOCKS_PER_GROUP % NUM_WARPS == 0);
constexpr int PER_WARP = BLOCKS_PER_GROUP / NUM_WARPS;

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

// Steps 2 to 4 for one token.
DEVICE float adjust(float x, int token, u32 mark, const SlotRecord& record,
                    const Adjustments& todo) {
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
  return mark & IS_MASKED ? -INFINITY_F : x;
}

// Adjusts the four tokens from `first` on, in x and in memory. Marks are as wide as the padded row.
DEVICE void adjust4(float (&x)[4], int first, const Parameters& p, int row,
                    const SlotRecord& record, const Adjustments& todo, bool raw_wanted) {
  if (first >= p.vocab_size) return;
  u32* const marks = p.marks + row * p.marks_stride + first;
  const uint4 four = *reinterpret_cast<const uint4*>(marks);
  const u32 mark[4] = {four.x, four.y, four.z, four.w};
  if (!(four.x | four.y | four.z | four.w)) return;
  for (int i = 0; i < 4; i++) {
    if (!mark[i]) continue;
    marks[i] = raw_wanted ? keep_raw(x[i]) : 0;
    x[i] = adjust(x[i], first + i, mark[i], record, todo);
    p.logits[row * p.logits_stride + first + i] = x[i];
  }
}

// (largest, sum of 2^((x - largest) * scale)) over the four numbers of all lanes.
DEVICE float2 summarize(const float (&x)[4], float scale, bool want_sum) {
  const float largest = max_over_lanes<32>(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
  const bool nan = x[0] != x[0] || x[1] != x[1] || x[2] != x[2] || x[3] != x[3];
  if (__any_sync(ALL_LANES, nan)) return {__uint_as_float(NAN_BITS), 0.f};
  float sum = 0.f;
  if (want_sum && largest > -INFINITY_F) {
    // The largest may be infinite: its weight is 1 all the same.
    for (int i = 0; i < 4; i++) {
      sum += x[i] == largest ? 1.f : exp2_approx((x[i] - largest) * scale);
    }
    sum = sum_over_lanes<32>(sum);
  }
  return {largest, sum};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) scan_logits(const Parameters p) {
  const int row = blockIdx.y, slot = p.slots[row], lane = threadIdx.x % 32;
  if (slot < 0) return;
  const SlotRecord& record = p.records[slot];
  const Logits logits = adjusted_logits(p, row);
  const int first_block = (blockIdx.x * NUM_WARPS + threadIdx.x / 32) * PER_WARP;
  float x[PER_WARP][4];
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) logits.load4((first_block + i) * BLOCK + lane * 4, x[i]);

  const Adjustments todo(record, p.lengths[row]);
  const bool greedy = record.temperature == 0.f, raw_wanted = reports_raw(record);
  const bool want_sum = !greedy || (record.logprobs >= 0 && record.processed_logprobs);
  const float scale = greedy ? LOG2_E : LOG2_E / record.temperature;
  const i64 stats = static_cast<i64>(row) * p.num_blocks + first_block;
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    if (first_block + i >= p.num_blocks) return;
    const int first = (first_block + i) * BLOCK + lane * 4;
    if (raw_wanted) {
      const float2 raw = summarize(x[i], LOG2_E, true);
      if (lane == 0) p.raw_stats[stats + i] = raw;
    }
    if (todo.any()) adjust4(x[i], first, p, row, record, todo, raw_wanted);
    logits.shift4(first, x[i]);
    const float2 adjusted = summarize(x[i], scale, want_sum);
    if (lane == 0) p.stats[stats + i] = adjusted;
  }
}
