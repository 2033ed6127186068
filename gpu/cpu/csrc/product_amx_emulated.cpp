#include "product_matrix.h"

namespace trioserve {

static constexpr MatrixTiles<EmulatedUnit> kTiles;
const TileKernels& kEmulatedAmxTiles = kTiles;

}  // namespace trioserve
