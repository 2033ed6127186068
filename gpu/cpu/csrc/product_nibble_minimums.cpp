#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {

using Nibbles = NibbleWeights<0, true>;

static constexpr auto kTiles = tile_table<Nibbles>();
TRIOSERVE_EVEN_ODD(Nibbles);
const Kernels kNibbleMinimumKernels = {kTiles, decode_record<Nibbles>,
                                       &kDecodedMinimumTiles, DecodedWeights<true, true>::kRecord, kEvenOddTiles};

}  // namespace trioserve::TRIOSERVE_ISA
