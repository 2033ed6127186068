// Updates for callers that aren't C++: gpu/cpu/adapters.py.

#include "adapters.h"

using namespace trioserve::TRIOSERVE_ISA;

extern "C" {

int64_t TRIOSERVE_EXPORT(adapters_width)(int64_t max_rank) { return adapter_width(max_rank); }

// y += the updates of the first product of layer 0, by `threads` threads.
void TRIOSERVE_EXPORT(adapters_update)(int32_t threads, const AdapterStep* step, const bf16* x, int64_t inputs,
                     bf16* y, int64_t outputs, float* t, int64_t width) {
  Pool pool(threads);
  pool.run([&](const Team& team) {
    shrink(team, *step, 0, &AdapterLayer::qkv, x, inputs, t, width);
    team.barrier();
    expand(team, *step, 0, &AdapterLayer::qkv, t, width, y, outputs);
  });
}

}  // extern "C"
