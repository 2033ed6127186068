#include "product_strips.h"

namespace trioserve {

const TileTable kDecodedTiles = tile_table<DecodedWeights<false>>();
const TileTable kDecodedMinimumTiles = tile_table<DecodedWeights<true>>();

}  // namespace trioserve
