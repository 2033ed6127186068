// tiled_attention.cu - tiles of queries attend to the paged cache: two kernels from one source.
//
// prefill_attention (SHARED_PREFIX = 0): causal attention of rows of several new tokens over their
// context. Row r has n = query_start[r + 1] - query_start[r] new tokens, the last n of its
// context_lens[r] positions. All positions, the new ones included, stand in the paged cache: a
// prefix from an earlier step, a shared one, or an earlier chunk is simply context. A query sees
// the positions up to its own, at most `window` of them.
//
// prefix_attention (SHARED_PREFIX = 1): decode rows that share the beginning of their context
// attend to it together. If the block tables of rows begin with the same pages (a system prompt,
// several samples of one prompt), each would read those pages; a group of them reads them once. All
// keys come before all queries, so nothing is masked. The result is partial; decode_attention
// attends to the rest of each row, and combine_partials merges both. Cascade attention: Ye et al.,
// "Cascade Inference", 2024; Juravsky et al., "Hydragen", 2024.
//
//   q             [tokens, >= num_heads, HEAD_DIM], q_stride elements from token to token
//   k/v_cache     [num_pages, num_kv_heads, page_size, HEAD_DIM]; k/v_scale without the last axis
//   out           [tokens, num_heads, HEAD_DIM]; prefill_attention only
//   partial_out   [num_partials, num_heads, HEAD_DIM] float32
//   partial_lse   [num_partials, num_heads] float32, log2 units
//   items         [gridDim.y, 5] = {row, first_token, begin, end, split}, or for prefix_attention
//                 {first, count, begin, end, split}, num_items of them
//   members       row indices; prefix_attention only
//   block_tables  [num_slots, table_stride]; row r's is that of slot slots[r]
//
// Grid (num_kv_heads, items): a block computes an item for one kv head: queries that fit the tile
// (at most TILE / group tokens) over the positions begin..end-1 as far as they see them. begin, and
// an end that cuts off what they see, are multiples of 64, where tiles of keys begin. The queries:
//
//   prefill_attention   the tokens first_token, first_token + 1, ... of the row
//   prefix_attention    the tokens of rows members[first] .. members[first + count - 1]; a decode
//                       row is one token, and the pages are those of the first of the rows
//
// Token t's result goes to partial result partial_start[t] + split, for combine_partials; only if
// split = -1, in prefill_attention, it is whole and goes to out. A captured launch of
// prefix_attention is replayed: all that changes from step to step is read from device memory, and
// blocks past num_items return at once.
//
// Tiling: see attention_tile.cuh; keys come in tiles by paged_tiles.cuh. Tiles that no query of the
// block sees are skipped; only those that some do not see are masked.
//
// Roofline on an H200, 32 query and 8 kv heads, HEAD_DIM 128.
//
// prefill_attention, a chunk of 8192 tokens from position 0: 4 * 32 * 128 * 8192^2 / 2 = 550 GFLOP
// against 200 MB, so arithmetic bounds it. mma.sync reaches about 0.62 of the 990 TFLOP/s of wgmma.
// Of a tile of 128 x 64, a warp issues 256 mma (6.5 cycles each, 1664), 80 ldmatrix, 64
// exponentials (8 cycles each, 512) and about 500 other instructions. Two warps on each scheduler
// overlap one's softmax with the other's mma: 3328 cycles of tensor core against about 1800 issue
// slots, and 0.75 of the shared memory's rate. Expected: 380 to 430 TFLOP/s, 1.3 to 1.45 ms. A
// chunk of few tokens over a long context is bounded by the bytes of keys and values, which are
// read once for each TILE / group tokens (from the second on, from L2).
//
// prefix_attention, 256 rows and a prefix of 8192 positions: the prefix is 34 MB, 8 us at 4.3 TB/s;
// 256 rows reading it each are 8.6 GB, 2 ms. Its 4 * 32 * 128 * 256 * 8192 = 34 GFLOP take 90 us at
// 380 TFLOP/s: from 32 rows or so arithmetic bounds it, and the prefix passes once for each TILE /
// group rows, from L2 but for the first time. Up to 16 rows (64 packed queries) the bytes of the
// prefix do.
#include "attention_tile.cuh"

struct Parameters {
  const TYPE* q;
  const CACHE* k_cache;
  const CACHE* v_cache;
  const float* k_scale;
  const float* v_scale;
  TYPE* out;
  float* partial_out;
  float* partial_lse;
  const int* items;
  const int* num_items;
  const int* members;
  const int* query_start;
  const int* context_lens;
  const int* slots;
  const int* block_tables;
  const int* partial_start;
  int q_stride;
  int group;
  int num_kv_heads;
  int page_shift;
  int table_stride;
  int window;
  float scale_log2;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

// The item of a block of prefill_attention, read from memory.
struct Chunk {
  int row, start, tokens, position, begin, end, split;

  DEVICE explicit Chunk(const Parameters& p) {
    const int* item = p.items + blockIdx.y * ITEM_FIELDS;
    row = item[0];
    begin = item[2];
    end = item[3];
    split = item[4];
    const int row_start = p.query_start[row];
    const int row_tokens = p.query_start[row + 1] - row_start;
    tokens = min(TILE / p.group, row_tokens - item[1]);
    start = row_start + item[1];                                // of its tokens, in q and out
    position = p.context_lens[row] - row_tokens + item[1];      // of the first one, in the context
  }
  // Token of packed query m.
  DEVICE int token(const Parameters& p, int m) const { return start + m / p.group; }
  DEVICE KeyRange keys(const Parameters& p) const {
    const int last_position = position + tokens - 1;
    KeyRange keys;
    keys.begin = max(begin, position - p.window + 1);
    keys.end = min(end, last_position + 1);
    keys.table = static_cast<i64>(p.slots[row]) * p.table_stride;
    keys.inner = {last_position - p.window + 1, min(keys.end - 1, position)};
    keys.position = position;
    return keys;
  }
  // The positions that packed query m sees.
  DEVICE static Span seen(const Parameters& p, const KeyRange& keys, int m) {
    const int own = keys.position + m / p.group;
    return {own - p.window + 1, min(keys.end - 1, own)};
  }
};

// The item of a block of prefix_attention, read from memory.
struct SharingRows {
  const int* members;
  int tokens, begin, end, split;

  DEVICE explicit SharingRows(const Parameters& p) {
    const int* item = p.items + blockIdx.y * ITEM_FIELDS;
    members = p.members + item[0];
    tokens = item[1];
    begin = item[2];
    end = item[3];
    split = item[4];
  }
  DEVICE int token(const Parameters& p, int m) const { return members[m / p.group]; }
  DEVICE KeyRange keys(const Parameters& p) const {
    KeyRange keys;
    keys.begin = begin;
    keys.end = end;
    keys.table = static_cast<i64>(p.slots[members[0]]) * p.table_stride;
    keys.inner = {0, end - 1};
    keys.position = end;
    return keys;
  }
  DEVICE static Span seen(const Parameters&, const KeyRange& keys, int) { return keys.inner; }
};

#if SHARED_PREFIX
#define ENTRY prefix_attention
using Item = SharingRows;
#else
#define ENTRY prefill_attention
using Item = Chunk;
#endif

// Query head of packed query m.
DEVICE int head(const Parameters& p, int m) {
  return static_cast<int>(blockIdx.x) * p.group + m % p.group;
}

DEVICE void attend(const Parameters& p, AttentionTile& tile) {
  const Item item(p);
  tile.load_queries(item.tokens * p.group, [&](int m) {
    const int query_head = head(p, m);  // first: the token then takes no second division
    return p.q + static_cast<i64>(item.token(p, m)) * p.q_stride + query_head * HEAD_DIM;
  });
  const PagedCache cache{p.k_cache, p.v_cache, p.k_scale, p.v_scale, p.block_tables,
                         p.num_kv_heads, static_cast<int>(blockIdx.x), p.page_shift};
  tile.attend(cache, item.keys(p),
              [&](const KeyRange& keys, int m) { return Item::seen(p, keys, m); });
}

DEVICE void store(const Parameters& p, AttentionTile& tile) {
  const Item item(p);  // read again: the loop over the keys has no registers to keep it in
  const int num_queries = item.tokens * p.group, num_heads = p.num_kv_heads * p.group;
  if (!SHARED_PREFIX && item.split < 0) {
    tile.store(num_queries, [&](int m) {
      const i64 token = item.token(p, m);
      return p.out + (token * num_heads + head(p, m)) * HEAD_DIM;
    });
  } else {
    tile.store_partial(num_queries, p.partial_out, p.partial_lse, [&](int m) {
      const i64 partial = p.partial_start[item.token(p, m)] + item.split;
      return partial * num_heads + head(p, m);
    });
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS) ENTRY(const Parameters p) {
  DYNAMIC_SHARED(shared);
  if (SHARED_PREFIX && static_cast<int>(blockIdx.y) >= *p.num_items) return;
  AttentionTile tile(shared, p.scale_log2);
  attend(p, tile);
  store(p, tile);
}
