#include "product_vectors.h"

namespace trioserve {

static constexpr auto kTiles = tile_table<PlainWeights>();
const Kernels kPlainKernels = {kTiles};

}  // namespace trioserve
