// paged_tiles.cuh - tiles of keys and values on their way from the paged cache to shared memory.
//
// A tile is KEYS neighboring positions of one kv head, aligned to KEYS: rows of HEAD_DIM elements
// of TYPE, swizzled. Each warp copies KEYS / WARPS (at most 16) rows, which therefore lie in one
// page; its page id is read from the block table one tile ahead of the copies that need it. In a
// head-major page those rows are one stretch of memory, so every copy of a warp is 512 bytes in a
// row. Rows outside the keys asked for become zeros and their memory is never read.
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

// e4m3 values go up to 448. Value scales are handed on times 448: those are the largest values of
// their tokens, which stay in the range of half precision where the scales themselves would not.
constexpr float E4M3_MAX = 448.f;

// Bytes of shared memory for the raw copies of one tile of e4m3 and for its scales.
constexpr int RAW_BYTES = QUANTIZED ? 2 * PASSES * NUM_THREADS * 16 : 0;
constexpr int SCALE_BYTES = QUANTIZED ? 2 * KEYS * 4 : 0;

// One layer's cache, seen from one kv head of one sequence.
struct PagedCache {
  const CACHE* k;        // [num_pages, num_kv_heads, page_size, HEAD_DIM]
  const CACHE* v;
  const float* k_scale;  // [num_pages, num_kv_heads, page_size]; e4m3 only
  const float* v_scale;
  const int* table;      // the sequence's page ids
  int num_kv_heads, kv_head, page_shift;
};

// Copies tile after tile. `begin` and `end` bound the keys asked for.
struct TileLoader {
  const PagedCache& cache;
  int begin, end;
  int page;  // of this warp's rows of the next tile, or -1: none of them is asked for

  DEVICE TileLoader(const PagedCache& cache, int begin, int end, int first_tile)
      : cache(cache), begin(begin), end(end) {
    find_page(first_tile);
  }

  DEVICE int first_row() const { return static_cast<int>(threadIdx.x) / 32 * ROWS_PER_WARP; }
  DEVICE bool wanted(int position) const { return position >= begin && position < end; }

  DEVICE void find_page(int tile) {
    const int position = tile * KEYS + first_row();
    const bool any = position < end && position + ROWS_PER_WARP > begin;
    page = any ? cache.table[position >> cache.page_shift] : -1;
  }

  // Index of this warp's first row among the cache's rows of HEAD_DIM elements.
  DEVICE i64 cache_row(int position) const {
    const i64 block = static_cast<i64>(max(page, 0)) * cache.num_kv_heads + cache.kv_head;
    return (block << cache.page_shift) + (position & ((1 << cache.page_shift) - 1));
  }

  // Start the copies of a tile and look up the page of the one after it. `raw` is only used by a
  // cache of e4m3, `k_tile` and `v_tile` only by the others.
  DEVICE void load(int tile, TYPE* k_tile, TYPE* v_tile, unsigned char* raw) {
    const int lane = threadIdx.x % 32, position = tile * KEYS + first_row();
    const i64 row_index = cache_row(position);
    const CACHE* k = cache.k + row_index * HEAD_DIM;
    const CACHE* v = cache.v + row_index * HEAD_DIM;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const int chunk = lane + 32 * pass;
      if (CHUNKS_PER_WARP % 32 && chunk >= CHUNKS_PER_WARP) break;
      const int row = chunk / CHUNKS_PER_ROW;
      const bool valid = wanted(position + row);
      if constexpr (QUANTIZED) {
        unsigned char* own = raw + (pass * NUM_THREADS + threadIdx.x) * 16;
        copy_async16(own, k + chunk * CHUNK_ELEMENTS, valid);
        copy_async16(own + RAW_BYTES / 2, v + chunk * CHUNK_ELEMENTS, valid);
      } else {
        const int to = swizzled<HEAD_DIM>(first_row() + row, chunk % CHUNKS_PER_ROW);
        copy_async16(k_tile + to, k + chunk * CHUNK_ELEMENTS, valid);
        copy_async16(v_tile + to, v + chunk * CHUNK_ELEMENTS, valid);
      }
    }
    if constexpr (QUANTIZED) {
      if (lane < 2 * SCALE_CHUNKS) {
        const float* scales = lane < SCALE_CHUNKS ? cache.k_scale : cache.v_scale;
        copy_async16(raw_scales(raw), scales + row_index + lane % SCALE_CHUNKS * 4, page >= 0);
      }
    }
    copy_async_commit();
    find_page(tile + 1);
  }

  DEVICE float* raw_scales(unsigned char* raw) const {
    const int own = threadIdx.x / 32 * 2 * SCALE_CHUNKS + threadIdx.x % 32;
    return reinterpret_cast<float*>(raw + RAW_BYTES + own * 16);
  }

  // Widen what this thread copied of a tile of e4m3; its copies must have landed. `scales` gets
  // KEYS factors of the scores, then KEYS factors of the weights (times 448).
  DEVICE void widen(int tile, TYPE* k_tile, TYPE* v_tile, float* scales, unsigned char* raw) {
    const int lane = threadIdx.x % 32, position = tile * KEYS + first_row();
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const int chunk = lane + 32 * pass;
      if (CHUNKS_PER_WARP % 32 && chunk >= CHUNKS_PER_WARP) break;
      const int row = first_row() + chunk / CHUNKS_PER_ROW, first = chunk % CHUNKS_PER_ROW * 2;
      const unsigned char* own = raw + (pass * NUM_THREADS + threadIdx.x) * 16;
      widen16(k_tile, row, first, own);
      widen16(v_tile, row, first, own + RAW_BYTES / 2);
    }
    if (lane < 2 * SCALE_CHUNKS) {
      const float* own = raw_scales(raw);
      const int row = lane % SCALE_CHUNKS * 4;
      const bool value = lane >= SCALE_CHUNKS;
      float* to = scales + (value ? KEYS : 0) + first_row() + row;
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[i] = wanted(position + row + i) ? own[i] * (value ? E4M3_MAX : 1.f) : 0.f;
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
