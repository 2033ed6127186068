// decode_tiles.cuh - decode_attention's tiles: 16 positions of keys or values, in a warp's own ring.
//
// A tile is TILE rows of CHUNKS 16-byte chunks, swizzled. A stage of the ring is a tile of keys, one
// of values, and their scales if the cache is e4m3; a warp has STAGES of them.
//
// Compile-time choices: HEAD_DIM, CACHE (TYPE or e4m3), NUM_THREADS, STAGES.
#pragma once
#include "hardware.cuh"

constexpr int D = HEAD_DIM;
constexpr int WARPS = NUM_THREADS / 32;
constexpr int TILE = 16;            // positions of a tile
constexpr int STEP = WARPS * TILE;  // positions from one tile of a warp to its next
constexpr bool QUANTIZED = sizeof(CACHE) == 1;
constexpr int CHUNKS = D * sizeof(CACHE) / 16;  // 16-byte chunks of a row
constexpr int WAYS = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
constexpr int FRAGMENTS = (CHUNKS + 1) / 2;  // ldmatrix instructions of a tile
constexpr int TILE_BYTES = TILE * CHUNKS * 16;
constexpr int SCALE_BYTES = QUANTIZED ? TILE * 4 : 0;
constexpr int STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;

// Byte offset in a tile of a row's 16-byte chunk. ldmatrix reads one chunk of 8 neighboring rows
// at a time and has no conflict if these fall into 8 different chunks of 128 bytes. Rows are CHUNKS
// apart, so without the XOR they would take only 8 / WAYS different places; the XOR moves each
// set of rows that share a place to WAYS different ones, inside aligned runs of WAYS chunks.
DEVICE int swizzled(int row, int chunk) {
  return (row * CHUNKS + (chunk ^ (row / (8 / WAYS) & (WAYS - 1)))) * 16;
}

constexpr u32 ALL_ROWS = (1u << TILE) - 1;

// Which rows of the tile at `position` lie in begin .. end - 1: bit r for row r.
DEVICE u32 valid_rows(int position, int begin, int end) {
  return (ALL_ROWS << max(begin - position, 0)) & (ALL_ROWS >> max(position + TILE - end, 0));
}

// Start copying a tile to `tile`, an offset in shared memory. If not WHOLE, invalid rows become
// zeros.
template <bool WHOLE> DEVICE void copy_rows(u8* shared, u32 tile, const u8* from, u32 valid) {
  constexpr int ALL = TILE * CHUNKS;
  const int lane = threadIdx.x % 32;
  from = settled(from + lane * 16);
#pragma unroll
  for (int i = 0; i < (ALL + 31) / 32; i++) {
    if constexpr (32 % CHUNKS == 0) {
      // A pass of the warp is whole rows, so only the constant part of the XOR is new in each.
      constexpr int ROWS = 32 / CHUNKS;
      const int row = lane / CHUNKS, flip = i * ROWS / (8 / WAYS) % WAYS * 16;
      const u32 to = settled(tile + (swizzled(row, lane % CHUNKS) ^ flip));
      copy_async16(shared + to + i * 512, from + i * 512, WHOLE || valid >> row & 1u << i * ROWS);
    } else {
      const int chunk = i * 32 + lane, row = chunk / CHUNKS;
      const u32 to = tile + swizzled(row, chunk % CHUNKS);
      if (ALL % 32 == 0 || chunk < ALL)
        copy_async16(shared + to, from + i * 512, WHOLE || valid >> row & 1);
    }
  }
}
DEVICE void copy_tile(u8* shared, u32 tile, const u8* from, u32 valid) {
  if (valid == ALL_ROWS)
    copy_rows<true>(shared, tile, from, valid);
  else
    copy_rows<false>(shared, tile, from, valid);
}

// The address that a lane gives to the n-th ldmatrix of a tile: a row's chunk 2n + half.
DEVICE const u8* fragment(const u8* shared, u32 tile, int row, int half, int n) {
  // A last chunk without a partner is read twice.
  if (CHUNKS % 2 && 2 * n == CHUNKS - 1) return shared + tile + swizzled(row, 2 * n);
  // Only the XOR with the low bits of 2n differs from the first fragment; the rest is added.
  const u32 run = settled(tile + (swizzled(row, half) ^ 2 * n % WAYS * 16));
  return shared + run + 2 * n / WAYS * WAYS * 16;
}
