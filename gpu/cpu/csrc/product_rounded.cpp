#include "product_strips.h"

namespace trioserve {
namespace {

constexpr TileTable table() {
  return []<int... Rows>(std::integer_sequence<int, Rows...>) {
    return TileTable{{{multiply_rounded_tile<Rows + 1, 1>, multiply_rounded_tile<Rows + 1, 2>,
                       multiply_rounded_tile<Rows + 1, 3>}...}};
  }(std::make_integer_sequence<int, kTileRows>());
}

constexpr TileTable kTiles = table();

}  // namespace

const Kernels kRoundedKernels = {kTiles, kRoundedRecord};

}  // namespace trioserve
