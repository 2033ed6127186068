// rms_norm.cu - y = x * weight / sqrt(mean(x^2) + eps) for each token, optionally after adding x to
// the residual stream.
//
// Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467). x, residual and y are [T,
// hidden] of ELEMENT. With ADD the residual becomes residual + x, rounded to ELEMENT as it is kept,
// and what is normed is that rounded sum. Sums are float32; y is rounded once.
//
// Tiling: one block per token. A thread loads up to VECTORS vectors of 8 elements and keeps them,
// packed, in registers from the sum of the squares to the result, so that every byte is read once.
// All loads, those of the weights too, are issued before anything is waited for.
//
// Bytes: 2 per element for each of x, residual in and out, and y, so with ADD 8 per element: 8192
// tokens of 4096 are 268 MB, 62 us on an H200 at 4.3 TB/s; 31 us without. Memory bounds it; several
// blocks share a multiprocessor, so one loads while another sums. For a few tokens it is the
// latency of one load and one reduction, about 2 us.
#include "vectors.cuh"

struct Parameters {
  const ELEMENT* x;       // [T, hidden]
  ELEMENT* residual;      // [T, hidden]; with ADD only
  const ELEMENT* weight;  // [hidden]
  ELEMENT* y;             // [T, hidden]
  int num_vectors;        // hidden / 8, hidden at most MAX_HIDDEN
  float inverse_size;     // 1 / hidden
  float eps;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

constexpr int VECTORS = MAX_HIDDEN / (NUM_THREADS * VECTOR);
constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(NUM_THREADS % 32 == 0 && (NUM_WARPS & (NUM_WARPS - 1)) == 0);

// The sum of every thread's number, the same bits in each thread.
DEVICE float sum_over_block(float x) {
  SHARED(float, of_warp, NUM_WARPS);
  x = sum_over_lanes<32>(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_over_lanes<NUM_WARPS>(of_warp[threadIdx.x % NUM_WARPS]);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) rms_norm(Parameters p) {
  const i64 row = static_cast<i64>(blockIdx.x) * p.num_vectors * VECTOR;
  uint4 kept[VECTORS], residual[VECTORS], weight[VECTORS];

#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = threadIdx.x + v * NUM_THREADS;
    kept[v] = residual[v] = weight[v] = make_uint4(0, 0, 0, 0);
    if (at < p.num_vectors) {
      kept[v] = load_once16(p.x + row + at * VECTOR);
      if (ADD) residual[v] = load16(p.residual + row + at * VECTOR);
    }
  }
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = threadIdx.x + v * NUM_THREADS;
    if (at < p.num_vectors) weight[v] = load16(p.weight + at * VECTOR);
  }

  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = threadIdx.x + v * NUM_THREADS;
    float x[VECTOR], onto[VECTOR];
    unpack8<ELEMENT>(kept[v], x);
    if constexpr (ADD) {
      unpack8<ELEMENT>(residual[v], onto);
      for (int i = 0; i < VECTOR; i++) x[i] += onto[i];
      kept[v] = pack8<ELEMENT>(x);
      unpack8<ELEMENT>(kept[v], x);  // rounded, as the residual is kept
      if (at < p.num_vectors) store16(p.residual + row + at * VECTOR, kept[v]);
    }
    sum += sum_of_squares(x);
  }
  const float scale = rsqrt_approx(sum_over_block(sum) * p.inverse_size + p.eps);

#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = threadIdx.x + v * NUM_THREADS;
    float x[VECTOR], w[VECTOR];
    unpack8<ELEMENT>(kept[v], x);
    unpack8<ELEMENT>(weight[v], w);
    for (int i = 0; i < VECTOR; i++) x[i] *= scale * w[i];
    if (at < p.num_vectors) store16(p.y + row + at * VECTOR, pack8<ELEMENT>(x));
  }
}
