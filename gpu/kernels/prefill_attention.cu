// prefill_attention.cu - causal attention of rows of several new tokens over their paged context.
//
// Row r has n = query_start[r + 1] - query_start[r] new tokens, the last n of its context_lens[r]
// positions. All positions, the new ones included, stand in the paged cache: a prefix from an
// earlier step, a shared one, or an earlier chunk is simply context. A query sees the positions up
// to its own, at most `window` of them.
//
//   q             [tokens, >= num_heads, HEAD_DIM], q_stride elements from token to token
//   k/v_cache     [num_pages, num_kv_heads, page_size, HEAD_DIM]; k/v_scale without the last axis
//   out           [tokens, num_heads, HEAD_DIM]
//   partial_out   [num_partials, num_heads, HEAD_DIM] float32
//   partial_lse   [num_partials, num_heads] float32, log2 units
//   items         [num_items, 5] = {row, first_token, begin, end, split}
//   block_tables  [num_slots, table_stride]; row r's is that of slot slots[r]
//
// Grid (num_kv_heads, num_items): a block computes an item for one kv head. An item is the tokens
// first_token, first_token + 1, ... of its row, as many as there are and as fit the tile (TILE /
// group), over the positions begin..end-1 as far as they see them; begin, and an end that cuts off
// what they see, are multiples of 64, where tiles of keys begin. split = -1: the result is written
// to out. Otherwise the keys of those tokens are spread over several items, and token t's share
// goes to partial result partial_start[t] + split, for combine_partials.
//
// Tiling: see attention_tile.cuh; keys come in tiles by paged_tiles.cuh. Tiles that no query of the
// block sees are skipped; only those that some do not see are masked.
//
// Roofline on an H200, 32 query and 8 kv heads, HEAD_DIM 128, a chunk of 8192 tokens from position
// 0: 4 * 32 * 128 * 8192^2 / 2 = 550 GFLOP against 200 MB, so arithmetic bounds it. mma.sync
// reaches about 0.62 of the 990 TFLOP/s of wgmma. Of a tile of 128 x 64, a warp issues 256 mma (6.5
// cycles each, 1664), 80 ldmatrix, 64 exponentials (8 cycles each, 512) and about 500 other
// instructions. Two warps on each scheduler overlap one's softmax with the other's mma: 3328 cycles
// of tensor core against about 1800 issue slots, and 0.75 of the shared memory's rate. Expected:
// 380 to 430 TFLOP/s, 1.3 to 1.45 ms. A chunk of few tokens over a long context is bounded by the
// bytes of keys and values, which are read once for each TILE / group tokens (from the second on,
// from L2).
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

// What a block computes, read from memory.
struct Work {
  int row, start, tokens, position, begin, end, split;

  DEVICE explicit Work(const Parameters& p) {
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
  // Token and query head of packed query m.
  DEVICE int token(const Parameters& p, int m) const { return start + m / p.group; }
  DEVICE static int head(const Parameters& p, int m) {
    return static_cast<int>(blockIdx.x) * p.group + m % p.group;
  }
};

DEVICE void attend(const Parameters& p, AttentionTile& tile) {
  const Work work(p);
  tile.load_queries(work.tokens * p.group, [&](int m) {
    return p.q + static_cast<i64>(work.token(p, m)) * p.q_stride + work.head(p, m) * HEAD_DIM;
  });
  const int last_position = work.position + work.tokens - 1;
  KeyRange keys;
  keys.begin = max(work.begin, work.position - p.window + 1);
  keys.end = min(work.end, last_position + 1);
  keys.table = static_cast<i64>(p.slots[work.row]) * p.table_stride;
  keys.inner = {last_position - p.window + 1, min(keys.end - 1, work.position)};
  keys.position = work.position;
  const PagedCache cache{p.k_cache, p.v_cache, p.k_scale, p.v_scale, p.block_tables,
                         p.num_kv_heads, static_cast<int>(blockIdx.x), p.page_shift};
  tile.attend(cache, keys, [&](const KeyRange& keys, int m) -> Span {
    const int own = keys.position + m / p.group;
    return {own - p.window + 1, min(keys.end - 1, own)};
  });
}

DEVICE void store(const Parameters& p, AttentionTile& tile) {
  const Work work(p);  // read again: the loop over the keys has no registers to keep it in
  const int num_queries = work.tokens * p.group, num_heads = p.num_kv_heads * p.group;
  if (work.split < 0) {
    tile.store(num_queries, [&](int m) {
      const i64 token = work.token(p, m);
      return p.out + (token * num_heads + work.head(p, m)) * HEAD_DIM;
    });
  } else {
    tile.store_partial(num_queries, p.partial_out, p.partial_lse, [&](int m) {
      const i64 partial = p.partial_start[work.token(p, m)] + work.split;
      return partial * num_heads + work.head(p, m);
    });
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
prefill_attention(const Parameters p) {
  DYNAMIC_SHARED(shared);
  AttentionTile tile(shared, p.scale_log2);
  attend(p, tile);
  store(p, tile);
}
