#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {

static constexpr auto kTiles = tile_table<ByteWeights>();
TRIOSERVE_EVEN_ODD(ByteWeights);
const Kernels kByteKernels = {kTiles, decode_record<ByteWeights>,
                              &kDecodedTiles, DecodedWeights<true, false>::kRecord, kEvenOddTiles};

}  // namespace trioserve::TRIOSERVE_ISA
