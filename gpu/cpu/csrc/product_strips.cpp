#include "product_strips.h"

#include "pack.h"

namespace trioserve {
namespace {

// One tile's strips, along some or all of the inputs.
struct Piece {
  int64_t strip, first_block, blocks;
  int strips;
};

// Rows that are computed while the weights pass by once, in groups of a tile's rows or fewer.
struct Chunk {
  int64_t first, rows, groups;
  bool last;
};

// Memory that a tile asks for: so many lines of each of its strips' streams.
struct Ahead {
  const uint8_t* first;
  int64_t stride, lines;
};

class Cutter {
 public:
  Cutter(const Work& work, const Segment& segment, Region upcoming)
      : work_(work),
        segment_(segment),
        upcoming_(upcoming),
        kernels_(kernels_of(segment.kind)),
        packed_(static_cast<const uint8_t*>(segment.packed)),
        blocks_(work.product.inputs / kBlock),
        strip_bytes_(blocks_ * static_cast<int64_t>(kernels_.record)) {}

  void multiply(Share share) const {
    const int64_t most = chunk_rows(work_.product), chunks = (work_.rows + most - 1) / most;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = part_start(work_.rows, chunks, i);
      const int64_t rows = part_start(work_.rows, chunks, i + 1) - first;
      const bool last = i + 1 == chunks;
      multiply_chunk({first, rows, (rows + kTileRows - 1) / kTileRows, last}, share);
    }
  }

 private:
  void multiply_chunk(const Chunk& chunk, Share share) const {
    Piece piece = start(share, share.first);
    while (piece.strips > 0) {
      const Piece next = after(share, piece);
      multiply_piece(chunk, piece, next);
      piece = next;
    }
  }

  Piece start(Share share, int64_t strip) const {
    const int64_t left = share.last - strip;
    // Two and two are faster than three and one.
    const int strips = static_cast<int>(left == 4 ? 2 : std::min<int64_t>(left, kTileStrips));
    return {strip, 0, std::min(blocks_, kPanelInputs / kBlock), strips};
  }

  Piece after(Share share, const Piece& piece) const {
    const int64_t first = piece.first_block + piece.blocks;
    if (first == blocks_) return start(share, piece.strip + piece.strips);
    return {piece.strip, first, std::min(blocks_ - first, piece.blocks), piece.strips};
  }

  const uint8_t* records(const Piece& piece) const {
    return packed_ + piece.strip * strip_bytes_ +
           piece.first_block * static_cast<int64_t>(kernels_.record);
  }

  void multiply_piece(const Chunk& chunk, const Piece& piece, const Piece& next) const {
    Tile tile;
    tile.records = records(piece);
    tile.strip_bytes = strip_bytes_;
    tile.blocks = piece.blocks;
    tile.continues = piece.first_block > 0;
    tile.x_stride = work_.x_stride;
    tile.x_sums_stride = blocks_;
    const bool decodes = chunk.groups > 1 && kernels_.decode != nullptr;
    if (decodes) decode(piece, tile);
    const TileTable& table = decodes ? *kernels_.decoded : kernels_.direct;
    const bool last = piece.first_block + piece.blocks == blocks_;
    // Every group of rows brings its part of what comes next.
    const Ahead ahead = ahead_of(chunk, piece, next);
    const int64_t lines_each = (ahead.lines + chunk.groups - 1) / chunk.groups;
    const int64_t quarters = piece.blocks * 4;
    tile.ahead_stride = ahead.stride;
    tile.ahead_rate = (lines_each * 256 + quarters - 1) / quarters;
    const bool in_pieces = blocks_ > kPanelInputs / kBlock;
    for (int64_t group = 0; group < chunk.groups; ++group) {
      const int64_t in_chunk = part_start(chunk.rows, chunk.groups, group);
      const int64_t rows = part_start(chunk.rows, chunk.groups, group + 1) - in_chunk;
      const int64_t row = chunk.first + in_chunk;
      tile.x = activations(row, piece.first_block);
      tile.x_sums = work_.x_sums + row * blocks_ + piece.first_block;
      tile.totals = work_.totals + (in_pieces ? in_chunk * piece.strips * kStrip : 0);
      tile.ahead = ahead.first + group * lines_each * 64;
      table[rows - 1][piece.strips - 1](tile);
      if (last) write_totals(work_, segment_, piece.strip, piece.strips, row, rows, tile.totals);
    }
  }

  Ahead ahead_of(const Chunk& chunk, const Piece& piece, const Piece& next) const {
    if (next.strips > 0) {
      const int64_t bytes = next.blocks * static_cast<int64_t>(kernels_.record);
      return {records(next), strip_bytes_, (bytes + 63) / 64};
    }
    const int64_t lines = chunk.last ? (upcoming_.bytes / 64 + piece.strips - 1) / piece.strips : 0;
    return {upcoming_.first, lines * 64, lines};
  }

  const void* activations(int64_t row, int64_t block) const {
    if (segment_.kind == Kind::kW8A8)
      return static_cast<const RoundedBlock*>(work_.x) + row * work_.x_stride + block;
    return static_cast<const bf16*>(work_.x) + row * work_.x_stride + block * kBlock;
  }

  void decode(const Piece& piece, Tile& tile) const {
    const int64_t record = static_cast<int64_t>(kernels_.decoded_record);
    uint8_t* to = work_.panel;
    for (int s = 0; s < piece.strips; ++s) {
      const uint8_t* from = tile.records + s * strip_bytes_;
      for (int64_t block = 0; block < piece.blocks; ++block, from += kernels_.record, to += record)
        kernels_.decode(from, to);
    }
    tile.records = work_.panel;
    tile.strip_bytes = piece.blocks * record;
  }

  const Work& work_;
  const Segment& segment_;
  const Region upcoming_;
  const Kernels& kernels_;
  const uint8_t* packed_;
  const int64_t blocks_, strip_bytes_;
};

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
      return kRoundedKernels;
    default:
      return kPlainKernels;
  }
}

void write_totals(const Work& work, const Segment& segment, int64_t strip, int strips, int64_t row,
                  int64_t rows, const float* totals) {
  for (int s = 0; s < strips; ++s) {
    const int64_t output = (strip + s) * kStrip, column = segment.first + output;
    const __mmask16 lanes = first_lanes(segment.outputs - output);
    const __m512 bias = work.product.bias == nullptr
                            ? _mm512_setzero_ps()
                            : _mm512_maskz_loadu_ps(lanes, work.product.bias + column);
    for (int64_t r = 0; r < rows; ++r) {
      const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(totals + (r * strips + s) * kStrip), bias);
      const int64_t at = (row + r) * work.product.outputs + column;
      if (work.to_float)
        _mm512_mask_storeu_ps(static_cast<float*>(work.y) + at, lanes, sum);
      else
        store(static_cast<bf16*>(work.y) + at, sum, lanes);
    }
  }
}

Region first_region(const Segment& segment, int64_t inputs, Share strips) {
  const int64_t record = static_cast<int64_t>(kernels_of(segment.kind).record);
  const int64_t strip_bytes = inputs / kBlock * record;
  const int64_t bytes = std::min<int64_t>(strips.last - strips.first, kTileStrips) * strip_bytes;
  const int64_t most = kTileStrips * kPanelInputs / kBlock * record;
  return {static_cast<const uint8_t*>(segment.packed) + strips.first * strip_bytes,
          std::min(bytes, most)};
}

void multiply_strips(const Work& work, const Segment& segment, Share strips, Region upcoming) {
  Cutter(work, segment, upcoming).multiply(strips);
}

}  // namespace trioserve
