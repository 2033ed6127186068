// A thread's strips of one segment: how they are cut into tiles, and where their results go.
#pragma once

#include <array>
#include <utility>

#include "product_tile.h"

namespace trioserve::TRIOSERVE_ISA {

// Weights that will be read next.
struct Region {
  const uint8_t* first = nullptr;
  int64_t bytes = 0;
};

// What y gets: sums, rounded or not, those of each slice of the inputs, or silu(gate) * up of two weights'
// sums.
enum class Results { kRounded, kFloat, kSlices, kGated };

// One call of multiply() as one thread sees it.
struct Work {
  const Product& product;
  const void* x;  // Activation, or RoundedBlock for w8a8
  int64_t x_stride;
  const float* x_sums;  // [rows][inputs / 32], for weights with minimums
  int64_t rows;
  int64_t slice_blocks;  // inputs that are summed by themselves, in blocks: all, or those of a slice
  int64_t slice_stride;  // from a slice's results to the next one's
  void* y;
  Results results;
  float* totals;   // of totals_bytes()
  uint8_t* panel;  // of panel_bytes()

  bool rounds() const { return results == Results::kRounded || results == Results::kGated; }
  float* floats(int64_t slice) const { return static_cast<float*>(y) + slice * slice_stride; }
  const float* bias() const { return results == Results::kSlices ? nullptr : product.bias; }
};

// Where a part of the rows begins, of `parts` that are about equally large.
inline int64_t part_start(int64_t rows, int64_t parts, int64_t part) { return rows * part / parts; }

// Writes totals [rows][strips][16] of a slice into y, with the bias.
void write_totals(const Work& work, const Segment& segment, int64_t slice, int64_t strip, int strips,
                  int64_t row, int64_t rows, const float* totals);

// How a chunk of rows is computed: in groups, by tiles of some strips along some of the inputs.
struct ChunkPlan {
  int64_t groups = 1;
  // Rows of each group: the last one begins earlier where they don't divide the chunk. 0: the groups are
  // about equally large.
  int64_t group_rows = 0;
  int max_strips = 1;
  int64_t max_blocks = 1;  // of a piece along the inputs
  // What makes a record one that the tiles read, of decoded_record bytes. Null: they read the weights.
  void (*decode)(const uint8_t* record, uint8_t* decoded) = nullptr;
  int64_t decoded_record = 0;
  // Whether results are asked for before they are written. Where a tile is soon computed, that takes
  // longer than it saves.
  bool fetches_results = true;
  unsigned float_control = 0;  // what the thread's was before
};

// A way to compute tiles. A thread calls begin_chunk(), any number of tiles, and end_chunk().
class TileKernels {
 public:
  // Rows that are computed while the weights pass by once, at most.
  virtual int64_t chunk_rows(Kind kind, const Product& product) const = 0;
  virtual ChunkPlan begin_chunk(Kind kind, const Product& product, int64_t rows) const = 0;
  virtual void compute(Kind kind, const Tile& tile, const ChunkPlan& plan, int strips) const = 0;
  virtual void end_chunk(Kind, const ChunkPlan&) const {}
  // Whether a tile of so many rows may have a strip each of two weights.
  virtual bool takes_two_weights(int64_t) const { return false; }
  // Writes silu(gate) * up of such a tile's totals [rows][2][16] into 16 numbers of y's rows.
  virtual void write_gated(const ChunkPlan&, const float*, int64_t, bf16*, int64_t) const {}
  // What each thread needs for up to `max_rows` rows: floats of totals, and bytes of decoded weights.
  virtual int64_t totals(const Product& product, int64_t max_rows) const = 0;
  virtual int64_t panel_bytes(const Product& product) const = 0;

 protected:
  ~TileKernels() = default;
};

// That of the current extension.
const TileKernels& tile_kernels();

extern const TileKernels &kVectorTiles, &kAmxTiles, &kEmulatedAmxTiles;

inline size_t totals_bytes(const Product& product, int64_t max_rows) {
  return static_cast<size_t>(tile_kernels().totals(product, max_rows)) * sizeof(float);
}

// Room for decoded weights of a tile's strips.
inline size_t panel_bytes(const Product& product) {
  return static_cast<size_t>(tile_kernels().panel_bytes(product));
}

// The first weights of a thread that has `strips` as its share of a segment.
Region first_region(const Segment& segment, int64_t inputs, Share strips);

// Computes a share of a segment's strips, and brings `upcoming` meanwhile.
void multiply_strips(const Work& work, const Segment& segment, Share strips, Region upcoming);

}  // namespace trioserve::TRIOSERVE_ISA
