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

// The addresses that a lane gives to ldmatrix, for 16 x 16 blocks of a tile of 16-bit elements.
//
// The swizzle repeats every eight rows, and moves pairs of chunks within PERIOD neighbors. So all
// addresses follow from the one for the first block: flip the bits that count pairs within PERIOD,
// and add a constant, which costs no instruction. The tile must start at a multiple of 128 bytes.
template <int COLUMNS> struct BlockAddresses {
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int PERIOD = CHUNKS % 8 == 0 ? 4 : CHUNKS % 4 == 0 ? 2 : 1;
  SharedAddress first;

  // Within a block this lane gives the address of chunk `half` (0, 1) of row `row` (0..15).
  DEVICE BlockAddresses(void* tile, int row, int half)
      : first(shared_address(tile) + 2 * swizzled<COLUMNS>(row, half)) {}

  // Matrices 0 and 1 are the upper and lower half of the first eight columns, 2 and 3 those of the
  // last eight: the order of an A fragment, and transposed that of two B fragments.
  DEVICE static BlockAddresses down_first(void* tile) {
    const int lane = threadIdx.x % 32;
    return {tile, lane % 16, lane / 16};
  }

  // Matrices 0 and 1 are the left and right half of the first eight rows, 2 and 3 those of the last
  // eight: not transposed, the order of two B fragments, which need neighboring registers.
  DEVICE static BlockAddresses right_first(void* tile) {
    const int lane = threadIdx.x % 32;
    return {tile, lane / 16 * 8 + lane % 8, lane / 8 % 2};
  }

  // For the block of rows 8 * row_group and on, columns 16 * column_group and on; both constants.
  DEVICE SharedAddress at(int row_group, int column_group) const {
    return flip_bits(first, column_group % PERIOD * 32) +
           (row_group * 8 * COLUMNS + column_group / PERIOD * PERIOD * 16) * 2;
  }

  // On to a tile so many bytes away.
  DEVICE void move(int bytes) { first += bytes; }
};
