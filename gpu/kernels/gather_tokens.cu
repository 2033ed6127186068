// gather_tokens.cu - the input tokens of a step, out of the tokens that the device remembers.
//
// The sampler appends each token to its slot's row of `history`, so a plan can name a token, by slot
// and position, that the host has not seen yet. Padding (a negative slot) and an unusable draw (a
// negative token) become token 0, which the embedding has; what is computed from them is dropped.
//
// One thread per token. 20 bytes a token: the launch is all of its time (about 2 us).
#include "hardware.cuh"

struct Parameters {
  const int* history;         // [num_slots, history_stride]
  const int* slots_of_token;  // [num_tokens]; negative: padding
  const int* positions;       // [num_tokens]
  i64* tokens;                // [num_tokens]
  int history_stride;
  int num_tokens;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gather_tokens(Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i >= p.num_tokens) return;
  const int slot = p.slots_of_token[i];
  int token = 0;
  if (slot >= 0) token = p.history[static_cast<i64>(slot) * p.history_stride + p.positions[i]];
  p.tokens[i] = max(token, 0);
}
