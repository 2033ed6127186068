// What gpu/cpu/sampling.py calls.
#include <functional>

#include "memory.h"
#include "sampling.h"

namespace trioserve::TRIOSERVE_ISA {

struct SamplerHandle {
  SamplerHandle(int64_t vocab_size, int threads)
      : vocab_size(vocab_size),
        pool(threads),
        memory(Pages::kSmall),
        scratch(memory.take_bytes(draw_scratch_bytes(vocab_size) * threads)) {}

  // One row is done before another thread would have woken up.
  void run(int64_t rows, const std::function<void(const Team&)>& work) {
    if (rows > 1)
      pool.run(work);
    else
      work(Team(0, 1, nobody));
  }

  const int64_t vocab_size;
  Pool pool;
  Barrier nobody{1};
  Memory memory;
  void* scratch;
};

}  // namespace trioserve::TRIOSERVE_ISA

using namespace trioserve::TRIOSERVE_ISA;

extern "C" {

// Null if there is no memory, or no room for another thread.
SamplerHandle* TRIOSERVE_EXPORT(sampler_create)(int64_t vocab_size, int32_t threads) {
  try {
    return new SamplerHandle(vocab_size, threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void TRIOSERVE_EXPORT(sampler_destroy)(SamplerHandle* handle) { delete handle; }

void TRIOSERVE_EXPORT(sampler_draw)(SamplerHandle* handle, float* logits, int64_t rows, const Draw* draws,
                  const Change* changes, const Adjustment* adjustment, int32_t* tokens) {
  handle->run(rows, [&](const Team& team) {
    draw_tokens(team, logits, rows, handle->vocab_size, draws, changes, *adjustment, tokens,
                handle->scratch);
  });
}

void TRIOSERVE_EXPORT(sampler_report)(SamplerHandle* handle, const float* logits, const Report* reports,
                    int64_t num_reports, int64_t most, float* normalizers, int32_t* ids,
                    float* logprobs, int32_t* found) {
  handle->run(num_reports, [&](const Team& team) {
    report_rows(team, logits, handle->vocab_size, reports, num_reports, most, normalizers, ids,
                logprobs, found);
  });
}

}  // extern "C"
