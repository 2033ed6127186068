#include "product_vectors.h"

namespace trioserve {
namespace {

constexpr TileTable<kTileRows> table() {
  return []<int... Rows>(std::integer_sequence<int, Rows...>) {
    return TileTable<kTileRows>{{{multiply_rounded_tile<Rows + 1, 1>, multiply_rounded_tile<Rows + 1, 2>,
                       multiply_rounded_tile<Rows + 1, 3>}...}};
  }(std::make_integer_sequence<int, kTileRows>());
}

constexpr TileTable<kTileRows> kTiles = table();

}  // namespace

const Kernels kRoundedKernels = {kTiles};

}  // namespace trioserve
