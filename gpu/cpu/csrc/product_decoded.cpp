#include "product_vectors.h"

namespace trioserve {

const TileTable<kTileRows> kDecodedTiles = tile_table<DecodedWeights<false>>();
const TileTable<kTileRows> kDecodedMinimumTiles = tile_table<DecodedWeights<true>>();

}  // namespace trioserve
