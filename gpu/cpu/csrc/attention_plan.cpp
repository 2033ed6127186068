#include "attention_plan.h"

#include <cstring>
#include <limits>
#include <new>

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Items that every thread gets at least, if need be by splitting: so late ones don't weigh much.
constexpr int64_t kItemsPerThread = 8;
// Reading a key and its value takes as long as computing with them for so many rows: 6 where they are
// in the cache, 10 where they come from memory.
constexpr int64_t kReadingCost = 8;
constexpr int32_t kAllKeys = std::numeric_limits<int32_t>::max();

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Some queries that are computed together, before it is known whether their blocks are split.
struct Tile {
  int64_t first_query, num_queries;
  int64_t shared;
  int64_t first_block, end_block;
};

// Cuts the queries of a step into tiles.
class Cutter {
 public:
  Cutter(const AttentionShape& shape, const AttentionStep& step, int64_t window,
         AttentionQuery* queries, Tile* tiles)
      : step_(step),
        tiling_(shape),
        page_size_(shape.page_size),
        window_(window),
        queries_(queries),
        tiles_(tiles) {}

  // The rows of several queries, which take longest, then the others, from the longest context to
  // the shortest.
  void cut() {
    for (int64_t row = 0; row < step_.num_rows; ++row)
      if (step_.query_len(row) > 1) cut_row(row);
    const int64_t first_query = num_queries_, first_tile = num_tiles_;
    for (int64_t row = 0; row < step_.num_rows; ++row)
      if (step_.query_len(row) == 1) add_query(row, step_.query_start[row]);
    cut_single_queries(first_query);
    std::sort(tiles_ + first_tile, tiles_ + num_tiles_,
              [](const Tile& a, const Tile& b) { return a.end_block > b.end_block; });
  }

  int64_t num_tiles() const { return num_tiles_; }

  Tile tile(int64_t first, int64_t count, int64_t shared) const {
    const AttentionQuery* queries = queries_ + first;
    return {first, count, shared, first_key(queries[0]) / kKeyBlock,
            queries[count - 1].position / kKeyBlock + 1};
  }

  // About proportional to the time that the keys at positions `begin` to `end` - 1 take.
  int64_t cost(const Tile& tile, int64_t begin, int64_t end) const {
    const AttentionQuery* queries = queries_ + tile.first_query;
    const auto keys = [&](int64_t from, int64_t to) {
      return std::max<int64_t>(0, std::min(to, end) - std::max(from, begin));
    };
    const int64_t newest = queries[tile.num_queries - 1].position;
    int64_t sum = keys(first_key(queries[0]), std::min(tile.shared, newest + 1)) *
                  (tile.num_queries * tiling_.heads + kReadingCost);
    if (tile.shared <= newest)
      for (int64_t i = 0; i < tile.num_queries; ++i)
        sum += keys(std::max(tile.shared, first_key(queries[i])), queries[i].position + 1) *
               (tiling_.heads + kReadingCost);
    return sum;
  }

 private:
  // The last tokens first, which see most keys.
  void cut_row(int64_t row) {
    for (int64_t end = step_.query_len(row); end > 0;) {
      const int64_t first = (end - 1) / tiling_.tokens * tiling_.tokens;
      const int64_t first_query = num_queries_;
      for (int64_t i = first; i < end; ++i) add_query(row, step_.query_start[row] + i);
      tiles_[num_tiles_++] = tile(first_query, end - first, kAllKeys);
      end = first;
    }
  }

  // Rows that begin with the same pages come to stand side by side, and as many make a tile as save
  // reading: what all of them see and share is read once instead of for each.
  void cut_single_queries(int64_t first) {
    std::sort(queries_ + first, queries_ + num_queries_,
              [&](const auto& a, const auto& b) { return compare_pages(a, b) < 0; });
    while (first < num_queries_) {
      AttentionQuery* queries = queries_ + first;
      const int64_t most = std::min<int64_t>(tiling_.tokens, num_queries_ - first);
      int64_t count = 1, shared = kAllKeys, seen_from = first_key(queries[0]), saved = 0;
      for (; count < most; ++count) {
        const int64_t next_shared = std::min(shared, agreement(queries[count - 1], queries[count]));
        seen_from = std::max(seen_from, first_key(queries[count]));
        if (count * (next_shared - seen_from) <= saved) break;
        saved = count * (next_shared - seen_from);
        shared = next_shared;
      }
      std::sort(queries, queries + count,
                [](const auto& a, const auto& b) { return a.position < b.position; });
      tiles_[num_tiles_++] = tile(first, count, shared);
      first += count;
    }
  }

  // As memcmp() does, in an order in which rows that begin with the same pages are neighbours.
  int compare_pages(const AttentionQuery& a, const AttentionQuery& b) const {
    const int64_t pages = std::min(whole_pages(a), whole_pages(b));
    const int order = std::memcmp(table(a), table(b), pages * sizeof(int32_t));
    return order ? order : static_cast<int>(whole_pages(a) - whole_pages(b));
  }

  // How many keys stand on the same pages for both, from the first one on. Tiles share whole groups.
  int64_t agreement(const AttentionQuery& a, const AttentionQuery& b) const {
    const int32_t* pages = table(a);
    const int32_t* end = pages + std::min(whole_pages(a), whole_pages(b));
    return (std::mismatch(pages, end, table(b)).first - pages) * page_size_;
  }

  int64_t first_key(const AttentionQuery& query) const {
    return window_ ? std::max<int64_t>(0, query.position - window_ + 1) : 0;
  }

  const int32_t* table(const AttentionQuery& query) const {
    return step_.block_tables + query.row * step_.table_stride;
  }

  // Those of which every key is seen. Where pages have no whole groups of keys, none count.
  int64_t whole_pages(const AttentionQuery& query) const {
    return page_size_ % kGroup ? 0 : (query.position + 1) / page_size_;
  }

  void add_query(int64_t row, int64_t token) {
    const int64_t after = step_.query_start[row + 1] - token;
    queries_[num_queries_++] = {static_cast<int32_t>(row), static_cast<int32_t>(token),
                                static_cast<int32_t>(step_.context_lens[row] - after)};
  }

  const AttentionStep& step_;
  const Tiling tiling_;
  const int64_t page_size_, window_;
  AttentionQuery* queries_;
  Tile* tiles_;
  int64_t num_queries_ = 0, num_tiles_ = 0;
};

class Planner {
 public:
  Planner(const Tiling& tiling, const Cutter& cutter, AttentionPlan& plan, int64_t most_cost)
      : tiling_(tiling), cutter_(cutter), plan_(plan), most_cost_(most_cost) {}

  void add(const Tile& tile) {
    const int64_t blocks = tile.end_block - tile.first_block;
    const int64_t parts = tiling_.units * blocks * tile.num_queries * tiling_.heads;
    if (blocks == 1 || parts_ + parts > kMaxParts ||
        cost(tile, tile.first_block, tile.end_block) <= most_cost_) {
      push(tile, tile.first_block, tile.end_block, -1);
      return;
    }
    const int64_t items_before = items_;
    int64_t end = std::min(tile.end_block, (tile.shared + kKeyBlock - 1) / kKeyBlock);
    if (cost(tile, end, tile.end_block) <= most_cost_) end = tile.end_block;
    split(tile, tile.first_block, end);
    for (int64_t i = 0; end < tile.end_block && i < tile.num_queries; ++i) {
      const Tile own = cutter_.tile(tile.first_query + i, 1, kAllKeys);
      split(own, std::max(own.first_block, end), own.end_block);
    }
    const int32_t items = static_cast<int32_t>(items_ - items_before);
    plan_.splits[splits_] = {
        static_cast<int32_t>(tile.first_query), static_cast<int32_t>(tile.num_queries),
        static_cast<int32_t>(tile.first_block), static_cast<int32_t>(blocks),
        items,                                  static_cast<int32_t>(parts_)};
    for (int unit = 0; unit < tiling_.units; ++unit)
      plan_.missing[splits_ * tiling_.units + unit].store(items, std::memory_order_relaxed);
    parts_ += parts;
    ++splits_;
  }

  int64_t num_items() const { return items_; }

 private:
  // Items of blocks that together cost no more than one should, or of one block.
  void split(const Tile& tile, int64_t first, int64_t end) {
    for (int64_t block = first + 1; block < end; ++block)
      if (cost(tile, first, block + 1) > most_cost_) {
        push(tile, first, block, splits_);
        first = block;
      }
    if (first < end) push(tile, first, end, splits_);
  }

  int64_t cost(const Tile& tile, int64_t first_block, int64_t end_block) const {
    return cutter_.cost(tile, first_block * kKeyBlock, end_block * kKeyBlock);
  }

  void push(const Tile& tile, int64_t first_block, int64_t end_block, int64_t split) {
    plan_.items[items_++] = {
        static_cast<int32_t>(tile.first_query), static_cast<int32_t>(tile.num_queries),
        static_cast<int32_t>(tile.shared),      static_cast<int32_t>(first_block),
        static_cast<int32_t>(end_block),        static_cast<int32_t>(split)};
  }

  const Tiling& tiling_;
  const Cutter& cutter_;
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
         aligned(max_tokens * sizeof(AttentionQuery)) + aligned(max_tokens * sizeof(Tile)) +
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
  plan->queries = reinterpret_cast<AttentionQuery*>(at);
  at += aligned(step.num_tokens() * sizeof(AttentionQuery));
  auto* tiles = reinterpret_cast<Tile*>(at);
  at += aligned(step.num_tokens() * sizeof(Tile));
  plan->items = reinterpret_cast<AttentionItem*>(at);

  Cutter cutter(shape, step, window, plan->queries, tiles);
  cutter.cut();
  int64_t total = 0;
  for (int64_t i = 0; i < cutter.num_tiles(); ++i) total += cutter.cost(tiles[i], 0, kAllKeys);
  const int64_t shares = threads == 1 ? 1 : threads * kItemsPerThread;
  const int64_t most_cost = std::max<int64_t>(1, total * tiling.units / shares);
  Planner planner(tiling, cutter, *plan, most_cost);
  for (int64_t i = 0; i < cutter.num_tiles(); ++i) planner.add(tiles[i]);
  plan->num_tickets = planner.num_items() * tiling.units;
  return plan;
}

}  // namespace trioserve::TRIOSERVE_ISA
