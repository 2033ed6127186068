#include "product_strips.h"

#include "extension.h"
#include "pack.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Inputs whose weights are brought beforehand, of a thread's first strips.
constexpr int64_t kFirstInputs = 4096;

// One tile's strips, along some or all of a slice of the inputs.
struct Piece {
  int64_t strip, slice, first_block, blocks;
  int strips;

  int64_t end_block() const { return first_block + blocks; }
};

// Rows that are computed while the weights pass by once.
struct Chunk {
  int64_t first, rows;
  bool last;
  ChunkPlan plan;

  Share group(int64_t i) const {
    if (plan.group_rows == 0)
      return {first + part_start(rows, plan.groups, i), first + part_start(rows, plan.groups, i + 1)};
    const int64_t begin = first + std::min(i * plan.group_rows, rows - plan.group_rows);
    return {begin, begin + plan.group_rows};
  }
  // Rows of totals that a group needs for itself, at most.
  int64_t most_rows() const { return plan.group_rows == 0 ? kTileRows : plan.group_rows; }
};

// Memory that a tile asks for: so many lines of each of its strips' streams.
struct Ahead {
  const uint8_t* first;
  int64_t stride, lines;
};

// Asks for the lines that write_totals() will write. A tile's are in as many places as it has rows, and
// would be waited for one after the other.
void prefetch_results(const Work& work, const Segment& segment, const Piece& piece, Share rows) {
  const int64_t strip = piece.strip, strips = piece.strips;
  const int64_t size = work.rounds() ? sizeof(bf16) : sizeof(float);
  const int64_t stride = work.product.outputs * size;
  const int64_t outputs = std::min(strips * kStrip, segment.outputs - strip * kStrip);
  const char* y = static_cast<const char*>(work.rounds() ? work.y : work.floats(piece.slice));
  const char* first = y + (segment.first + strip * kStrip) * size;
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const char* begin = first + row * stride;
    const char* last = begin + outputs * size - 1;
    for (const char* at = begin; at < last; at += 64) prefetch_to_write(at);
    prefetch_to_write(last);
  }
}

class Cutter {
 public:
  Cutter(const Work& work, const Segment& segment, Region upcoming)
      : work_(work),
        segment_(segment),
        upcoming_(upcoming),
        tiles_(tile_kernels()),
        packed_(static_cast<const uint8_t*>(segment.packed)),
        record_(static_cast<int64_t>(record_bytes(segment.kind))),
        blocks_(work.product.inputs / kBlock),
        strip_bytes_(blocks_ * record_),
        gated_(work.results == Results::kGated),
        beside_(gated_ ? static_cast<const uint8_t*>(work.product.segments[1].packed) - packed_
                       : strip_bytes_) {}

  void multiply(Share share) const {
    const int64_t most = tiles_.chunk_rows(segment_.kind, work_.product), chunks = (work_.rows + most - 1) / most;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = part_start(work_.rows, chunks, i);
      const int64_t rows = part_start(work_.rows, chunks, i + 1) - first;
      const ChunkPlan plan = tiles_.begin_chunk(segment_.kind, work_.product, rows);
      multiply_chunk({first, rows, i + 1 == chunks, plan}, share);
      tiles_.end_chunk(segment_.kind, plan);
    }
  }

 private:
  void multiply_chunk(const Chunk& chunk, Share share) const {
    Piece piece = start(chunk, share, share.first);
    while (piece.strips > 0) {
      const Piece next = after(chunk, share, piece);
      multiply_piece(chunk, piece, next);
      piece = next;
    }
  }

  Piece start(const Chunk& chunk, Share share, int64_t strip) const {
    const int64_t left = share.last - strip, most = chunk.plan.max_strips;
    const int64_t blocks = std::min(work_.slice_blocks, chunk.plan.max_blocks);
    if (gated_ && left > 0) return {strip, 0, 0, blocks, 2};
    // Two and two are faster than three and one.
    const int64_t strips = left == 4 && most == 3 ? 2 : std::min(left, most);
    return {strip, 0, 0, blocks, static_cast<int>(strips)};
  }

  Piece after(const Chunk& chunk, Share share, const Piece& piece) const {
    const int64_t first = piece.end_block(), slice = piece.slice + (ends_slice(piece) ? 1 : 0);
    if (first == blocks_) return start(chunk, share, piece.strip + (gated_ ? 1 : piece.strips));
    const int64_t left = (slice + 1) * work_.slice_blocks - first;
    return {piece.strip, slice, first, std::min(left, chunk.plan.max_blocks), piece.strips};
  }

  bool ends_slice(const Piece& piece) const {
    return piece.end_block() == (piece.slice + 1) * work_.slice_blocks;
  }

  const uint8_t* records(const Piece& piece) const {
    return packed_ + piece.strip * strip_bytes_ + piece.first_block * record_;
  }

  void multiply_piece(const Chunk& chunk, const Piece& piece, const Piece& next) const {
    const ChunkPlan& plan = chunk.plan;
    Tile tile;
    tile.records = records(piece);
    tile.strip_bytes = beside_;
    tile.blocks = piece.blocks;
    tile.continues = piece.first_block > piece.slice * work_.slice_blocks;
    tile.x_stride = work_.x_stride;
    tile.x_sums_stride = blocks_;
    if (plan.decode != nullptr) decode(plan, piece, tile);
    const bool last = ends_slice(piece);
    // Every group of rows brings its part of what comes next.
    const Ahead ahead = ahead_of(chunk, piece, next);
    const int64_t lines_each = (ahead.lines + plan.groups - 1) / plan.groups;
    const int64_t quarters = piece.blocks * 4;
    tile.ahead_stride = ahead.stride;
    tile.ahead_rate = (lines_each * 256 + quarters - 1) / quarters;
    const bool in_pieces = work_.slice_blocks > plan.max_blocks;
    for (int64_t group = 0; group < plan.groups; ++group) {
      const Share rows = chunk.group(group);
      tile.rows = static_cast<int>(rows.last - rows.first);
      tile.x = activations(rows.first, piece.first_block);
      tile.x_sums = work_.x_sums + rows.first * blocks_ + piece.first_block;
      tile.totals =
          work_.totals + (in_pieces ? group * chunk.most_rows() * piece.strips * kStrip : 0);
      tile.ahead = ahead.first + group * lines_each * 64;
      if (last && plan.fetches_results) prefetch_results(work_, segment_, piece, rows);
      tiles_.compute(segment_.kind, tile, plan, piece.strips);
      if (last && gated_)
        write_gated(plan, piece.strip, rows, tile.totals);
      else if (last)
        write_totals(work_, segment_, piece.slice, piece.strip, piece.strips, rows.first, tile.rows, tile.totals);
    }
  }

  void write_gated(const ChunkPlan& plan, int64_t strip, Share rows, const float* totals) const {
    const int64_t width = segment_.outputs;
    bf16* y = static_cast<bf16*>(work_.y) + rows.first * width + strip * kStrip;
    tiles_.write_gated(plan, totals, rows.last - rows.first, y, width);
  }

  Ahead ahead_of(const Chunk& chunk, const Piece& piece, const Piece& next) const {
    if (next.strips > 0) return {records(next), beside_, (next.blocks * record_ + 63) / 64};
    const int64_t lines = chunk.last ? (upcoming_.bytes / 64 + piece.strips - 1) / piece.strips : 0;
    return {upcoming_.first, lines * 64, lines};
  }

  const void* activations(int64_t row, int64_t block) const {
    if (segment_.kind == Kind::kW8A8)
      return static_cast<const RoundedBlock*>(work_.x) + row * work_.x_stride + block;
    return static_cast<const Activation*>(work_.x) + row * work_.x_stride + block * kBlock;
  }

  void decode(const ChunkPlan& plan, const Piece& piece, Tile& tile) const {
    uint8_t* to = work_.panel;
    for (int s = 0; s < piece.strips; ++s) {
      const uint8_t* from = tile.records + s * strip_bytes_;
      for (int64_t block = 0; block < piece.blocks; ++block, from += record_, to += plan.decoded_record)
        plan.decode(from, to);
    }
    tile.records = work_.panel;
    tile.strip_bytes = piece.blocks * plan.decoded_record;
  }

  const Work& work_;
  const Segment& segment_;
  const Region upcoming_;
  const TileKernels& tiles_;
  const uint8_t* packed_;
  const int64_t record_, blocks_, strip_bytes_;
  const bool gated_;
  const int64_t beside_;  // from a tile's strip to the next: the same one of the other weight if it is gated
};

}  // namespace

const TileKernels& tile_kernels() {
#ifdef __AVX512BF16__
  return of_extension(kVectorTiles, kAmxTiles, kEmulatedAmxTiles);
#else
  return kVectorTiles;
#endif
}

namespace {

// The totals of two full strips, whose results are one line of 64 bytes.
void write_pair(const Work& work, int64_t column, int64_t row, int64_t rows, const float* totals,
                int64_t stride) {
  Floats low_bias = zeros(), high_bias = low_bias;
  if (work.bias() != nullptr) {
    low_bias = load(work.bias() + column);
    high_bias = load(work.bias() + column + kStrip);
  }
  bf16* y = static_cast<bf16*>(work.y) + row * work.product.outputs + column;
  for (int64_t r = 0; r < rows; ++r, totals += stride, y += work.product.outputs) {
    const Floats low = load(totals) + low_bias;
    const Floats high = load(totals + kStrip) + high_bias;
    store_two(y, low, high);
  }
}

// The totals of one strip, full or not.
void write_strip(const Work& work, int64_t slice, int64_t column, int64_t outputs, int64_t row,
                 int64_t rows, const float* totals, int64_t stride) {
  const Lanes lanes = first_lanes(outputs);
  const Floats bias = work.bias() == nullptr ? zeros() : load(work.bias() + column, lanes);
  for (int64_t r = 0; r < rows; ++r, totals += stride) {
    const Floats sum = load(totals) + bias;
    const int64_t at = (row + r) * work.product.outputs + column;
    if (work.rounds())
      store(static_cast<bf16*>(work.y) + at, sum, lanes);
    else
      store(work.floats(slice) + at, sum, lanes);
  }
}

}  // namespace

void write_totals(const Work& work, const Segment& segment, int64_t slice, int64_t strip, int strips,
                  int64_t row, int64_t rows, const float* totals) {
  const int64_t stride = strips * kStrip;
  for (int s = 0; s < strips; ++s, totals += kStrip) {
    const int64_t output = (strip + s) * kStrip, column = segment.first + output;
    const int64_t left = segment.outputs - output;
    if (work.rounds() && s + 1 < strips && left >= 2 * kStrip) {
      write_pair(work, column, row, rows, totals, stride);
      ++s, totals += kStrip;
    } else {
      write_strip(work, slice, column, left, row, rows, totals, stride);
    }
  }
}

Region first_region(const Segment& segment, int64_t inputs, Share strips) {
  const int64_t record = static_cast<int64_t>(record_bytes(segment.kind));
  const int64_t strip_bytes = inputs / kBlock * record;
  const int64_t bytes = std::min<int64_t>(strips.last - strips.first, kTileStrips) * strip_bytes;
  const int64_t most = kTileStrips * kFirstInputs / kBlock * record;
  return {static_cast<const uint8_t*>(segment.packed) + strips.first * strip_bytes,
          std::min(bytes, most)};
}

void multiply_strips(const Work& work, const Segment& segment, Share strips, Region upcoming) {
  Cutter(work, segment, upcoming).multiply(strips);
}

}  // namespace trioserve::TRIOSERVE_ISA
