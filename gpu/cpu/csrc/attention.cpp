#include "attention.h"

#include <cstring>

#include "attention_products.h"
#include "attention_softmax.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// One thread's memory.
struct Workspace {
  alignas(64) Activation q[kTileRows * 256];
  alignas(64) float scores[kTileRows * kKeyBlock];
  alignas(64) Activation weights[kTileRows * kKeyBlock];
  alignas(64) float sums[kTileRows * 256];
  alignas(64) float part_sums[kTileRows * 256];
  alignas(64) bf16 keys[kKeyBlock * 256];    // gathered from pages that have no whole groups
  alignas(64) bf16 values[kKeyBlock * 256];
  Softmax softmax[kTileRows], part_softmax[kTileRows];
};

// Keys of a block that some queries of a tile read together.
struct Span {
  int first_query, num_queries;
  int begin, end;   // counted from the block's first key; `begin` is a multiple of 16
  int first_group;  // among all of the block
  bool continues;   // the queries have read earlier keys of this block

  int num_groups() const { return (end - begin + kGroup - 1) / kGroup; }
};

// What a tile reads of one block, in this order: the keys of all spans, then their values. Some of
// the next block's keys follow, for those are fetched ahead.
struct BlockSpans {
  // One for what the queries share, then one for each of them.
  Span spans[1 + kTileRows];
  int num_spans = 0;
  int begins[kTileRows] = {}, ends[kTileRows] = {};  // of what each query reads in all
  const bf16* groups[2 * kTileRows * kGroups + kAhead];
  int num_groups = 0;  // of keys; as many of values

  void add(int first_query, int num_queries, int begin, int end) {
    begin &= ~(kGroup - 1);
    if (begin >= end) return;
    Span& span = spans[num_spans++];
    span = {first_query, num_queries, begin, end, num_groups, ends[first_query] > 0};
    num_groups += span.num_groups();
    for (int query = first_query; query < first_query + num_queries; ++query) {
      if (!span.continues) begins[query] = begin;
      ends[query] = end;
    }
  }
};

// One layer's attention on one thread.
class Attending {
 public:
  Attending(const AttentionProducts& products, const AttentionShape& shape,
            const AttentionStep& step, AttentionPlan& plan, const bf16* pages, const bf16* q,
            int64_t q_stride, bf16* out, Workspace& work, void* parts)
      : products_(products),
        shape_(shape),
        step_(step),
        plan_(plan),
        layout_(shape),
        tiling_(shape),
        pages_(pages),
        q_(q),
        q_stride_(q_stride),
        out_(out),
        work_(work),
        part_softmax_(static_cast<Softmax*>(parts)),
        part_sums_(reinterpret_cast<float*>(part_softmax_ + kMaxParts)) {}

  // Computes the item and unit of a ticket, and fetches the first keys of the next one; -1: there is none.
  void compute(int64_t ticket, int64_t next) {
    begin(ticket);
    find_first_groups(next);
    load_queries();
    if (item_.split >= 0) return compute_split();
    for (int block = item_.first_block; block < item_.end_block; ++block) {
      const bool first = block == item_.first_block;
      Softmax* softmax = first ? work_.softmax : work_.part_softmax;
      float* sums = first ? work_.sums : work_.part_sums;
      compute_block(block, softmax, sums);
      if (!first) merge_rows(0, rows_, softmax, sums);
    }
    write_out();
  }

 private:
  // Item by item for one unit, so that those that see the same keys find them in the cache.
  const AttentionItem& item_of(int64_t ticket) const { return plan_.items[ticket % num_items()]; }
  int64_t num_items() const { return plan_.num_tickets / tiling_.units; }
  int unit_of(int64_t ticket) const { return static_cast<int>(ticket / num_items()); }
  int pieces() const { return tiling_.units / shape_.num_kv_heads; }

  void begin(int64_t ticket) {
    item_ = item_of(ticket);
    unit_ = unit_of(ticket);
    const int first_of_group = unit_ % pieces() * tiling_.heads;
    kv_head_ = unit_ / pieces();
    first_head_ = kv_head_ * shape_.group() + first_of_group;
    heads_ = std::min(tiling_.heads, shape_.group() - first_of_group);
    set_queries(item_.first_query, item_.num_queries);
  }

  void set_queries(int first, int count) {
    queries_ = plan_.queries + first;
    rows_ = count * heads_;
  }

  void load_queries() {
    const int64_t width = int64_t{heads_} * shape_.head_dim;
    for (int query = 0; query < item_.num_queries; ++query) {
      const bf16* from = q_ + queries_[query].token * q_stride_;
      to_activations(from + int64_t{first_head_} * shape_.head_dim, width, work_.q + query * width);
    }
  }

  // Leaves the parts of this item's blocks, and merges all of the split if they are the last.
  void compute_split() {
    const AttentionSplit& split = plan_.splits[item_.split];
    for (int block = item_.first_block; block < item_.end_block; ++block) {
      const int64_t part = part_of(split, block, item_.first_query);
      compute_block(block, part_softmax_ + part, part_sums_ + part * shape_.head_dim);
    }
    std::atomic<int32_t>& missing = plan_.missing[item_.split * tiling_.units + unit_];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    missing.store(split.num_items, std::memory_order_relaxed);  // for the next layer
    set_queries(split.first_query, split.num_queries);
    std::fill_n(work_.softmax, rows_, Softmax{});
    for (int query = 0; query < split.num_queries; ++query) {
      const int64_t position = queries_[query].position;
      for (int64_t block = first_key(query, 0) / kKeyBlock; block <= position / kKeyBlock; ++block) {
        const int64_t part = part_of(split, block, split.first_query + query);
        merge_rows(query * heads_, heads_, part_softmax_ + part,
                   part_sums_ + part * shape_.head_dim);
      }
    }
    write_out();
  }

  int64_t part_of(const AttentionSplit& split, int64_t block, int64_t query) const {
    const int64_t block_of_unit = unit_ * split.num_blocks + block - split.first_block;
    return split.first_part +
           (block_of_unit * split.num_queries + query - split.first_query) * tiling_.heads;
  }

  void merge_rows(int first, int count, const Softmax* softmax, const float* sums) {
    for (int row = 0; row < count; ++row)
      merge(work_.softmax[first + row], work_.sums + (first + row) * shape_.head_dim, softmax[row],
            sums + row * shape_.head_dim, shape_.head_dim);
  }

  // The part of one block, for all rows of the tile.
  void compute_block(int block, Softmax* softmax, float* sums) {
    const int64_t base = int64_t{block} * kKeyBlock;
    BlockSpans read;
    find_spans(base, read);
    find_groups(block, read);
    for_spans(read, [&](const Span& span, int row, int rows) {
      products_.multiply_keys(work_.q + row * shape_.head_dim, rows, shape_.head_dim,
                              read.groups + span.first_group, span.num_groups(),
                              work_.scores + row * kKeyBlock + span.begin);
    });
    const float scale = shape_.scale * kLog2e;
    for (int row = 0; row < rows_; ++row) {
      const int query = row / heads_;
      softmax[row] = softmax_row(work_.scores + row * kKeyBlock, first_key(query, base),
                                 end_key(query, base), read.begins[query], read.ends[query], scale,
                                 work_.weights + row * kKeyBlock);
    }
    for_spans(read, [&](const Span& span, int row, int rows) {
      products_.multiply_values(work_.weights + row * kKeyBlock + span.begin, rows, shape_.head_dim,
                                read.groups + read.num_groups + span.first_group,
                                span.end - span.begin, span.continues,
                                sums + row * shape_.head_dim);
    });
  }

  // Calls `each` with every span, its first row, and how many it has.
  template <typename Each>
  void for_spans(const BlockSpans& read, Each each) const {
    for (int i = 0; i < read.num_spans; ++i) {
      const Span& span = read.spans[i];
      each(span, span.first_query * heads_, span.num_queries * heads_);
    }
  }

  // The keys that a query sees of the block that begins at `base`, counted from there.
  int first_key(int query, int64_t base) const {
    const int64_t oldest = plan_.window ? queries_[query].position - plan_.window + 1 : 0;
    return static_cast<int>(std::max<int64_t>(0, oldest - base));
  }
  int end_key(int query, int64_t base) const {
    return static_cast<int>(std::min<int64_t>(kKeyBlock, queries_[query].position + 1 - base));
  }

  void find_spans(int64_t base, BlockSpans& read) const {
    const int count = item_.num_queries;
    const int shared = static_cast<int>(std::clamp<int64_t>(item_.shared - base, 0, kKeyBlock));
    read.add(0, count, first_key(0, base), std::min(shared, end_key(count - 1, base)));
    for (int query = count; query-- > 0;)
      read.add(query, 1, std::max(shared, first_key(query, base)), end_key(query, base));
  }

  void find_groups(int block, BlockSpans& read) {
    const int64_t base = int64_t{block} * kKeyBlock;
    const bool gathers = shape_.page_size % kGroup != 0;
    for (int i = 0; i < read.num_spans; ++i) {
      const Span& span = read.spans[i];
      const AttentionQuery& query = queries_[span.first_query + span.num_queries - 1];
      const bf16** groups = read.groups + span.first_group;
      for (int group = 0; group < span.num_groups(); ++group) {
        const int key = span.begin + group * kGroup;
        const bf16 *&keys = groups[group], *&values = groups[read.num_groups + group];
        if (gathers) {
          const int at = group * kGroup * shape_.head_dim;
          gather_group(query, base + key, std::min(kGroup, span.end - key), work_.keys + at,
                       work_.values + at);
          keys = work_.keys + at;
          values = work_.values + at;
        } else {
          keys = group_of(query, base + key, kv_head_);
          values = keys + layout_.values();
        }
      }
    }
    const AttentionQuery& newest = queries_[item_.num_queries - 1];
    const bf16** ahead = read.groups + 2 * read.num_groups;
    for (int i = 0; i < kAhead; ++i) {
      const int64_t next = base + kKeyBlock + i * kGroup;
      const bool there = !gathers && block + 1 < item_.end_block && next <= newest.position;
      ahead[i] = there ? group_of(newest, next, kv_head_) : first_groups_[i];
      if (ahead[i] == nullptr) ahead[i] = ahead[-1];
    }
  }

  // The first groups of keys that a ticket reads; null where it has fewer.
  void find_first_groups(int64_t ticket) {
    std::fill_n(first_groups_, kAhead, nullptr);
    if (ticket < 0 || shape_.page_size % kGroup != 0) return;
    const AttentionItem& item = item_of(ticket);
    const AttentionQuery* queries = plan_.queries + item.first_query;
    const AttentionQuery& newest = queries[item.num_queries - 1];
    const int64_t oldest = plan_.window ? queries[0].position - plan_.window + 1 : 0;
    const int64_t first = std::max(int64_t{item.first_block} * kKeyBlock, oldest / kGroup * kGroup);
    const int kv_head = unit_of(ticket) / pieces();
    for (int i = 0; i < kAhead && first + i * kGroup <= newest.position; ++i)
      first_groups_[i] = group_of(newest, first + i * kGroup, kv_head);
  }

  // Where a page has a head's numbers of the token at `position`.
  const bf16* head_of(const AttentionQuery& query, int64_t position, int kv_head) const {
    const int32_t* table = step_.block_tables + query.row * step_.table_stride;
    return pages_ + table[position / shape_.page_size] * shape_.page_stride() +
           kv_head * shape_.head_stride();
  }

  // Of pages with whole groups, where one's keys begin.
  const bf16* group_of(const AttentionQuery& query, int64_t position, int kv_head) const {
    return head_of(query, position, kv_head) + position % shape_.page_size * shape_.head_dim;
  }

  // Copies `count` tokens from `first` on into the form that a group has in large pages.
  void gather_group(const AttentionQuery& query, int64_t first, int count, bf16* keys,
                    bf16* values) const {
    for (int i = 0; i < count; ++i) {
      const int slot = static_cast<int>((first + i) % shape_.page_size);
      const bf16* head = head_of(query, first + i, kv_head_);
      const bf16 *key = head + layout_.key(slot), *value = head + layout_.value(slot);
      for (int pair = 0; pair < shape_.head_dim / 2; ++pair)
        std::memcpy(keys + (pair * kGroup + i) * 2, key + pair * layout_.key_step(),
                    2 * sizeof(bf16));
      bf16* to = values + i / 2 * 2 * shape_.head_dim + i % 2;
      for (int number = 0; number < shape_.head_dim; ++number)
        to[2 * number] = value[number * layout_.value_step()];
    }
  }

  void write_out() {
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = queries_[row / heads_].token;
      const int64_t head = first_head_ + row % heads_;
      bf16* out = out_ + (token * shape_.num_heads + head) * shape_.head_dim;
      const float* sums = work_.sums + row * shape_.head_dim;
      const Floats share = broadcast(1.0f / work_.softmax[row].sum);
      // Adding 0 makes one of the two zeros.
      for (int i = 0; i < shape_.head_dim; i += kLanes)
        store(out + i, fma(load(sums + i), share, zeros()));
    }
  }

  const AttentionProducts& products_;
  const AttentionShape& shape_;
  const AttentionStep& step_;
  AttentionPlan& plan_;
  const PageLayout layout_;
  const Tiling tiling_;
  const bf16 *pages_, *q_;
  const int64_t q_stride_;
  bf16* out_;
  Workspace& work_;
  Softmax* part_softmax_;
  float* part_sums_;

  AttentionItem item_;
  const AttentionQuery* queries_;
  int unit_, kv_head_, first_head_, heads_, rows_;
  const bf16* first_groups_[kAhead];  // of the next item
};

int64_t parts_bytes(const AttentionShape& shape) {
  return kMaxParts * (sizeof(Softmax) + shape.head_dim * sizeof(float));
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionShape& shape, int threads) {
  return threads * int64_t{sizeof(Workspace)} + parts_bytes(shape);
}

void attend(const Team& team, const AttentionShape& shape, const AttentionStep& step,
            AttentionPlan& plan, const bf16* pages, const bf16* q, int64_t q_stride, bf16* out,
            void* scratch) {
  auto* spaces = static_cast<Workspace*>(scratch);
  const AttentionProducts& products = attention_products();
  Attending attending(products, shape, step, plan, pages, q, q_stride, out, spaces[team.rank()],
                      spaces + team.size());
  const unsigned before = products.begin();
  for (int64_t ticket = plan.take(team); ticket >= 0;) {
    const int64_t next = plan.take(team);
    attending.compute(ticket, next);
    ticket = next;
  }
  products.end(before);
}

}  // namespace trioserve::TRIOSERVE_ISA
