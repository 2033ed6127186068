#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

template <class Dots>
struct RoundedTiles {
  template <int Rows, int Strips>
  static constexpr TileFunction of() {
    return multiply_rounded_tile<Dots, Rows, Strips>;
  }
};

template <class Dots>
constexpr TileTable<kTileRows> kTiles = table_of<RoundedTiles<Dots>>();

template <class... Dots>
constexpr std::array<const TileTable<kTileRows>*, sizeof...(Dots)> tables_of(DotsOf<Dots...>) {
  return {&kTiles<Dots>...};
}

constexpr auto kTables = tables_of(RoundedDots());

// An extension that isn't one of these dots leaves them as they are.
const TileTable<kTileRows>& table_for(size_t extension) {
  return *kTables[extension < kTables.size() ? extension : 0];
}

}  // namespace

const Kernels kRoundedKernels[] = {{table_for(0)}, {table_for(1)}, {table_for(2)}};

}  // namespace trioserve::TRIOSERVE_ISA
