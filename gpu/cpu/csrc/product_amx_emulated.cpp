// Nothing but where bfloat16 is multiplied by AVX-512 otherwise.
#ifdef __AVX512BF16__

#include "product_matrix.h"

namespace trioserve::TRIOSERVE_ISA {

static constexpr MatrixTiles<EmulatedUnit> kTiles;
const TileKernels& kEmulatedAmxTiles = kTiles;

}  // namespace trioserve::TRIOSERVE_ISA

#endif
