#include "product_strips.h"

namespace trioserve {

using Nibbles = NibbleWeights<0, true>;

static constexpr TileTable kTiles = tile_table<Nibbles>();
const Kernels kNibbleMinimumKernels = {kTiles, Nibbles::kRecord, decode_record<Nibbles>,
                                       &kDecodedMinimumTiles, DecodedWeights<true>::kRecord};

}  // namespace trioserve
