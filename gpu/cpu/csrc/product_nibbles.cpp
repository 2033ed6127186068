#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {

using Nibbles = NibbleWeights<8, false>;

static constexpr auto kTiles = tile_table<Nibbles>();
TRIOSERVE_EVEN_ODD(Nibbles);
const Kernels kNibbleKernels = {kTiles, decode_record<Nibbles>, &kDecodedTiles,
                                DecodedWeights<true, false>::kRecord, kEvenOddTiles};

}  // namespace trioserve::TRIOSERVE_ISA
