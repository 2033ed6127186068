// planted.cu - faults that compute-sanitizer must report: one kernel for each of its tools.
#include "hardware.cuh"

struct Parameters {
  const void* a;
  void* out;
  int num;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

// memcheck: a store right behind the end of out [num].
extern "C" __global__ void __launch_bounds__(NUM_THREADS) planted_overflow(const Parameters p) {
  if (threadIdx.x == 0) static_cast<float*>(p.out)[p.num] = 1.0f;
}

// racecheck: a warp reads what another warp writes, with no barrier in between.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) planted_race(const Parameters p) {
  SHARED(float, shared, NUM_THREADS);
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  static_cast<float*>(p.out)[threadIdx.x] = shared[NUM_THREADS - 1 - threadIdx.x];
}

// synccheck: a lane waits for a set of lanes that it doesn't belong to.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) planted_barrier(const Parameters p) {
  if (threadIdx.x < 16) __syncwarp(0xff);
  static_cast<float*>(p.out)[threadIdx.x] = 0.0f;
}

// initcheck: a [NUM_THREADS], which was never written, is read.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) planted_gap(const Parameters p) {
  static_cast<float*>(p.out)[threadIdx.x] = static_cast<const float*>(p.a)[threadIdx.x];
}
