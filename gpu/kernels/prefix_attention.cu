// prefix_attention.cu - decode rows that share the beginning of their context attend to it
// together.
//
// Rows whose block tables begin with the same pages (a system prompt, several samples of one
// prompt) would each read those pages. Here a group of such rows reads them once: the rows, times
// the query heads of a kv head, fill the M index of the tensor cores' tile. All keys come before
// all queries, so nothing is masked. The result is partial; decode_attention attends to the rest of
// each row, and combine_partials merges both. Cascade attention: Ye et al., "Cascade Inference",
// 2024; Juravsky et al., "Hydragen", 2024.
//
//   q             [rows, >= num_heads, HEAD_DIM], q_stride elements from row to row
//   k/v_cache     [num_pages, num_kv_heads, page_size, HEAD_DIM]; k/v_scale without the last axis
//   partial_out   [num_partials, num_heads, HEAD_DIM] float32
//   partial_lse   [num_partials, num_heads] float32, log2 units
//   items         [max_items, 5] = {first, count, begin, end, split}, num_items of them
//   members       row indices; the rows of an item are members[first] .. members[first + count - 1]
//   block_tables  [num_slots, table_stride]; row r's is that of slot slots[r]
//
// Grid (num_kv_heads, max_items): a block computes an item for one kv head, the rows of the item
// (at most TILE / group) over positions begin..end-1 of the prefix (begin a multiple of 64), whose
// pages are those of the first of the rows. Row r's result goes to partial result partial_start[r]
// + split. Everything that changes from step to step is read from device memory; blocks past
// num_items return at once, so a captured launch can be replayed.
//
// Tiling: see attention_tile.cuh; keys come in tiles by paged_tiles.cuh.
//
// Roofline on an H200, 32 query and 8 kv heads, HEAD_DIM 128, 256 rows and a prefix of 8192
// positions: the prefix is 34 MB, 8 us at 4.3 TB/s; 256 rows reading it each are 8.6 GB, 2 ms. Its
// 4 * 32 * 128 * 256 * 8192 = 34 GFLOP take 90 us at 380 TFLOP/s: from 32 rows or so arithmetic
// bounds it, and the prefix passes once for each TILE / group rows, from L2 but for the first time.
// Up to 16 rows (64 packed queries) the bytes of the prefix do.
#include "attention_tile.cuh"

struct Parameters {
  const TYPE* q;
  const CACHE* k_cache;
  const CACHE* v_cache;
  const float* k_scale;
  const float* v_scale;
  float* partial_out;
  float* partial_lse;
  const int* items;
  const int* num_items;
  const int* members;
  const int* slots;
  const int* block_tables;
  const int* partial_start;
  int q_stride;
  int group;
  int num_kv_heads;
  int page_shift;
  int table_stride;
  float scale_log2;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

// What a block computes, read from memory.
struct Work {
  const int* members;
  int count, begin, end, split;

  DEVICE explicit Work(const Parameters& p) {
    const int* item = p.items + blockIdx.y * ITEM_FIELDS;
    members = p.members + item[0];
    count = item[1];
    begin = item[2];
    end = item[3];
    split = item[4];
  }
  // Row and query head of packed query m.
  DEVICE int row(const Parameters& p, int m) const { return members[m / p.group]; }
  DEVICE static int head(const Parameters& p, int m) {
    return static_cast<int>(blockIdx.x) * p.group + m % p.group;
  }
};

DEVICE void attend(const Parameters& p, AttentionTile& tile) {
  const Work work(p);
  tile.load_queries(work.count * p.group, [&](int m) {
    return p.q + static_cast<i64>(work.row(p, m)) * p.q_stride + work.head(p, m) * HEAD_DIM;
  });
  KeyRange keys;
  keys.begin = work.begin;
  keys.end = work.end;
  keys.table = static_cast<i64>(p.slots[work.members[0]]) * p.table_stride;
  keys.inner = {0, work.end - 1};
  keys.position = work.end;
  const PagedCache cache{p.k_cache, p.v_cache, p.k_scale, p.v_scale, p.block_tables,
                         p.num_kv_heads, static_cast<int>(blockIdx.x), p.page_shift};
  tile.attend(cache, keys, [](const KeyRange& keys, int) { return keys.inner; });
}

DEVICE void store(const Parameters& p, AttentionTile& tile) {
  const Work work(p);  // read again: the loop over the keys has no registers to keep it in
  const int num_heads = p.num_kv_heads * p.group;
  tile.store_partial(work.count * p.group, p.partial_out, p.partial_lse, [&](int m) {
    const i64 partial = p.partial_start[work.row(p, m)] + work.split;
    return partial * num_heads + work.head(p, m);
  });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
prefix_attention(const Parameters p) {
  DYNAMIC_SHARED(shared);
  if (static_cast<int>(blockIdx.y) >= *p.num_items) return;
  AttentionTile tile(shared, p.scale_log2);
  attend(p, tile);
  store(p, tile);
}
