// The work of one step, cut into items: see attention.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention.h"

namespace trioserve::TRIOSERVE_ISA {

// Keys of one block, and of the groups in which they stand in the cache.
inline constexpr int kKeyBlock = 256;
inline constexpr int kGroup = 16;
// Pairs of a query and a head that are computed together: a tile. They share the keys they load. A matrix
// unit takes 16 of them at a time, so it has 32.
inline constexpr int kVectorRows = 24, kTileRows = 32;
// Those of a tile with the current extension.
int tile_rows();
// Room for the parts of rows with blocks in several items.
inline constexpr int64_t kMaxParts = 8192;

// How the heads and queries of a shape make tiles.
struct Tiling {
  int heads;   // of a group that one tile has
  int units;   // tiles that cover all heads of a token: key heads, times pieces of a large group
  int tokens;  // of a tile

  explicit Tiling(const AttentionShape& shape)
      : heads(std::min(shape.group(), tile_rows())),
        units(shape.num_kv_heads * ((shape.group() + heads - 1) / heads)),
        tokens(tile_rows() / heads) {}
};

// A token of the step, with all of its heads' queries.
struct AttentionQuery {
  int32_t row, token;
  int32_t position;  // in its sequence
};

// Queries of a tile, those of later positions last, and some of their blocks; once for each unit.
struct AttentionItem {
  int32_t first_query, num_queries;
  int32_t shared;  // keys below this position stand on the same pages for all queries
  int32_t first_block, end_block;
  int32_t split;  // which of the splits, or -1: this item has all blocks
};

// A tile with blocks in several items: those with shared keys for all queries, the others also for
// one query each. Parts lie unit by unit, then block by block, then row by row.
struct AttentionSplit {
  int32_t first_query, num_queries;
  int32_t first_block, num_blocks;
  int32_t num_items;
  int32_t first_part;
};

struct alignas(64) AttentionPlan {
  int64_t window;  // 0: all positions
  int64_t num_tickets;
  AttentionQuery* queries;
  AttentionItem* items;
  AttentionSplit* splits;
  std::atomic<int32_t>* missing;  // [splits][units], items that are not yet computed
  int64_t* first_tickets;         // one for each thread, a cache line apart
  alignas(64) std::atomic<int64_t> next_ticket;

  // The next item and unit for a thread, as one number; -1: none is left in this call of attend().
  // Every thread takes exactly one ticket too many in each call, so that all know where the next
  // call's tickets begin, and nothing needs a reset.
  int64_t take(const Team& team) {
    int64_t& first = first_tickets[team.rank() * 8];
    const int64_t ticket = next_ticket.fetch_add(1, std::memory_order_relaxed) - first;
    if (ticket < num_tickets) return ticket;
    first += num_tickets + team.size();
    return -1;
  }
};

}  // namespace trioserve::TRIOSERVE_ISA
