#include "product_matrix.h"

namespace trioserve {

static constexpr MatrixTiles<AmxUnit> kTiles;
const TileKernels& kAmxTiles = kTiles;

}  // namespace trioserve
