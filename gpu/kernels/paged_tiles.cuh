// paged_tiles.cuh - tiles of keys and values on their way from the paged cache to shared memory.
//
// A tile is KEYS neighboring positions of one kv head, aligned to KEYS: rows of HEAD_DIM elements
// of TYPE, swizzled. Each warp copies KEYS / WARPS (at most 16) rows, which therefore lie in one
// page; its page id is read from the block table one tile ahead of the copies that need it. In a
// head-major page those rows are one stretch of memory, so every copy of a warp is 512 bytes in a
// row. Where no token lives the memory is not read, and the tile gets zeros.
//
// A cache of e4m3 is copied as it is to a place of the thread's own, 16 elements at a time; the
// same thread later widens them into the tile, so one such buffer is enough and no barrier stands
// between the copy and the widening.
//
// Compile-time choices: TYPE, CACHE (TYPE or e4m3), HEAD_DIM, KEYS, NUM_THREADS.
#pragma once
#include "swizzle.cuh"

constexpr int WARPS = NUM_THREADS / 32;
constexpr bool QUANTIZED = sizeof(CACHE) == 1;
constexpr int TILE_ELEMENTS = KEYS * HEAD_DIM;
constexpr int ROWS_PER_WARP = KEYS / WARPS;
constexpr int CHUNK_ELEMENTS = 16 / sizeof(CACHE);
constexpr int CHUNKS_PER_ROW = HEAD_DIM / CHUNK_ELEMENTS;
constexpr int CHUNKS_PER_WARP = ROWS_PER_WARP * CHUNKS_PER_ROW;
constexpr int PASSES = (CHUNKS_PER_WARP + 31) / 32;
constexpr int SCALE_CHUNKS = ROWS_PER_WARP / 4;  // of 16 bytes: four float32 scales
static_assert(ROWS_PER_WARP <= 16 && ROWS_PER_WARP % 4 == 0);
static_assert(HEAD_DIM % CHUNK_ELEMENTS == 0);

// e4m3 values go up to 448, so a value's scale times 448 is the largest value of its token. Value
// scales are handed on times half of 448: they stay in the range of half precision where the scales
// themselves would not, and leave room for a weight of up to 2. A weight should be at most 1, but
// float32 rounds a score of 2^21 to a quarter.
constexpr float VALUE_FACTOR = 224.f;

// Bytes of shared memory: for the keys and values of one tile, for the raw copies of one of e4m3,
// and for its scales.
constexpr int STAGE_BYTES = 2 * TILE_ELEMENTS * 2;
constexpr int RAW_BYTES = QUANTIZED ? 2 * PASSES * NUM_THREADS * 16 : 0;
constexpr int SCALE_BYTES = QUANTIZED ? 2 * KEYS * 4 : 0;

// One layer's cache, seen from one kv head.
struct PagedCache {
  const CACHE* k;        // [num_pages, num_kv_heads, page_size, HEAD_DIM]
  const CACHE* v;
  const float* k_scale;  // [num_pages, num_kv_heads, page_size]; e4m3 only
  const float* v_scale;
  const int* block_tables;
  int num_kv_heads, kv_head, page_shift;
};

// Positions first..last that one query sees.
struct Span { int first, last; };

// The keys of a block: from position begin, or from the start of its tile for queries that see
// those as well, up to end - 1. The loop over them keeps this in shared memory: registers are
// short.
struct KeyRange {
  int begin, end;
  i64 table;     // where the sequence's page ids begin among block_tables
  Span inner;    // what every query sees; tiles within it need no mask
  int position;  // of the first query; for the kernel's own use
};

// Where a thread's chunks go, pass after pass: if a pass is whole rows, each follows from the first
// by flipping bits of the swizzle and adding a constant. Else the places of up to eight rows are
// kept, after which they repeat.
constexpr bool WHOLE_ROWS = 32 % CHUNKS_PER_ROW == 0;
DEVICE constexpr int passes_of_eight_rows() {
  int passes = 1;
  while (passes < PASSES && passes * 32 % (8 * CHUNKS_PER_ROW)) passes++;
  return passes;
}
constexpr int PLACES = QUANTIZED || WHOLE_ROWS ? 1 : passes_of_eight_rows();

// Copies tile after tile: of TYPE to two stages in turn, STAGE_BYTES apart, each the keys and then
// the values; of e4m3 to one buffer. Positions from keys.end on, and whole pages below keys.begin,
// are not read: in their place are zeros.
struct TileLoader {
  const PagedCache& cache;
  SharedAddress places[PLACES];  // of the next tile
  int to_next_stage;
  int page;  // of this warp's rows of the next tile, or -1: they are not read

  DEVICE TileLoader(const PagedCache& cache, const KeyRange& keys, void* shared)
      : cache(cache), to_next_stage(STAGE_BYTES) {
    if constexpr (QUANTIZED) {
      places[0] = shared_address(shared) + threadIdx.x * 16;
    } else {
#pragma unroll
      for (int pass = 0; pass < PLACES; pass++) {
        const int chunk = threadIdx.x % 32 + 32 * pass;
        const int row = first_row() + chunk / CHUNKS_PER_ROW;
        const int to = swizzled<HEAD_DIM>(row, chunk % CHUNKS_PER_ROW);
        places[pass] = shared_address(shared) + 2 * to;
      }
    }
    // Later tiles begin past keys.begin.
    const int tile = keys.begin / KEYS, page_size = 1 << cache.page_shift;
    const int page_start = (tile * KEYS + first_row()) & -page_size;
    page = -1;
    if (page_start + page_size > keys.begin) find_page(keys, tile);
  }

  DEVICE int first_row() const { return static_cast<int>(threadIdx.x) / 32 * ROWS_PER_WARP; }
  DEVICE void find_page(const KeyRange& keys, int tile) {
    const int position = tile * KEYS + first_row();
    page = -1;
    if (position < keys.end) page = cache.block_tables[keys.table + (position >> cache.page_shift)];
  }

  // Index of this warp's first row among the cache's rows of HEAD_DIM elements.
  DEVICE i64 cache_row(int position) const {
    const i64 block = static_cast<i64>(max(page, 0)) * cache.num_kv_heads + cache.kv_head;
    return (block << cache.page_shift) + (position & ((1 << cache.page_shift) - 1));
  }

  // Where this thread's chunk of keys of a pass goes; that of values follows at a distance.
  DEVICE SharedAddress place(int pass) const {
    if constexpr (QUANTIZED) {
      return places[0] + pass * NUM_THREADS * 16;
    } else if constexpr (WHOLE_ROWS) {
      return flip_bits(places[0], pass * (32 / CHUNKS_PER_ROW) % 8 * 16) + pass * 32 * 16;
    } else {
      return places[pass % PLACES] + pass / PLACES * PLACES * 32 * 16;
    }
  }

  // Start the copies of a tile and look up the page of the one after it.
  DEVICE void load(const KeyRange& keys, int tile) {
    const int thread = QUANTIZED ? reread_thread_index() : threadIdx.x, lane = thread % 32;
    const int position = tile * KEYS + thread / 32 * ROWS_PER_WARP;
    // A row is valid if its position is; counted in chunks, that takes no division.
    const int num_valid = page >= 0 ? (keys.end - position) * CHUNKS_PER_ROW : 0;
    const i64 row_index = cache_row(position);
    const i64 offset = row_index * HEAD_DIM + lane * CHUNK_ELEMENTS;
    const CACHE* k = cache.k + offset;
    const CACHE* v = cache.v + offset;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const int chunk = lane + 32 * pass;
      if (CHUNKS_PER_WARP % 32 && chunk >= CHUNKS_PER_WARP) break;
      const bool valid = chunk < num_valid;
      const SharedAddress to = place(pass);
      copy_async16(to, k + pass * 32 * CHUNK_ELEMENTS, valid);
      copy_async16(to + (QUANTIZED ? RAW_BYTES / 2 : TILE_ELEMENTS * 2),
                   v + pass * 32 * CHUNK_ELEMENTS, valid);
    }
    if constexpr (QUANTIZED) {
      if (lane < 2 * SCALE_CHUNKS) {
        const float* scales = lane < SCALE_CHUNKS ? cache.k_scale : cache.v_scale;
        const int own = thread / 32 * 2 * SCALE_CHUNKS + lane;
        copy_async16(places[0] + RAW_BYTES + (own - thread) * 16,
                     scales + row_index + lane % SCALE_CHUNKS * 4, page >= 0);
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < PLACES; pass++) places[pass] += to_next_stage;
      to_next_stage = -to_next_stage;
    }
    copy_async_commit();
    find_page(keys, tile + 1);
  }

  // Widen what this thread copied of a tile of e4m3; its copies must have landed. `scales` gets
  // KEYS factors of the scores, then KEYS factors of the weights (times VALUE_FACTOR).
  DEVICE void widen(const KeyRange& keys, int tile, TYPE* k_tile, TYPE* v_tile, float* scales,
                    unsigned char* raw) {
    const int thread = reread_thread_index(), lane = thread % 32;
    const int first_row = thread / 32 * ROWS_PER_WARP;
#pragma unroll 1  // registers are short: the accumulators are live
    for (int pass = 0; pass < PASSES; pass++) {
      const int chunk = lane + 32 * pass;
      if (CHUNKS_PER_WARP % 32 && chunk >= CHUNKS_PER_WARP) break;
      const int row = first_row + chunk / CHUNKS_PER_ROW, first = chunk % CHUNKS_PER_ROW * 2;
      const unsigned char* own = raw + (pass * NUM_THREADS + thread) * 16;
      widen16(k_tile, row, first, own);
      widen16(v_tile, row, first, own + RAW_BYTES / 2);
    }
    if (lane < 2 * SCALE_CHUNKS) {
      const int own = thread / 32 * 2 * SCALE_CHUNKS + lane;
      const float4 four = *reinterpret_cast<const float4*>(raw + RAW_BYTES + own * 16);
      const float all[4] = {four.x, four.y, four.z, four.w};
      const int row = first_row + lane % SCALE_CHUNKS * 4;
      const bool value = lane >= SCALE_CHUNKS;
      float* to = scales + (value ? KEYS : 0) + row;
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[i] = tile * KEYS + row + i < keys.end ? all[i] * (value ? VALUE_FACTOR : 1.f) : 0.f;
    }
  }

  DEVICE static void widen16(TYPE* tile, int row, int first_chunk, const unsigned char* from) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    uint4 lower, upper;
    unpack_e4m3x4<TYPE>(raw.x, lower.x, lower.y);
    unpack_e4m3x4<TYPE>(raw.y, lower.z, lower.w);
    unpack_e4m3x4<TYPE>(raw.z, upper.x, upper.y);
    unpack_e4m3x4<TYPE>(raw.w, upper.z, upper.w);
    *reinterpret_cast<uint4*>(tile + swizzled<HEAD_DIM>(row, first_chunk)) = lower;
    *reinterpret_cast<uint4*>(tile + swizzled<HEAD_DIM>(row, first_chunk + 1)) = upper;
  }
};
