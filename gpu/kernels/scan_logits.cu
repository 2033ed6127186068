// scan_logits.cu - the sampler's one pass over all logits: for every block of 128 tokens the largest
// logit and the sum of exp((x - largest) / temperature).
//
// That is all that a plain draw needs, and tells a truncated one which few blocks to look at. Rows
// that report raw log-probabilities get the same of their unmodified logits, with temperature 1.
// "Online softmax" (Milakov and Gimelshein 2018, arXiv:1805.02867) in its blocked form: every block
// has a maximum of its own, so nothing waits for the row's.
//
// Tiling: grid (ceil(num_blocks / BLOCKS_PER_GROUP), rows), 4 warps. A warp has PER_WARP blocks of
// tokens in flight, four logits a lane and block, and reduces each over its lanes in a fixed order:
// no shared memory, no barrier. A block that holds a NaN has the largest NaN.
//
// Bytes: the logits once; 8 of 512 bytes are written. 256 rows of 128,256 are 131 MB: 31 us on an
// H200 at 4.3 TB/s; about 45 instructions per warp and block are 20 us of issue beside it. One row is
// 63 thread blocks and latency: 3 us.
#include "sampling.cuh"
#include "vectors.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(BLOCKS_PER_GROUP % NUM_WARPS == 0);
constexpr int PER_WARP = BLOCKS_PER_GROUP / NUM_WARPS;

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

DEVICE void scan(const Logits& logits, float2* stats, int num_blocks, float scale, bool want_sum) {
  const int lane = threadIdx.x % 32;
  const int first = (blockIdx.x * NUM_WARPS + threadIdx.x / 32) * PER_WARP;
  float x[PER_WARP][4];
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) logits.load4((first + i) * BLOCK + lane * 4, x[i]);
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    if (first + i < num_blocks) {
      const float2 summary = summarize(x[i], scale, want_sum);
      if (lane == 0) stats[first + i] = summary;
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) scan_logits(const Parameters p) {
  const int row = blockIdx.y, slot = p.slots[row];
  if (slot < 0) return;
  const SlotRecord& record = p.records[slot];
  const i64 stats = static_cast<i64>(row) * p.num_blocks;
  const bool greedy = record.temperature == 0.f;
  const bool want_sum = !greedy || (record.logprobs >= 0 && p.processed_logprobs);
  const float scale = greedy ? LOG2_E : LOG2_E / record.temperature;
  scan(adjusted_logits(p, row), p.stats + stats, p.num_blocks, scale, want_sum);
  if (reports_raw(p, record)) {
    const Adjustments done(record, p.lengths[row]);
    scan(raw_logits(p, row, done), p.raw_stats + stats, p.num_blocks, LOG2_E, true);
  }
}
