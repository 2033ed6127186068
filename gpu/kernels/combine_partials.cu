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
// Grid (num_heads * D / 4 / threads of a block, rounded up; rows).
//
// TILING. A thread for each row and 4 elements of a head, so that a batch of 1 spreads over several
// multiprocessors and one of 256 still starts in one wave. A thread reads BATCH partials and their
// lse at once, with nothing to wait for in between, then the next BATCH. Threads have nothing to
// tell each other: those of a head compute the same weights, which costs less than a shuffle. The
// order of the sum depends on the number of partials alone.
//
// ROOFLINE. 4 D + 4 bytes for each partial and head, written just before and still in the L2:
// 16 partials of 32 heads, D = 128, are 262 KB. What counts is latency: partial_start, then one
// round of loads for each BATCH, 0.3 us each on an H200; 2 us with the launch.
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
constexpr int BATCH = 16;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) combine_partials(const Parameters p) {
  const int row = blockIdx.y;
  const int vector = blockIdx.x * NUM_THREADS + threadIdx.x;  // of a row's float4
  const int head = vector / (D / 4);
  if (head >= p.num_heads) return;
  const int start = p.partial_start[row], end = p.partial_start[row + 1];
  if (start == end) return;

  const u32 vectors = p.num_heads * (D / 4);  // float4 of a partial
  const float4* from = reinterpret_cast<const float4*>(p.partial_out) +
                       static_cast<u64>(start) * vectors + vector;
  const float* lse_from = p.partial_lse + static_cast<u64>(start) * p.num_heads + head;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  float top = -INFINITY_F, total = 0.f;
#pragma unroll 1
  for (int left = end - start; left > 0; left -= BATCH) {
    float4 parts[BATCH];
    float lse[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      parts[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      lse[i] = -INFINITY_F;
      if (static_cast<int>(i) < left) {
        parts[i] = from[i * vectors];
        lse[i] = lse_from[i * p.num_heads];
      }
    }
    from += BATCH * vectors;
    lse_from += BATCH * p.num_heads;
    const float old_top = top;
#pragma unroll
    for (int i = 0; i < BATCH; i++) top = fmaxf(top, lse[i]);
    const float reference = top == -INFINITY_F ? 0.f : top;  // no keys so far: all weights are 0
    const float factor = exp2_approx(old_top - reference);
    total *= factor;
    sum.x *= factor;
    sum.y *= factor;
    sum.z *= factor;
    sum.w *= factor;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const float weight = exp2_approx(lse[i] - reference);
      total += weight;
      sum.x += weight * parts[i].x;
      sum.y += weight * parts[i].y;
      sum.z += weight * parts[i].z;
      sum.w += weight * parts[i].w;
    }
  }
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  uint2* to = reinterpret_cast<uint2*>(p.out) + static_cast<u64>(row) * vectors + vector;
  *to = uint2{pack<TYPE>(sum.x * inverse, sum.y * inverse),
              pack<TYPE>(sum.z * inverse, sum.w * inverse)};
}
