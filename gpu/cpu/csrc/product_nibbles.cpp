#include "product_strips.h"

namespace trioserve {

using Nibbles = NibbleWeights<8, false>;

static constexpr TileTable kTiles = tile_table<Nibbles>();
const Kernels kNibbleKernels = {kTiles, Nibbles::kRecord, decode_record<Nibbles>, &kDecodedTiles,
                                DecodedWeights<false>::kRecord};

}  // namespace trioserve
