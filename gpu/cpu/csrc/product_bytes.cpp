#include "product_vectors.h"

namespace trioserve {

static constexpr auto kTiles = tile_table<ByteWeights>();
static constexpr auto kEvenOdd = tile_table<ByteWeights, EvenOddSums, kEvenOddRows>();
const Kernels kByteKernels = {kTiles, decode_record<ByteWeights>,
                              &kDecodedTiles, DecodedWeights<false>::kRecord, &kEvenOdd};

}  // namespace trioserve
