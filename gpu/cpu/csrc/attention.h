// Causal attention of a step's queries over their rows' keys in the paged cache.
//
// A query sees the positions up to its own (and with a window, so many of them). Positions are cut
// into blocks of 256, from the sequence's first one on. A block's part is computed by itself, and
// the parts are merged in the order of positions; so what a query gets depends on its own row and
// nothing else, neither on the batch nor on how a prompt is cut into chunks nor on the threads.
//
// The work of a step is cut into items, each some queries with one key head and all blocks of keys,
// or where there would be too few items for the threads, some of the blocks. The queries are of one
// row, or of several that have one query each and begin with the same pages: the keys of such a
// shared prefix are read once for all of them. Threads take items as they come.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "kv_cache.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// The items of a step's layers that have one window. It lies in memory that the caller owns.
struct AttentionPlan;

// Bytes that a plan needs for steps of up to max_tokens tokens, on a team of so many threads.
int64_t attention_plan_bytes(const AttentionShape& shape, int64_t max_tokens, int threads);

// Plans a step: once for all layers that have this window, by one thread, between two barriers.
// `window` is how many positions a query sees, its own included; 0: all. `memory` is aligned to 64
// bytes. The plan keeps no pointer to `shape` or `step`.
AttentionPlan* plan_attention(const AttentionShape& shape, const AttentionStep& step,
                              int64_t window, int threads, void* memory);

// Bytes that attend() needs for itself, aligned to 64; the same memory serves all layers.
int64_t attention_scratch_bytes(const AttentionShape& shape, int threads);

// One layer, with its `pages` of the cache. `q` has a token's queries, num_heads * head_dim numbers, every q_stride numbers; `out`
// is [num_tokens, num_heads * head_dim]. `plan` is of this step and the layer's window. Between one
// call and the next over the same plan or scratch there must be a barrier; none is inside.
void attend(const Team& team, const AttentionShape& shape, const AttentionStep& step,
            AttentionPlan& plan, const bf16* pages, const bf16* q, int64_t q_stride, bf16* out,
            void* scratch);

}  // namespace trioserve::TRIOSERVE_ISA
