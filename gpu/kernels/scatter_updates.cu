// scatter_updates.cu - change single numbers of the device's block tables and token history.
//
// The host keeps the same tables; what a plan changes of them travels as (index, value) pairs in the
// step's one upload, and this writes them: arena[index] = value for the first *num_updates pairs. No
// index may come twice, for the order of writes is undefined.
//
// A fixed number of threads share the pairs, so that a captured launch fits any number of them.
// 12 bytes a pair: up to some thousand pairs the launch is all of its time (about 2 us).
#include "hardware.cuh"

struct Parameters {
  int* arena;
  const uint2* updates;    // [max_updates] pairs of index (x) and value (y)
  const int* num_updates;  // one number on the device
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

extern "C" __global__ void __launch_bounds__(NUM_THREADS) scatter_updates(Parameters p) {
  const int count = *p.num_updates;
  for (int i = blockIdx.x * NUM_THREADS + threadIdx.x; i < count; i += gridDim.x * NUM_THREADS) {
    const uint2 update = p.updates[i];
    p.arena[update.x] = static_cast<int>(update.y);
  }
}
