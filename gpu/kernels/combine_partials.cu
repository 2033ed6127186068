// combine_partials - merge the partial attention results of a row by their log-sum-exp.
//
// JOB. Attention over a set of keys that was cut in parts (the splits of decode_attention, a prefix
// that many rows share) is the average of the parts' normalized results, weighted by 2^lse of each:
//   out = sum_i 2^(lse_i - top) out_i / sum_i 2^(lse_i - top),   top = max_i lse_i
//
// LAYOUTS
//   partial_out    [num_partials, num_heads, D] float32
//   partial_lse    [num_partials, num_heads] float32, log2 units; -inf: a part without keys
//   partial_start  [rows + 1]: row r's partials are partial_start[r] .. partial_start[r + 1] - 1
//   out            [rows, num_heads, D]
// A row without partials is left alone: its out was written directly, or it is padding.
// Grid (num_heads / warps of a block, rounded up; rows).
//
// TILING. A warp for each row and head, so that a batch of 1 spreads over several multiprocessors
// and one of 256 still starts in one wave. A lane holds 4 elements of the head (8 of 256); at D = 64
// the halves of a warp take every other partial. The lse of 32 partials are read at once, one for
// each lane; their weights then go round by shuffle. The order of the sum depends on the number of
// partials alone.
//
// ROOFLINE. 4 D + 4 bytes for each partial and head, written just before and still in the L2:
// 16 partials of 32 heads, D = 128, are 262 KB. What counts is latency: two dependent loads before
// the data (partial_start, lse beside the data), some 2 us with the launch.
//
// Method: as in flash-decoding and cascade inference (Ye et al. 2024, "Cascade Inference").
#include "hardware.cuh"

struct Parameters {
  const float* partial_out;
  const float* partial_lse;
  const int* partial_start;
  TYPE* out;
  int num_heads;
  int unused;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

constexpr int D = HEAD_DIM;
constexpr int WARPS = NUM_THREADS / 32;
constexpr int VECTORS = (D + 127) / 128;         // float4 of a lane
constexpr int LANES = D / 4 / VECTORS;           // lanes that hold a head
constexpr int WAYS = LANES <= 16 ? 2 : 1;        // partials that a warp reads side by side
constexpr int UNROLLED = 8 / VECTORS;            // partials on their way at once

DEVICE void add(float4& sum, float weight, const float4& x) {
  sum.x += weight * x.x;
  sum.y += weight * x.y;
  sum.z += weight * x.z;
  sum.w += weight * x.w;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
  return x;
}

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) combine_partials(const Parameters p) {
  const int lane = threadIdx.x % 32, row = blockIdx.y;
  const int head = blockIdx.x * WARPS + threadIdx.x / 32;
  if (head >= p.num_heads) return;
  const int start = p.partial_start[row], end = p.partial_start[row + 1];
  if (start == end) return;

  const int way = lane / LANES, column = lane % LANES * 4;
  const bool active = way < WAYS;  // the other lanes only take part in shuffles
  float4 sums[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) sums[v] = make_float4(0.f, 0.f, 0.f, 0.f);
  float top = -INFINITY_F, total = 0.f;
#pragma unroll 1
  for (int first = start; first < end; first += 32) {
    const int count = min(32, end - first);
    const float lse =
        lane < count ? p.partial_lse[static_cast<i64>(first + lane) * p.num_heads + head]
                     : -INFINITY_F;
    const float new_top = fmaxf(top, warp_max(lse));
    if (new_top == -INFINITY_F) continue;  // no keys so far
    const float factor = exp2_approx(top - new_top), weight = exp2_approx(lse - new_top);
    top = new_top;
    total = total * factor + warp_sum(weight);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      sums[v].x *= factor;
      sums[v].y *= factor;
      sums[v].z *= factor;
      sums[v].w *= factor;
    }
#pragma unroll 1
    for (int i = 0; i < count; i += WAYS * UNROLLED) {
      float4 parts[UNROLLED][VECTORS];
      float weights[UNROLLED];
#pragma unroll
      for (int u = 0; u < UNROLLED; u++) {
        const int part = i + u * WAYS + way;
        weights[u] = __shfl_sync(ALL_LANES, weight, part % 32);
        if (part >= count) weights[u] = 0.f;
        const float* from =
            p.partial_out + (static_cast<i64>(first + part) * p.num_heads + head) * D + column;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
          if (active && part < count)
            parts[u][v] = *reinterpret_cast<const float4*>(from + v * LANES * 4);
          else
            parts[u][v] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
      for (int u = 0; u < UNROLLED; u++)
#pragma unroll
        for (int v = 0; v < VECTORS; v++) add(sums[v], weights[u], parts[u][v]);
    }
  }
  if constexpr (WAYS == 2) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      sums[v].x += __shfl_xor_sync(ALL_LANES, sums[v].x, 16);
      sums[v].y += __shfl_xor_sync(ALL_LANES, sums[v].y, 16);
      sums[v].z += __shfl_xor_sync(ALL_LANES, sums[v].z, 16);
      sums[v].w += __shfl_xor_sync(ALL_LANES, sums[v].w, 16);
    }
  }
  if (way > 0) return;
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  TYPE* to = p.out + (static_cast<i64>(row) * p.num_heads + head) * D + column;
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
    *reinterpret_cast<uint2*>(to + v * LANES * 4) =
        uint2{pack<TYPE>(sums[v].x * inverse, sums[v].y * inverse),
              pack<TYPE>(sums[v].z * inverse, sums[v].w * inverse)};
}
