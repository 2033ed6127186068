#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {

const TileTable<kTileRows> kDecodedTiles = tile_table<DecodedWeights<true, false>>();
const TileTable<kTileRows> kDecodedMinimumTiles = tile_table<DecodedWeights<true, true>>();

}  // namespace trioserve::TRIOSERVE_ISA
