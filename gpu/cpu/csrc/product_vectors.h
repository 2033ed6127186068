// The tiles of AVX-512: for each kind of weights a function for every number of rows and strips.
#pragma once

#include <array>
#include <utility>

#include "product_strips.h"

namespace trioserve {

// The functions for every number of rows and strips: table[rows - 1][strips - 1].
template <int Rows>
using TileTable = std::array<std::array<TileFunction, kTileStrips>, Rows>;

template <class Weights, class Sums = PairSums, int MaxRows = kTileRows>
constexpr TileTable<MaxRows> tile_table() {
  return []<int... Rows>(std::integer_sequence<int, Rows...>) {
    return TileTable<MaxRows>{
        {{multiply_tile<Weights, Sums, Rows + 1, 1>, multiply_tile<Weights, Sums, Rows + 1, 2>,
          multiply_tile<Weights, Sums, Rows + 1, 3>}...}};
  }(std::make_integer_sequence<int, MaxRows>());
}

inline constexpr int kEvenOddRows = 4;

// How weights of one kind are multiplied.
struct Kernels {
  const TileTable<kTileRows>& direct;
  // For more rows than a tile's: what makes a record one of DecodedWeights, and its tiles. Or null.
  void (*decode)(const uint8_t* record, uint8_t* decoded) = nullptr;
  const TileTable<kTileRows>* decoded = nullptr;
  int64_t decoded_record = 0;
  // The tiles of few rows in the order of a matrix unit. Or null.
  const TileTable<kEvenOddRows>* even_odd = nullptr;
};

const Kernels& kernels_of(Kind kind);

extern const TileTable<kTileRows> kDecodedTiles, kDecodedMinimumTiles;
extern const Kernels kPlainKernels, kByteKernels, kNibbleKernels, kNibbleMinimumKernels, kRoundedKernels;

}  // namespace trioserve
