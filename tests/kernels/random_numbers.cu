// random_numbers - what philox.cuh gives, for a comparison with gpu/sampling/philox.py bit for bit.
#include "philox.cuh"

struct Parameters {
  const u64* seeds;
  const u32* positions;
  const u32* sequence_indices;
  const u32* purposes;
  const u32* lanes;
  double* uniforms;
  double* exponentials;
  int num;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

extern "C" __global__ void __launch_bounds__(NUM_THREADS) random_numbers(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i >= p.num) return;
  const RandomNumbers numbers{p.seeds[i], p.positions[i], p.sequence_indices[i]};
  p.uniforms[i] = numbers.uniform(p.purposes[i], p.lanes[i]);
  p.exponentials[i] = numbers.exponential(p.purposes[i], p.lanes[i]);
}
