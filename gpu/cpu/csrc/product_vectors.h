// The tiles of vector registers: for each kind of weights a function for every number of rows and strips.
#pragma once

#include <array>
#include <utility>

#include "product_strips.h"

namespace trioserve::TRIOSERVE_ISA {

// The functions for every number of rows and strips: table[rows - 1][strips - 1].
template <int Rows>
using TileTable = std::array<std::array<TileFunction, kTileStrips>, Rows>;

// The table of Tiles::of<rows, strips>(), with null where there are too few registers.
template <class Tiles, int MaxRows = kTileRows>
constexpr TileTable<MaxRows> table_of() {
  const auto tile = []<int Rows, int Strips>() -> TileFunction {
    if constexpr (Strips <= strips_for(Rows)) return Tiles::template of<Rows, Strips>();
    return nullptr;
  };
  return [&]<int... Rows>(std::integer_sequence<int, Rows...>) {
    return TileTable<MaxRows>{
        {{tile.template operator()<Rows + 1, 1>(), tile.template operator()<Rows + 1, 2>(),
          tile.template operator()<Rows + 1, 3>()}...}};
  }(std::make_integer_sequence<int, MaxRows>());
}

template <class Weights, class Sums = PairSums>
struct TilesOf {
  template <int Rows, int Strips>
  static constexpr TileFunction of() {
    return multiply_tile<Weights, Sums, Rows, Strips>;
  }
};

template <class Weights>
constexpr TileTable<kTileRows> tile_table() {
  return table_of<TilesOf<Weights>>();
}

inline constexpr int kEvenOddRows = 4;

// The tiles of few rows in the order of a matrix unit, where there may be one.
#ifdef __AVX512BF16__
// Even and odd inputs are added up apart: see matrix_unit.h.
struct EvenOddSums {
  Floats even = zeros(), odd = zeros();

  void add(Operand x, Operand weights) {
    even = fma(first_of_pairs(x), first_of_pairs(weights), even);
    odd = fma(second_of_pairs(x), second_of_pairs(weights), odd);
  }
  Floats value() const { return even + odd; }
};

template <class Weights>
constexpr TileTable<kEvenOddRows> even_odd_table() {
  return table_of<TilesOf<Weights, EvenOddSums>, kEvenOddRows>();
}
#define TRIOSERVE_EVEN_ODD(Weights)                                        \
  static constexpr auto kEvenOdd = even_odd_table<Weights>();              \
  static constexpr const TileTable<kEvenOddRows>* kEvenOddTiles = &kEvenOdd
#else
#define TRIOSERVE_EVEN_ODD(Weights) \
  static constexpr const TileTable<kEvenOddRows>* kEvenOddTiles = nullptr
#endif

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
extern const Kernels kPlainKernels, kByteKernels, kNibbleKernels, kNibbleMinimumKernels;
// By extension.
extern const Kernels kRoundedKernels[];

}  // namespace trioserve::TRIOSERVE_ISA
