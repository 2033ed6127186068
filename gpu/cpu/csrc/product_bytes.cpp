#include "product_strips.h"

namespace trioserve {

static constexpr TileTable kTiles = tile_table<ByteWeights>();
const Kernels kByteKernels = {kTiles, ByteWeights::kRecord, decode_record<ByteWeights>,
                              &kDecodedTiles, DecodedWeights<false>::kRecord};

}  // namespace trioserve
