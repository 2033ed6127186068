#include "product_vectors.h"

namespace trioserve {

using Nibbles = NibbleWeights<8, false>;

static constexpr auto kTiles = tile_table<Nibbles>();
static constexpr auto kEvenOdd = tile_table<Nibbles, EvenOddSums, kEvenOddRows>();
const Kernels kNibbleKernels = {kTiles, decode_record<Nibbles>, &kDecodedTiles,
                                DecodedWeights<false>::kRecord, &kEvenOdd};

}  // namespace trioserve
