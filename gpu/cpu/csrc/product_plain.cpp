#include "product_strips.h"

namespace trioserve {

static constexpr TileTable kTiles = tile_table<PlainWeights>();
const Kernels kPlainKernels = {kTiles, PlainWeights::kRecord};

}  // namespace trioserve
