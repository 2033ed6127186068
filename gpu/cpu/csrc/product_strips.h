// A thread's strips of one segment: how they are cut into tiles, and where their results go.
#pragma once

#include <array>
#include <utility>

#include "product_tile.h"

namespace trioserve {

// Inputs at a time, so that three strips and the three that come next fit into the cache of a core.
inline constexpr int64_t kPanelInputs = 4096;

// Weights that will be read next.
struct Region {
  const uint8_t* first = nullptr;
  int64_t bytes = 0;
};

// One call of multiply() as one thread sees it.
struct Work {
  const Product& product;
  const void* x;  // bf16, or RoundedBlock for w8a8
  int64_t x_stride;
  const float* x_sums;  // [rows][inputs / 32], for weights with minimums
  int64_t rows;
  void* y;
  bool to_float;
  float* totals;   // of totals_bytes()
  uint8_t* panel;  // of panel_bytes()
};

// Rows at a time, so that their activations stay in that cache too while the weights pass by.
inline constexpr int64_t kChunkBytes = 384 << 10;

inline int64_t chunk_rows(const Product& product) {
  const int64_t rows = kChunkBytes / (product.inputs * 2);
  return std::max<int64_t>(rows / kTileRows, 4) * kTileRows;
}

inline size_t totals_bytes(const Product& product, int64_t max_rows) {
  const int64_t rows = product.inputs > kPanelInputs ? std::min(max_rows, chunk_rows(product)) : 0;
  return static_cast<size_t>(std::max<int64_t>(rows, kTileRows) * kTileStrips * kStrip) * sizeof(float);
}

// Room for decoded weights of a tile's strips.
inline size_t panel_bytes(const Product& product) {
  const int64_t blocks = std::min(product.inputs, kPanelInputs) / kBlock;
  return static_cast<size_t>(blocks * kTileStrips * DecodedWeights<true>::kRecord);
}

// Where a part of the rows begins, of `parts` that are about equally large.
inline int64_t part_start(int64_t rows, int64_t parts, int64_t part) { return rows * part / parts; }

// Totals [rows][strips][16] into y, with the bias.
void write_totals(const Work& work, const Segment& segment, int64_t strip, int strips, int64_t row,
                  int64_t rows, const float* totals);

// The functions for every number of rows and strips: table[rows - 1][strips - 1].
using TileTable = std::array<std::array<TileFunction, kTileStrips>, kTileRows>;

template <class Weights>
constexpr TileTable tile_table() {
  return []<int... Rows>(std::integer_sequence<int, Rows...>) {
    return TileTable{{{multiply_tile<Weights, Rows + 1, 1>, multiply_tile<Weights, Rows + 1, 2>,
                       multiply_tile<Weights, Rows + 1, 3>}...}};
  }(std::make_integer_sequence<int, kTileRows>());
}

// How weights of one kind are multiplied.
struct Kernels {
  const TileTable& direct;
  size_t record;
  // For more rows than a tile's: what makes a record one of DecodedWeights, and its tiles. Or null.
  void (*decode)(const uint8_t* record, uint8_t* decoded) = nullptr;
  const TileTable* decoded = nullptr;
  size_t decoded_record = 0;
};

extern const TileTable kDecodedTiles, kDecodedMinimumTiles;

const Kernels& kernels_of(Kind kind);
extern const Kernels kPlainKernels, kByteKernels, kNibbleKernels, kNibbleMinimumKernels, kRoundedKernels;

// The first weights of a thread that has `strips` as its share of a segment.
Region first_region(const Segment& segment, int64_t inputs, Share strips);

// Computes a share of a segment's strips, and brings `upcoming` meanwhile.
void multiply_strips(const Work& work, const Segment& segment, Share strips, Region upcoming);

}  // namespace trioserve
