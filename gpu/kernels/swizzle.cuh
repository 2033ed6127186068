// swizzle.cuh - where an element of a tile stands in shared memory.
//
// A tile is rows of COLUMNS 16-bit elements, COLUMNS a multiple of 16, cut into chunks of 16 bytes.
// ldmatrix reads the same chunk of eight neighboring rows at once; the 32 banks hold eight chunks,
// so it is free of conflicts if those eight lie in different eighths. Rows are stored without
// padding, and the place of a chunk within its row is XORed with a number made of the row:
//   chunks of a row    eighth where row r begins    XORed with
//   multiple of 8      0                            r % 8
//   4 (mod 8)          4 (r % 2)                    r / 2 % 4
//   2 (mod 4)          2 (r % 4)                    r / 4 % 2
// The XOR never leaves the row: a row has a whole number of the 8, 4 or 2 chunks it permutes.
#pragma once
#include "hardware.cuh"

// The offset, in elements, of 16-byte chunk `chunk` of row `row`.
template <int COLUMNS> DEVICE int swizzled(int row, int chunk) {
  constexpr int CHUNKS = COLUMNS / 8;
  static_assert(CHUNKS % 2 == 0);
  const int flip = CHUNKS % 8 == 0 ? row & 7 : CHUNKS % 4 == 0 ? row >> 1 & 3 : row >> 2 & 1;
  return row * COLUMNS + (chunk ^ flip) * 8;
}
