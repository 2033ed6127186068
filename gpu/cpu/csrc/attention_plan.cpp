#include "attention_plan.h"

#include <new>

namespace trioserve {
namespace {

// Items that every thread gets at least, if need be by splitting: so late ones don't weigh much.
constexpr int64_t kItemsPerThread = 8;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// One tile, before it is known whether it is split.
struct Tile {
  int64_t row, first_token, num_tokens;
  int64_t first_block, end_block;

  // About proportional to the time it takes.
  int64_t cost(const Tiling& tiling) const {
    return (end_block - first_block) * (num_tokens * tiling.heads + 4);
  }
};

// Calls `each` with every tile of a row, the last tokens first, which see most keys.
template <typename Each>
void for_each_tile_of(const AttentionStep& step, int64_t row, const Tiling& tiling, int64_t window,
                      Each each) {
  const int64_t length = step.query_len(row), start = step.context_lens[row] - length;
  const int64_t tiles = (length + tiling.tokens - 1) / tiling.tokens;
  for (int64_t tile = tiles - 1; tile >= 0; --tile) {
    const int64_t first = tile * tiling.tokens;
    const int64_t count = std::min<int64_t>(tiling.tokens, length - first);
    const int64_t oldest = window ? std::max<int64_t>(0, start + first - window + 1) : 0;
    each(Tile{row, step.query_start[row] + first, count, oldest / kBlock,
              (start + first + count - 1) / kBlock + 1});
  }
}

// Those of a step: the rows of several tokens, which take longest, then the others in their order,
// which is that of their contexts, longest first.
template <typename Each>
void for_each_tile(const AttentionStep& step, const Tiling& tiling, int64_t window, Each each) {
  for (int64_t row = 0; row < step.num_rows; ++row)
    if (step.query_len(row) > 1) for_each_tile_of(step, row, tiling, window, each);
  for (int64_t row = 0; row < step.num_rows; ++row)
    if (step.query_len(row) == 1) for_each_tile_of(step, row, tiling, window, each);
}

class Planner {
 public:
  Planner(const Tiling& tiling, AttentionPlan& plan, int64_t most_cost)
      : tiling_(tiling), plan_(plan), most_cost_(most_cost) {}

  void add(const Tile& tile) {
    const int64_t blocks = tile.end_block - tile.first_block;
    const int64_t parts = tiling_.units * blocks * tile.num_tokens * tiling_.heads;
    const int64_t wanted = std::min(blocks, (tile.cost(tiling_) + most_cost_ - 1) / most_cost_);
    if (wanted <= 1 || parts_ + parts > kMaxParts) {
      push(tile, tile.first_block, tile.end_block, -1);
      return;
    }
    const int64_t each = (blocks + wanted - 1) / wanted;
    const int32_t items = static_cast<int32_t>((blocks + each - 1) / each);
    plan_.splits[splits_] = {static_cast<int32_t>(tile.first_block), static_cast<int32_t>(blocks),
                             items, static_cast<int32_t>(parts_)};
    for (int unit = 0; unit < tiling_.units; ++unit)
      plan_.missing[splits_ * tiling_.units + unit].store(items, std::memory_order_relaxed);
    for (int64_t block = tile.first_block; block < tile.end_block; block += each)
      push(tile, block, std::min(block + each, tile.end_block), splits_);
    parts_ += parts;
    ++splits_;
  }

  int64_t num_items() const { return items_; }

 private:
  void push(const Tile& tile, int64_t first_block, int64_t end_block, int64_t split) {
    plan_.items[items_++] = {
        static_cast<int32_t>(tile.row),        static_cast<int32_t>(tile.first_token),
        static_cast<int32_t>(tile.num_tokens), static_cast<int32_t>(first_block),
        static_cast<int32_t>(end_block),       static_cast<int32_t>(split)};
  }

  const Tiling& tiling_;
  AttentionPlan& plan_;
  const int64_t most_cost_;
  int64_t items_ = 0, splits_ = 0, parts_ = 0;
};

// A split has at least two blocks, and each of those a part for every unit.
int64_t max_splits(const Tiling& tiling) { return kMaxParts / (2 * tiling.units); }
int64_t max_items(int64_t max_tokens) { return max_tokens + kMaxParts; }

}  // namespace

int64_t attention_plan_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) {
  const int64_t splits = max_splits(Tiling(shape));
  return aligned(sizeof(AttentionPlan)) + 64 * int64_t{threads} +
         aligned(splits * sizeof(AttentionSplit)) + aligned(kMaxParts * sizeof(int32_t)) +
         aligned(max_items(max_tokens) * sizeof(AttentionItem));
}

AttentionPlan* plan_attention(const AttentionShape& shape, const AttentionStep& step,
                              int64_t window, int threads, void* memory) {
  static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t));
  const Tiling tiling(shape);
  auto* plan = new (memory) AttentionPlan{};
  char* at = static_cast<char*>(memory) + aligned(sizeof(AttentionPlan));
  plan->window = window;
  plan->first_tickets = reinterpret_cast<int64_t*>(at);
  for (int rank = 0; rank < threads; ++rank) plan->first_tickets[8 * rank] = 0;
  at += 64 * int64_t{threads};
  plan->splits = reinterpret_cast<AttentionSplit*>(at);
  at += aligned(max_splits(tiling) * sizeof(AttentionSplit));
  plan->missing = reinterpret_cast<std::atomic<int32_t>*>(at);
  at += aligned(kMaxParts * sizeof(int32_t));
  // The number of items isn't bounded by anything smaller, so they come last.
  plan->items = reinterpret_cast<AttentionItem*>(at);

  int64_t total = 0;
  for_each_tile(step, tiling, window, [&](const Tile& tile) { total += tile.cost(tiling); });
  const int64_t shares = threads == 1 ? 1 : threads * kItemsPerThread;
  const int64_t most_cost = std::max<int64_t>(1, total * tiling.units / shares);
  Planner planner(tiling, *plan, most_cost);
  for_each_tile(step, tiling, window, [&](const Tile& tile) { planner.add(tile); });
  plan->num_tickets = planner.num_items() * tiling.units;
  return plan;
}

}  // namespace trioserve
