#include "attention.h"

#include "attention_tile.h"

namespace trioserve {
namespace {

// One thread's memory.
struct Workspace {
  alignas(64) bf16 q[kTileRows * 256];
  alignas(64) float scores[kTileRows * kBlock];
  alignas(64) bf16 weights[kTileRows * kBlock];
  alignas(64) float sums[kTileRows * 256];
  alignas(64) float part_sums[kTileRows * 256];
  alignas(64) bf16 keys[kBlock * 256];    // gathered from pages that have no whole groups
  alignas(64) bf16 values[kBlock * 256];
  Softmax softmax[kTileRows], part_softmax[kTileRows];
};

using KeysKernel = void (*)(const bf16*, int, const bf16* const*, float*);
using ValuesKernel = void (*)(const bf16*, const bf16* const*, int, int, int, float*);

template <bool kPrefetch, size_t... kIndex>
constexpr auto keys_kernels(std::index_sequence<kIndex...>) {
  return std::array<KeysKernel, sizeof...(kIndex)>{
      multiply_keys<kIndex / kColumnsAtOnce + 1, kIndex % kColumnsAtOnce + 1, kPrefetch>...};
}

// Columns of values come by two, as head_dim is a multiple of 32.
template <bool kPrefetch, size_t... kIndex>
constexpr auto values_kernels(std::index_sequence<kIndex...>) {
  return std::array<ValuesKernel, sizeof...(kIndex)>{
      multiply_values<kIndex / 2 + 1, kIndex % 2 * 2 + 2, kPrefetch>...};
}

constexpr auto kKeysIndex = std::make_index_sequence<kRowsAtOnce * kColumnsAtOnce>{};
constexpr auto kValuesIndex = std::make_index_sequence<kRowsAtOnce * 2>{};
// [whether to prefetch][which]
constexpr std::array kKeysKernels{keys_kernels<false>(kKeysIndex), keys_kernels<true>(kKeysIndex)};
constexpr std::array kValuesKernels{values_kernels<false>(kValuesIndex),
                                    values_kernels<true>(kValuesIndex)};

// One layer's attention on one thread.
class Attending {
 public:
  Attending(const AttentionShape& shape, const AttentionStep& step, AttentionPlan& plan,
            const bf16* keys, const bf16* values, const bf16* q, int64_t q_stride, bf16* out,
            Workspace& work, void* parts)
      : shape_(shape),
        step_(step),
        plan_(plan),
        layout_(shape),
        tiling_(shape),
        keys_(keys),
        values_(values),
        q_(q),
        q_stride_(q_stride),
        out_(out),
        work_(work),
        part_softmax_(static_cast<Softmax*>(parts)),
        part_sums_(reinterpret_cast<float*>(part_softmax_ + kMaxParts)) {}

  void compute(int64_t ticket) {
    // Item by item for one unit, so that those that see the same keys find them in the cache.
    const int64_t items = plan_.num_tickets / tiling_.units;
    item_ = plan_.items[ticket % items];
    begin_unit(static_cast<int>(ticket / items));
    load_queries();
    if (item_.split >= 0) return compute_split();
    for (int block = item_.first_block; block < item_.end_block; ++block) {
      const bool first = block == item_.first_block;
      Softmax* softmax = first ? work_.softmax : work_.part_softmax;
      float* sums = first ? work_.sums : work_.part_sums;
      compute_block(block, softmax, sums);
      if (!first) merge_rows(softmax, sums);
    }
    write_out();
  }

 private:
  void begin_unit(int unit) {
    unit_ = unit;
    const int pieces = tiling_.units / shape_.num_kv_heads;
    const int first_of_group = unit % pieces * tiling_.heads;
    kv_head_ = unit / pieces;
    first_head_ = kv_head_ * shape_.group() + first_of_group;
    heads_ = std::min(tiling_.heads, shape_.group() - first_of_group);
    rows_ = item_.num_tokens * heads_;
    const int64_t* ends = step_.query_start + 1;
    first_position_ = step_.context_lens[item_.row] - (ends[item_.row] - item_.first_token);
    table_ = step_.block_tables + item_.row * step_.table_stride;
  }

  void load_queries() {
    const int64_t width = int64_t{heads_} * shape_.head_dim;
    for (int token = 0; token < item_.num_tokens; ++token) {
      const bf16* from = q_ + (item_.first_token + token) * q_stride_;
      std::memcpy(work_.q + token * width, from + int64_t{first_head_} * shape_.head_dim,
                  width * sizeof(bf16));
    }
  }

  // Leaves the parts of this item's blocks, and merges all of the split if they are the last.
  void compute_split() {
    const AttentionSplit& split = plan_.splits[item_.split];
    const int64_t most_rows = int64_t{item_.num_tokens} * tiling_.heads;
    const int64_t unit_part = split.first_part + unit_ * split.num_blocks * most_rows;
    for (int block = item_.first_block; block < item_.end_block; ++block) {
      const int64_t part = unit_part + (block - split.first_block) * most_rows;
      compute_block(block, part_softmax_ + part, part_sums_ + part * shape_.head_dim);
    }
    std::atomic<int32_t>& missing = plan_.missing[item_.split * tiling_.units + unit_];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    missing.store(split.num_items, std::memory_order_relaxed);  // for the next layer
    std::fill_n(work_.softmax, rows_, Softmax{});
    for (int block = 0; block < split.num_blocks; ++block) {
      const int64_t part = unit_part + block * most_rows;
      merge_rows(part_softmax_ + part, part_sums_ + part * shape_.head_dim);
    }
    write_out();
  }

  void merge_rows(const Softmax* softmax, const float* sums) {
    for (int row = 0; row < rows_; ++row)
      merge(work_.softmax[row], work_.sums + row * shape_.head_dim, softmax[row],
            sums + row * shape_.head_dim, shape_.head_dim);
  }

  // The part of one block, for all rows of the tile.
  void compute_block(int block, Softmax* softmax, float* sums) {
    const int64_t base = int64_t{block} * kBlock;
    const int64_t last_position = first_position_ + item_.num_tokens - 1;
    const int end = static_cast<int>(std::min<int64_t>(kBlock, last_position + 1 - base));
    const int begin = std::max(0, first_key(0, base)) & ~(kGroup - 1);
    find_groups(block, begin, end);
    for_rows([&](int row, int count, int prefetches) {
      for (int group = begin / kGroup; group < groups_.count;) {
        const int columns = std::min(kColumnsAtOnce, groups_.count - group);
        const int index = (count - 1) * kColumnsAtOnce + columns - 1;
        kKeysKernels[prefetches][index](work_.q + row * shape_.head_dim, shape_.head_dim,
                                        groups_.keys() + group,
                                        work_.scores + row * kBlock + group * kGroup);
        group += columns;
      }
    });
    const float scale = shape_.scale * kLog2e;
    for (int row = 0; row < rows_; ++row) {
      const int token = row / heads_;
      const int last = static_cast<int>(std::min<int64_t>(end, first_position_ + token + 1 - base));
      softmax[row] = softmax_row(work_.scores + row * kBlock, std::max(0, first_key(token, base)),
                                 last, begin, end, scale, work_.weights + row * kBlock);
    }
    for_rows([&](int row, int count, int prefetches) {
      for (int number = 0; number < shape_.head_dim;) {
        const int left = (shape_.head_dim - number) / kLanes;
        const int columns = left >= kColumnsAtOnce ? kColumnsAtOnce : 2;
        const bf16* groups[2 * kGroups + kAhead];
        for (int group = begin / kGroup; group < groups_.count + kAhead; ++group)
          groups[group] = groups_.values()[group] + 2 * number;
        kValuesKernels[prefetches][(count - 1) * 2 + columns / 2 - 1](
            work_.weights + row * kBlock, groups, begin, end, shape_.head_dim,
            sums + row * shape_.head_dim + number);
        number += columns * kLanes;
      }
    });
  }

  // Calls `each` with the first and the number of some rows at a time, about equally many, and
  // whether they are the first, which fetch ahead for all.
  template <typename Each>
  void for_rows(Each each) const {
    const int times = (rows_ + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int i = 0, row = 0; i < times; ++i) {
      const int count = (rows_ - row + times - i - 1) / (times - i);
      each(row, count, i == 0);
      row += count;
    }
  }

  // The first key that a token of the tile sees, counted from `base`; may be negative.
  int first_key(int token, int64_t base) const {
    if (plan_.window == 0) return static_cast<int>(-base);
    const int64_t oldest = std::max<int64_t>(0, first_position_ + token - plan_.window + 1);
    return static_cast<int>(oldest - base);
  }

  void find_groups(int block, int begin, int end) {
    groups_.count = (end + kGroup - 1) / kGroup;
    const int64_t base = int64_t{block} * kBlock;
    const bool gathers = shape_.page_size % kGroup != 0;
    for (int group = begin / kGroup; group < groups_.count; ++group) {
      if (gathers) {
        gather_group(base, group, end);
      } else {
        const int64_t at = group_offset(base + group * kGroup);
        groups_.at[group] = keys_ + at;
        groups_.at[groups_.count + group] = values_ + at;
      }
    }
    // Values are fetched ahead from where the keys end: nobody reads these, but they are looked at.
    for (int group = 0; group < begin / kGroup; ++group)
      groups_.at[groups_.count + group] = groups_.at[groups_.count + begin / kGroup];
    for (int i = 0; i < kAhead; ++i) {
      const int64_t next = base + kBlock + i * kGroup;
      const bool there = !gathers && block + 1 < item_.end_block &&
                         next < first_position_ + item_.num_tokens;
      const bf16* last = groups_.at[2 * groups_.count - 1];
      groups_.at[2 * groups_.count + i] = there ? keys_ + group_offset(next) : last;
    }
  }

  // Where a page has this head's numbers of the token at `position`.
  int64_t head_offset(int64_t position) const {
    const int64_t page = table_[position / shape_.page_size];
    return page * shape_.page_stride() +
           int64_t{kv_head_} * shape_.page_size * shape_.head_dim;
  }

  // Of pages with whole groups, where one begins.
  int64_t group_offset(int64_t position) const {
    return head_offset(position) + position % shape_.page_size * shape_.head_dim;
  }

  // Copies a group, token by token, into the form that it has in large pages.
  void gather_group(int64_t base, int group, int end) {
    bf16* keys = work_.keys + group * kGroup * shape_.head_dim;
    bf16* values = work_.values + group * kGroup * shape_.head_dim;
    const int count = std::min(kGroup, end - group * kGroup);
    for (int i = 0; i < count; ++i) {
      const int64_t position = base + group * kGroup + i;
      const int slot = static_cast<int>(position % shape_.page_size);
      const bf16* key = keys_ + head_offset(position) + layout_.key(slot);
      const bf16* value = values_ + head_offset(position) + layout_.value(slot);
      for (int pair = 0; pair < shape_.head_dim / 2; ++pair)
        std::memcpy(keys + (pair * kGroup + i) * 2, key + pair * layout_.key_step(),
                    2 * sizeof(bf16));
      bf16* to = values + i / 2 * 2 * shape_.head_dim + i % 2;
      for (int number = 0; number < shape_.head_dim; ++number)
        to[2 * number] = value[number * layout_.value_step()];
    }
    groups_.at[group] = keys;
    groups_.at[groups_.count + group] = values;
  }

  void write_out() {
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = item_.first_token + row / heads_;
      const int64_t head = first_head_ + row % heads_;
      bf16* out = out_ + (token * shape_.num_heads + head) * shape_.head_dim;
      const float* sums = work_.sums + row * shape_.head_dim;
      const __m512 share = _mm512_set1_ps(1.0f / work_.softmax[row].sum);
      // Adding 0 makes one of the two zeros.
      for (int i = 0; i < shape_.head_dim; i += kLanes)
        store(out + i, _mm512_fmadd_ps(_mm512_loadu_ps(sums + i), share, _mm512_setzero_ps()));
    }
  }

  const AttentionShape& shape_;
  const AttentionStep& step_;
  AttentionPlan& plan_;
  const PageLayout layout_;
  const Tiling tiling_;
  const bf16 *keys_, *values_, *q_;
  const int64_t q_stride_;
  bf16* out_;
  Workspace& work_;
  Softmax* part_softmax_;
  float* part_sums_;

  AttentionItem item_;
  int unit_, kv_head_, first_head_, heads_, rows_;
  int64_t first_position_;
  const int32_t* table_;
  BlockGroups groups_;
};

int64_t parts_bytes(const AttentionShape& shape) {
  return kMaxParts * (sizeof(Softmax) + shape.head_dim * sizeof(float));
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionShape& shape, int threads) {
  return threads * int64_t{sizeof(Workspace)} + parts_bytes(shape);
}

void attend(const Team& team, const AttentionShape& shape, const AttentionStep& step,
            AttentionPlan& plan, const bf16* keys, const bf16* values, const bf16* q,
            int64_t q_stride, bf16* out, void* scratch) {
  auto* spaces = static_cast<Workspace*>(scratch);
  Attending attending(shape, step, plan, keys, values, q, q_stride, out, spaces[team.rank()],
                      spaces + team.size());
  for (int64_t ticket; (ticket = plan.take(team)) >= 0;) attending.compute(ticket);
}

}  // namespace trioserve
