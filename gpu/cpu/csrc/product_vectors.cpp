#include "product_vectors.h"

#include "extension.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Inputs at a time, so that three strips and the three that come next fit into the cache of a core.
constexpr int64_t kPanelInputs = 4096;
// Up to so many rows weights are widened by every group of them for itself.
constexpr int64_t kDirectRows = 8;
// Rows at a time, so that their activations stay in that cache too while the weights pass by.
constexpr int64_t kChunkBytes = 384 << 10;

class VectorTiles final : public TileKernels {
 public:
  int64_t chunk_rows(Kind, const Product& product) const override {
    const int64_t rows = kChunkBytes / (product.inputs * static_cast<int64_t>(sizeof(Activation)));
    return std::max<int64_t>(rows / kTileRows, 4) * kTileRows;
  }

  ChunkPlan begin_chunk(Kind kind, const Product&, int64_t rows) const override {
    ChunkPlan plan;
    plan.groups = (rows + kTileRows - 1) / kTileRows;
    plan.max_strips = strips_for(static_cast<int>((rows + plan.groups - 1) / plan.groups));
    plan.max_blocks = kPanelInputs / kBlock;
    if (rows > kDirectRows) {
      const Kernels& kernels = kernels_of(kind);
      plan.decode = kernels.decode;
      plan.decoded_record = kernels.decoded_record;
    }
    return plan;
  }

  void compute(Kind kind, const Tile& tile, const ChunkPlan& plan, int strips) const override {
    const Kernels& kernels = kernels_of(kind);
    const TileTable<kTileRows>& table = plan.decode != nullptr ? *kernels.decoded : kernels.direct;
    table[tile.rows - 1][strips - 1](tile);
  }

  int64_t totals(const Product& product, int64_t max_rows) const override {
    const int64_t rows =
        product.inputs > kPanelInputs ? std::min(max_rows, chunk_rows(Kind::kBf16, product)) + kTileRows : kTileRows;
    return rows * kTileStrips * kStrip;
  }

  int64_t panel_bytes(const Product& product) const override {
    const int64_t blocks = std::min(product.inputs, kPanelInputs) / kBlock;
    return blocks * kTileStrips * DecodedWeights<true, true>::kRecord;
  }
};

constexpr VectorTiles kTiles;

}  // namespace

const Kernels& kernels_of(Kind kind) {
  switch (kind) {
    case Kind::kQ8_0:
      return kByteKernels;
    case Kind::kQ4_0:
      return kNibbleKernels;
    case Kind::kQ4_1:
      return kNibbleMinimumKernels;
    case Kind::kW8A8:
      return kRoundedKernels[static_cast<int>(current_extension())];
    default:
      return kPlainKernels;
  }
}

const TileKernels& kVectorTiles = kTiles;

}  // namespace trioserve::TRIOSERVE_ISA
