#include "product_vectors.h"

namespace trioserve {

using Nibbles = NibbleWeights<0, true>;

static constexpr auto kTiles = tile_table<Nibbles>();
static constexpr auto kEvenOdd = tile_table<Nibbles, EvenOddSums, kEvenOddRows>();
const Kernels kNibbleMinimumKernels = {kTiles, decode_record<Nibbles>,
                                       &kDecodedMinimumTiles, DecodedWeights<true>::kRecord, &kEvenOdd};

}  // namespace trioserve
