// What gpu/cpu/attention.py calls: one step's attention by itself, on a pool of its own.
#include <cstdlib>
#include <memory>
#include <new>

#include "attention_plan.h"
#include "rope.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<void, Free>;

// Uninitialized memory for what asks for an alignment of 64.
Bytes allocate(int64_t bytes) { return Bytes(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

}  // namespace

struct AttentionHandle {
  AttentionHandle(const AttentionShape& shape, int64_t max_tokens, int threads)
      : shape(shape),
        pool(threads),
        plan(allocate(attention_plan_bytes(shape, max_tokens, threads))),
        scratch(allocate(attention_scratch_bytes(shape, threads))) {}

  const AttentionShape shape;
  Pool pool;
  Bytes plan, scratch;
};

}  // namespace trioserve::TRIOSERVE_ISA

using namespace trioserve::TRIOSERVE_ISA;

extern "C" {

// Null if there is no memory for it.
AttentionHandle* TRIOSERVE_EXPORT(attention_create)(const AttentionShape* shape, int64_t max_tokens,
                                  int32_t threads) {
  try {
    auto* handle = new AttentionHandle(*shape, max_tokens, threads);
    if (handle->plan && handle->scratch) return handle;
    delete handle;
  } catch (const std::exception&) {
  }
  return nullptr;
}

void TRIOSERVE_EXPORT(attention_destroy)(AttentionHandle* handle) { delete handle; }

void TRIOSERVE_EXPORT(attention_rope_and_write)(AttentionHandle* handle, const AttentionStep* step,
                              const float* cos_sin, const bf16* norm_weight, float eps, bf16* qkv,
                              bf16* pages) {
  handle->pool.run([&](const Team& team) {
    rope_and_write(team, handle->shape, *step, cos_sin, {norm_weight, eps}, qkv, pages);
  });
}

// As many layers as in a model, one after the other, with the same queries.
void TRIOSERVE_EXPORT(attention_attend)(AttentionHandle* handle, const AttentionStep* step, int64_t window,
                      int64_t num_layers, const bf16* const* pages, const bf16* q,
                      int64_t q_stride, bf16* out) {
  AttentionPlan* plan = plan_attention(handle->shape, *step, window, handle->pool.size(),
                                       handle->plan.get());
  handle->pool.run([&](const Team& team) {
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      attend(team, handle->shape, *step, *plan, pages[layer], q, q_stride, out,
             handle->scratch.get());
      team.barrier();
    }
  });
}

// For each of the step's queries, tile by tile: its row, the first query of its tile, and the position
// below which all of the tile read the same pages. It is the plan for one thread, which splits none.
void TRIOSERVE_EXPORT(attention_tiles)(AttentionHandle* handle, const AttentionStep* step, int64_t window,
                     int32_t (*tiles)[3]) {
  const AttentionPlan* plan = plan_attention(handle->shape, *step, window, 1, handle->plan.get());
  const int64_t items = plan->num_tickets / Tiling(handle->shape).units;
  for (int64_t i = 0; i < items; ++i) {
    const AttentionItem& item = plan->items[i];
    for (int32_t q = item.first_query; q < item.first_query + item.num_queries; ++q) {
      tiles[q][0] = plan->queries[q].row;
      tiles[q][1] = item.first_query;
      tiles[q][2] = item.shared;
    }
  }
}

}  // extern "C"
