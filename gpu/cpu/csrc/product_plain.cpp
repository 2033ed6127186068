#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {

static constexpr auto kTiles = tile_table<PlainWeights>();
const Kernels kPlainKernels = {kTiles};

}  // namespace trioserve::TRIOSERVE_ISA
