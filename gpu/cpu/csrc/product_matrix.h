// Products on a matrix unit: up to 32 rows by two strips of weights, or 16 rows by four.
//
// The layouts of bfloat16 weights and of w8a8 are the unit's own. Other numbers are decoded beforehand. The
// unit's sums of each block are scaled and added to the totals by AVX-512, except bfloat16's. A few rows
// of such weights are computed by AVX-512 alone, in the unit's order. Sums of w8a8 are whole numbers, so
// its products have the bits of AVX-512 with VNNI.
#pragma once

#include "gated.h"
#include "matrix_unit.h"
#include "product_strips.h"
#include "product_vectors.h"

namespace trioserve::TRIOSERVE_ISA {

// Registers 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
inline constexpr int kFirstX = 4, kFirstWeights = 6;

// Of two registers of activations, the second's sums are in 2 and 3.
template <int XTiles>
constexpr int sums_register(int x_tile, int strip) {
  return XTiles == 1 ? strip : x_tile * 2 + strip;
}

// Weights of w8a8 as they are packed.
struct RoundedWeights {
  static constexpr int kRecord = kRoundedRecord;
};

template <class Weights>
inline constexpr bool kIsRounded = std::is_same_v<Weights, RoundedWeights>;

// The activations of a tile: one register's rows, or two's.
template <class Unit, class Weights, int XTiles>
class Activations {
 public:
  explicit Activations(const Tile& tile)
      : at_(static_cast<const char*>(tile.x)), stride_(tile.x_stride * kElement) {}

  [[gnu::always_inline]] void load_next() {
    Unit::template load<kFirstX>(at_, stride_);
    if constexpr (XTiles > 1) Unit::template load<kFirstX + 1>(at_ + kUnitRows * stride_, stride_);
    at_ += kIsRounded<Weights> ? kElement : kBlock * kElement;
  }

 private:
  static constexpr int64_t kElement = kIsRounded<Weights> ? sizeof(RoundedBlock) : sizeof(bf16);

  const char* at_;
  const int64_t stride_;
};

template <class Unit, class Weights, int Sums, int X, int From>
[[gnu::always_inline]] inline void multiply_registers() {
  if constexpr (kIsRounded<Weights>)
    Unit::template multiply_bytes<Sums, X, From>();
  else
    Unit::template multiply_bf16<Sums, X, From>();
}

// Adds a block's products to the sums.
template <class Unit, class Weights, int XTiles, int Strips>
[[gnu::always_inline]] inline void multiply_block(const uint8_t* records, int64_t strip_bytes) {
  static_assert(XTiles * Strips <= kFirstX);
  const auto strip = [&]<int S>(std::integral_constant<int, S>) __attribute__((always_inline)) {
    constexpr int weights = kFirstWeights + S % 2;
    Unit::template load<weights>(records + S * strip_bytes, 64);
    multiply_registers<Unit, Weights, sums_register<XTiles>(0, S), kFirstX, weights>();
    if constexpr (XTiles > 1)
      multiply_registers<Unit, Weights, sums_register<XTiles>(1, S), kFirstX + 1, weights>();
  };
  [&]<int... S>(std::integer_sequence<int, S...>) __attribute__((always_inline)) {
    (strip(std::integral_constant<int, S>()), ...);
  }(std::make_integer_sequence<int, Strips>());
}

// Calls f<register>(where that register's sums are in an array [rows][strips][16]) for all of them.
template <int XTiles, int Strips, class Function>
[[gnu::always_inline]] inline void for_each_register(float* sums, Function f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f.template operator()<sums_register<XTiles>(I / Strips, I % Strips)>(
         sums + (I / Strips * kUnitRows * Strips + I % Strips) * kStrip),
     ...);
  }(std::make_integer_sequence<int, XTiles * Strips>());
}

template <class Unit, int XTiles, int Strips>
[[gnu::always_inline]] inline void clear_sums() {
  for_each_register<XTiles, Strips>(nullptr, []<int I>(float*) __attribute__((always_inline)) {
    Unit::template clear<I>();
  });
}

template <class Unit, int XTiles, int Strips>
[[gnu::always_inline]] inline void load_sums(float* sums) {
  for_each_register<XTiles, Strips>(sums, []<int I>(float* at) __attribute__((always_inline)) {
    Unit::template load<I>(at, Strips * kStrip * 4);
  });
}

template <class Unit, int XTiles, int Strips>
[[gnu::always_inline]] inline void store_sums(float* sums) {
  for_each_register<XTiles, Strips>(sums, []<int I>(float* at) __attribute__((always_inline)) {
    Unit::template store<I>(at, Strips * kStrip * 4);
  });
}

// Weights without scales: the sums stay in the registers.
template <class Unit, int XTiles, int Strips>
void multiply_plain_matrix(const Tile& tile) {
  Activations<Unit, PlainWeights, XTiles> x(tile);
  Fetcher<Strips> fetcher(tile);
  if (tile.continues)
    load_sums<Unit, XTiles, Strips>(tile.totals);
  else
    clear_sums<Unit, XTiles, Strips>();
  const uint8_t* records = tile.records;
  for (int64_t block = 0; block < tile.blocks; ++block, records += PlainWeights::kRecord) {
    for (int quarter = 0; quarter < 4; ++quarter) fetcher.quarter();
    x.load_next();
    multiply_block<Unit, PlainWeights, XTiles, Strips>(records, tile.strip_bytes);
  }
  store_sums<Unit, XTiles, Strips>(tile.totals);
}

// Adds the sums [rows][strips][16] of one block to the totals.
template <class Weights, int Strips>
void add_scaled(const Tile& tile, int64_t block, const float* sums) {
  const uint8_t* record = tile.records + block * Weights::kRecord;
  Floats scales[Strips], minimums[Strips];
  for (int s = 0; s < Strips; ++s) {
    const uint8_t* after = record + s * tile.strip_bytes + 4 * Weights::kQuarter;
    scales[s] = Weights::scales(after);
    if constexpr (Weights::kMinimums) minimums[s] = Weights::minimums(after);
  }
  for (int r = 0; r < tile.rows; ++r) {
    Floats x_sum;
    if constexpr (Weights::kMinimums) x_sum = broadcast(tile.x_sums[r * tile.x_sums_stride + block]);
    for (int s = 0; s < Strips; ++s) {
      float* at = tile.totals + (r * Strips + s) * kStrip;
      const Floats sum = load(sums + (r * Strips + s) * kStrip);
      Floats total = fma(sum, scales[s], load(at));
      if constexpr (Weights::kMinimums) total = fma(x_sum, minimums[s], total);
      store(at, total);
    }
  }
}

// The same of w8a8, whose sums are whole numbers.
template <class Weights, int Strips>
void add_scaled(const Tile& tile, int64_t block, const float* sums) requires(kIsRounded<Weights>) {
  Floats scales[Strips];
  for (int s = 0; s < Strips; ++s)
    scales[s] = rounded_scales(tile.records + s * tile.strip_bytes + block * Weights::kRecord);
  const RoundedBlock* x = static_cast<const RoundedBlock*>(tile.x) + block;
  const int64_t x_stride = tile.x_stride;
  float* totals = tile.totals;
  for (int rows = tile.rows; rows > 0; --rows, x += x_stride)
    for (int s = 0; s < Strips; ++s, totals += kStrip, sums += kStrip)
      add_rounded(totals, add(load_ints(sums), broadcast(x->offset)), scales[s], x->scale);
}

// Weights with scales. The sums of a block are added while the unit computes the next one's.
template <class Unit, class Weights, int XTiles, int Strips>
void multiply_scaled_matrix(const Tile& tile) {
  alignas(64) float sums[2][XTiles * kUnitRows * Strips * kStrip];
  Activations<Unit, Weights, XTiles> x(tile);
  Fetcher<Strips> fetcher(tile);
  if (!tile.continues) clear(tile.totals, tile.rows * Strips);
  const uint8_t* records = tile.records;
  for (int64_t block = 0; block < tile.blocks; ++block, records += Weights::kRecord) {
    for (int quarter = 0; quarter < 4; ++quarter) fetcher.quarter();
    clear_sums<Unit, XTiles, Strips>();
    x.load_next();
    multiply_block<Unit, Weights, XTiles, Strips>(records, tile.strip_bytes);
    store_sums<Unit, XTiles, Strips>(sums[block % 2]);
    if (block > 0) add_scaled<Weights, Strips>(tile, block - 1, sums[(block - 1) % 2]);
  }
  add_scaled<Weights, Strips>(tile, tile.blocks - 1, sums[(tile.blocks - 1) % 2]);
}

// Functions by the number of strips, of tiles of one register's rows and of two's.
struct MatrixTable {
  TileFunction narrow[4], wide[2];

  TileFunction of(int64_t rows, int strips) const {
    return rows > kUnitRows ? wide[strips - 1] : narrow[strips - 1];
  }
};

template <class Unit>
inline constexpr MatrixTable kPlainMatrix = {
    {multiply_plain_matrix<Unit, 1, 1>, multiply_plain_matrix<Unit, 1, 2>,
     multiply_plain_matrix<Unit, 1, 3>, multiply_plain_matrix<Unit, 1, 4>},
    {multiply_plain_matrix<Unit, 2, 1>, multiply_plain_matrix<Unit, 2, 2>}};

template <class Unit, class Weights>
inline constexpr MatrixTable kScaledMatrix = {
    {multiply_scaled_matrix<Unit, Weights, 1, 1>,
     multiply_scaled_matrix<Unit, Weights, 1, 2>,
     multiply_scaled_matrix<Unit, Weights, 1, 3>,
     multiply_scaled_matrix<Unit, Weights, 1, 4>},
    {multiply_scaled_matrix<Unit, Weights, 2, 1>,
     multiply_scaled_matrix<Unit, Weights, 2, 2>}};

template <class Unit>
class MatrixTiles final : public TileKernels {
 public:
  int64_t chunk_rows(Kind, const Product& product) const override {
    const int64_t rows = kChunkBytes / (product.inputs * 2);
    return std::max<int64_t>(rows / kGroupRows, 1) * kGroupRows;
  }

  ChunkPlan begin_chunk(Kind kind, const Product& product, int64_t rows) const override {
    const bool vectors = by_vectors(kind, rows);
    if (kind == Kind::kW8A8 && vectors) return kVectorTiles.begin_chunk(kind, product, rows);
    ChunkPlan plan;
    plan.fetches_results = kind != Kind::kBf16;
    // VNNI's scaling takes numbers below the normal ones as they are.
    if (kind != Kind::kW8A8) {
      plan.float_control = float_control();
      set_float_control(without_small_numbers(plan.float_control));
    }
    if (vectors) {
      plan.group_rows = rows;
      plan.max_strips = kTileStrips;
      plan.max_blocks = product.inputs / kBlock;
      return plan;
    }
    plan.groups = (rows + kGroupRows - 1) / kGroupRows;
    plan.group_rows = (rows + plan.groups - 1) / plan.groups;
    plan.max_strips = plan.group_rows > kUnitRows ? 2 : 4;
    const bool with_rows = kind == Kind::kBf16 && plan.groups > 1;
    plan.max_blocks = panel_inputs(product, with_rows ? kInputsWithRows : kPanelInputs) / kBlock;
    plan.decode = kernels_of(kind).decode;
    plan.decoded_record = kernels_of(kind).decoded_record;
    Unit::begin(shape_of(kind, plan.group_rows));
    return plan;
  }

  void end_chunk(Kind kind, const ChunkPlan& plan) const override {
    if (kind != Kind::kW8A8) set_float_control(plan.float_control);
    if (!by_vectors(kind, plan.group_rows)) Unit::end();
  }

  void compute(Kind kind, const Tile& tile, const ChunkPlan& plan, int strips) const override {
    if (!by_vectors(kind, plan.group_rows)) return table_of(kind).of(plan.group_rows, strips)(tile);
    if (kind == Kind::kW8A8) return kVectorTiles.compute(kind, tile, plan, strips);
    (*kernels_of(kind).even_odd)[plan.group_rows - 1][strips - 1](tile);
  }

  bool takes_two_weights(int64_t rows) const override { return rows > kUnitRows; }

  // Gates are rounded as write_totals() does it. Then the numbers below the normal ones are what they are.
  void write_gated(const ChunkPlan& plan, const float* totals, int64_t rows, bf16* y,
                   int64_t y_stride) const override {
    alignas(64) bf16 pairs[kGroupRows * 2 * kStrip];
    for (int64_t i = 0; i < rows * 2 * kStrip; i += 2 * kStrip)
      store_two(pairs + i, load(totals + i) + zeros(), load(totals + i + kStrip) + zeros());
    const unsigned before = float_control();
    set_float_control(plan.float_control);
    for (int64_t i = 0; i < rows * 2 * kStrip; i += 2 * kStrip, y += y_stride)
      store(y, gated(load(pairs + i), load(pairs + i + kStrip)));
    set_float_control(before);
  }

  int64_t totals(const Product& product, int64_t max_rows) const override {
    const int64_t rows = product.inputs > kInputsWithRows ? std::min(max_rows, chunk_rows(Kind::kBf16, product)) : 0;
    return std::max((rows + kGroupRows) * 2 * kStrip, kVectorTiles.totals(product, max_rows));
  }

  int64_t panel_bytes(const Product& product) const override {
    return panel_inputs(product, kPanelInputs) / kBlock * 4 * DecodedWeights<true, true>::kRecord;
  }

 private:
  static constexpr int64_t kGroupRows = 2 * kUnitRows;
  // Rows at a time, so that their activations stay in the second cache while the weights pass by.
  static constexpr int64_t kChunkBytes = 1024 << 10;
  // Inputs at a time, so that two strips stay in the first. Where nothing but the unit computes, the rows
  // have to be there, too.
  static constexpr int64_t kPanelInputs = 1024, kInputsWithRows = 288;
  // Up to so many rows of w8a8 are multiplied by VNNI, with the same bits. That takes 11 instructions for
  // each row, strip and block: 8 products and 3 to scale, 5.5 cycles at two a cycle. With the unit there
  // remain 4, 2 cycles: one adds the offset. The unit itself loads weights, multiplies and stores in 8, 16
  // and 16 cycles, by Intel's figures for full registers, whatever the rows up to 16. So it is ahead from 12
  // rows on if nothing overlaps, and from 4 on if all but the stores do. Between them, VNNI goes through
  // the weights once for up to 8.
  static constexpr int64_t kRoundedRows = kTileRows;

  // In equal parts, or nearly.
  static int64_t panel_inputs(const Product& product, int64_t most) {
    const int64_t parts = (product.inputs + most - 1) / most;
    const int64_t blocks = product.inputs / kBlock;
    return (blocks + parts - 1) / parts * kBlock;
  }

  static bool by_vectors(Kind kind, int64_t rows) {
    if (kind == Kind::kW8A8) return rows <= kRoundedRows;
    return kernels_of(kind).even_odd != nullptr && rows <= kEvenOddRows;
  }

  static UnitShape shape_of(Kind kind, int64_t rows) {
    const bool wide = rows > kUnitRows;
    const int64_t upper = wide ? kUnitRows : rows, lower = wide ? rows - kUnitRows : rows;
    UnitShape shape;
    for (int tile = 0; tile < kFirstX; ++tile) shape.set(tile, wide && tile >= 2 ? lower : upper, 64);
    const int64_t x_bytes = kBlock * (kind == Kind::kW8A8 ? 1 : 2);
    shape.set(kFirstX, upper, x_bytes);
    shape.set(kFirstX + 1, lower, x_bytes);
    for (int tile = kFirstWeights; tile < kUnitTiles; ++tile) shape.set(tile, x_bytes / 4, 64);
    return shape;
  }

  static const MatrixTable& table_of(Kind kind) {
    switch (kind) {
      case Kind::kQ8_0:
      case Kind::kQ4_0:
        return kScaledMatrix<Unit, DecodedWeights<true, false>>;
      case Kind::kQ4_1:
        return kScaledMatrix<Unit, DecodedWeights<true, true>>;
      case Kind::kW8A8:
        return kScaledMatrix<Unit, RoundedWeights>;
      default:
        return kPlainMatrix<Unit>;
    }
  }
};

}  // namespace trioserve::TRIOSERVE_ISA
