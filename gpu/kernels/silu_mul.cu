// silu_mul.cu - y = silu(gate) * up, the gate of a SwiGLU layer (Shazeer 2020, arXiv:2002.05202).
//
// A row of gate_up is a token's inner_size gates and then its inner_size up-projections, of ELEMENT;
// y is [T, inner_size]. silu(x) = x / (1 + exp(-x)), in float32, rounded once.
//
// Tiling: a block is one token (x) and a piece of its row (y). A thread has VECTORS vectors of 8
// gates and their partners, all loaded before the first is used.
//
// Bytes: 4 in and 2 out per element, with 2 special-function operations: 8192 tokens of 14336 are
// 705 MB, 164 us on an H200 at 4.3 TB/s; the special-function units are busy for 63 us of that (16
// operations per clock and multiprocessor). Memory bounds it.
#include "vectors.cuh"

struct Parameters {
  const ELEMENT* gate_up;  // [T, 2 inner_size]
  ELEMENT* y;              // [T, inner_size]
  int num_vectors;         // inner_size / 8
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float silu(float x) { return x * reciprocal_approx(1.f + exp2_approx(-LOG2_E * x)); }

extern "C" __global__ void __launch_bounds__(NUM_THREADS) silu_mul(Parameters p) {
  const i64 token = blockIdx.x;
  const ELEMENT* const gates = p.gate_up + token * 2 * p.num_vectors * VECTOR;
  const ELEMENT* const ups = gates + p.num_vectors * VECTOR;
  ELEMENT* const out = p.y + token * p.num_vectors * VECTOR;
  const int begin = blockIdx.y * (NUM_THREADS * VECTORS) + threadIdx.x;

  uint4 gate[VECTORS], up[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = begin + v * NUM_THREADS;
    if (at < p.num_vectors) {
      gate[v] = load_once16(gates + at * VECTOR);
      up[v] = load_once16(ups + at * VECTOR);
    }
  }
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = begin + v * NUM_THREADS;
    if (at >= p.num_vectors) continue;
    float x[VECTOR], by[VECTOR];
    unpack8<ELEMENT>(gate[v], x);
    unpack8<ELEMENT>(up[v], by);
    for (int i = 0; i < VECTOR; i++) x[i] = silu(x[i]) * by[i];
    store16(out + at * VECTOR, pack8<ELEMENT>(x));
  }
}
