// The innermost loops of products: a few rows of activations by a few strips of weights.
//
// A tile's sums stay in registers while it walks along the inputs. Sixteen sums, of as many outputs, get
// the products of a pair of inputs at a time (operands.h). Numbers of 4 or 8 bits are widened on the way,
// exactly: each block's sum is exact up to float32's rounding, and then scaled.
#pragma once

#include <cstring>
#include <utility>

#include "dots.h"
#include "operands.h"
#include "processor.h"
#include "product.h"

namespace trioserve::TRIOSERVE_ISA {

// Registers hold a tile's sums, a number of each strip, and one of the activations. So strips are fewer the
// more rows there are.
inline constexpr int kTileRows = kRegisters < 32 ? kRegisters - 2 : 8, kTileStrips = 3;

constexpr int strips_for(int rows) {
  const int strips = (kRegisters - 1) / (rows + 1);
  return strips < kTileStrips ? strips : kTileStrips;
}

struct Tile {
  const void* x;                // the first row, at the first block: Activation, or RoundedBlock
  int64_t x_stride;             // from row to row, in elements
  const float* x_sums;          // of each block of the first row, for weights with minimums
  int64_t x_sums_stride;
  const uint8_t* records;       // of the first strip, at the first block
  int64_t strip_bytes;
  int64_t blocks;
  int rows;
  float* totals;                // [rows][strips][16]: the result
  bool continues;               // whether totals already hold the sums of earlier blocks
  const uint8_t* ahead;         // what to bring into the cache meanwhile: of each strip,
  int64_t ahead_stride;         // this far apart,
  int64_t ahead_rate;           // so many 256ths of a line of 64 bytes with each quarter of a block
};

using TileFunction = void (*)(const Tile&);

// Weights in bfloat16.
struct PlainWeights {
  static constexpr int kRecord = 1024, kQuarter = 256;
  static constexpr bool kScaled = false, kMinimums = false;

  // A part of the inputs 2 p and 2 p + 1 of a quarter of a block, 8 inputs.
  static Operand part(const uint8_t* quarter, int p, int part) {
    return weight_part(reinterpret_cast<const bf16*>(quarter + p * 64), part);
  }
};

struct ByteWeights {
  static constexpr int kRecord = 544, kQuarter = 128;
  static constexpr bool kScaled = true, kMinimums = false;

  static Operand part(const uint8_t* quarter, int p, int part) { return byte_part(quarter + p * 32, part); }
  static Floats scales(const uint8_t* after) { return load_halves(after); }
};

template <int Zero, bool Minimums>
struct NibbleWeights {
  static constexpr int kRecord = Minimums ? 320 : 288, kQuarter = 64;
  static constexpr bool kScaled = true, kMinimums = Minimums;

  static Operand part(const uint8_t* quarter, int p, int part) { return nibble_part<Zero>(quarter, p, part); }
  static Floats scales(const uint8_t* after) { return load_halves(after); }
  static Floats minimums(const uint8_t* after) { return load_halves(after + 32); }
};

// Weights that were widened beforehand, for many rows; scales as float32.
template <bool Scaled, bool Minimums>
struct DecodedWeights {
  static constexpr int kQuarter = 256 * kParts;
  static constexpr int kRecord = 4 * kQuarter + (Scaled ? 64 : 0) + (Minimums ? 64 : 0);
  static constexpr bool kScaled = Scaled, kMinimums = Minimums;

  static Operand part(const uint8_t* quarter, int p, int part) {
    return load_operand(quarter + (p * kParts + part) * 64);
  }
  static Floats scales(const uint8_t* after) { return load(reinterpret_cast<const float*>(after)); }
  static Floats minimums(const uint8_t* after) { return load(reinterpret_cast<const float*>(after + 64)); }
};

// The record of a block of Weights as that of DecodedWeights.
template <class Weights>
void decode_record(const uint8_t* record, uint8_t* decoded) {
#pragma GCC unroll 16
  for (int p = 0; p < kBlock / 2; ++p)
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part)
      store_operand(decoded + (p * kParts + part) * 64,
                    Weights::part(record + p / 4 * Weights::kQuarter, p % 4, part));
  const uint8_t* after = record + 4 * Weights::kQuarter;
  float* scales = reinterpret_cast<float*>(decoded + 4 * DecodedWeights<true, true>::kQuarter);
  if constexpr (Weights::kScaled) store(scales, Weights::scales(after));
  if constexpr (Weights::kMinimums) store(scales + kStrip, Weights::minimums(after));
}

// f(0), f(1) and so on, written out: a loop over an array of registers would have to be a loop over
// memory.
template <int Count, class Function>
[[gnu::always_inline]] inline void repeat(Function f) {
  [&]<int... Index>(std::integer_sequence<int, Index...>) __attribute__((always_inline)) {
    (f(Index), ...);
  }(std::make_integer_sequence<int, Count>());
}

// Calls f(row, strip) for every sum of a tile, strip by strip.
template <int Rows, int Strips, class Function>
[[gnu::always_inline]] inline void for_each_sum(Function f) {
  repeat<Strips>([&](int s) __attribute__((always_inline)) {
    repeat<Rows>([&](int r) __attribute__((always_inline)) { f(r, s); });
  });
}

// Several streams at one distance from each other, read together. A tile has many, and compilers like
// to compute all their addresses beforehand and to keep them on the stack; what step() says it changes
// makes them use the processor's own way of adding a distance, four times in two registers.
template <class T, int Count>
class Streams {
 public:
  // `distance` in bytes.
  Streams(const void* first, int64_t distance)
      : low_(static_cast<const char*>(first)),
        high_(low_ + 4 * distance),
        distance_(distance),
        triple_(3 * distance) {}

  const T* operator[](int i) const {
    const char* from = i < 4 ? low_ : high_;
    const int64_t away = i % 4 == 3 ? triple_ : i % 4 * distance_;
    return reinterpret_cast<const T*>(from + away);
  }
  void step(int64_t bytes) {
    low_ += bytes;
    if constexpr (Count > 4) high_ += bytes;
    hide();
  }

 private:
  void hide() {
    asm("" : "+r"(low_), "+r"(distance_));
    if constexpr (Count > 3) asm("" : "+r"(triple_));
    if constexpr (Count > 4) asm("" : "+r"(high_));
  }

  const char *low_, *high_;
  int64_t distance_, triple_;
};

// Keeps the compiler from holding totals in registers, which are all taken, and so on the stack too.
inline void forget_memory() { asm volatile("" ::: "memory"); }

inline void clear(float* totals, int count) {
  for (int i = 0; i < count; ++i) store(totals + i * kStrip, zeros());
}

// Asks for lines of memory, of all strips alike and at an even pace, while a tile is computed. They are
// wanted after a whole walk along the inputs, so they go to the second cache.
template <int Strips>
class Fetcher {
 public:
  explicit Fetcher(const Tile& tile) : lines_(tile.ahead, tile.ahead_stride), rate_(tile.ahead_rate) {}

  [[gnu::always_inline]] void quarter() {
#pragma GCC unroll 1
    for (due_ += rate_; due_ >= 256; due_ -= 256) {
      repeat<Strips>(
          [&](int s) __attribute__((always_inline)) { prefetch_to_second(lines_[s]); });
      lines_.step(64);
    }
  }

 private:
  Streams<uint8_t, Strips> lines_;
  const int64_t rate_;
  int64_t due_ = 0;
};

// Sixteen sums of products.
struct PairSums {
  Floats sums = zeros();

  void add(Operand x, Operand weights) { sums = add_products(sums, x, weights); }
  Floats value() const { return sums; }
};

// Four pairs of inputs.
template <class Weights, class Sums, int Rows, int Strips>
[[gnu::always_inline]] inline void multiply_quarter(Sums (&sums)[Rows][Strips],
                                                    Streams<Activation, Rows>& x,
                                                    const Streams<uint8_t, Strips>& records) {
  repeat<4>([&](int p) __attribute__((always_inline)) {
    repeat<kParts>([&](int part) __attribute__((always_inline)) {
      Operand weights[Strips];
      repeat<Strips>([&](int s) __attribute__((always_inline)) {
        weights[s] = Weights::part(records[s], p, part);
      });
      repeat<Rows>([&](int r) __attribute__((always_inline)) {
        const Operand number = activation_part(x[r], part);
        repeat<Strips>([&](int s) __attribute__((always_inline)) {
          sums[r][s].add(number, weights[s]);
        });
      });
    });
    x.step(2 * sizeof(Activation));
  });
}

// Weights without scales: the sums go on from block to block.
template <class Weights, class Sums, int Rows, int Strips>
void multiply_tile(const Tile& tile) requires(!Weights::kScaled) {
  Streams<Activation, Rows> x(tile.x, tile.x_stride * int64_t{sizeof(Activation)});
  Streams<uint8_t, Strips> records(tile.records, tile.strip_bytes);
  Fetcher<Strips> fetcher(tile);
  const int64_t quarters = tile.blocks * 4;
  float* totals = tile.totals;

  Sums sums[Rows][Strips];
  for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
    if (tile.continues) sums[r][s] = {load(totals + (r * Strips + s) * kStrip)};
  });
  for (int64_t quarter = 0; quarter < quarters; ++quarter) {
    fetcher.quarter();
    multiply_quarter<Weights>(sums, x, records);
    records.step(Weights::kQuarter);
  }
  for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
    store(totals + (r * Strips + s) * kStrip, sums[r][s].value());
  });
}

// Weights with scales: the sum of each block is added to the totals, which are in memory.
template <class Weights, class Sums, int Rows, int Strips>
void multiply_tile(const Tile& tile) requires(Weights::kScaled) {
  Streams<Activation, Rows> x(tile.x, tile.x_stride * int64_t{sizeof(Activation)});
  Streams<uint8_t, Strips> records(tile.records, tile.strip_bytes);
  Fetcher<Strips> fetcher(tile);
  float* totals = tile.totals;

  if (!tile.continues) clear(totals, Rows * Strips);
  for (int64_t block = 0; block < tile.blocks; ++block) {
    Sums sums[Rows][Strips];
#pragma GCC unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
      fetcher.quarter();
      multiply_quarter<Weights>(sums, x, records);
      records.step(Weights::kQuarter);
    }
    for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
      float* at = totals + (r * Strips + s) * kStrip;
      Floats total = fma(sums[r][s].value(), Weights::scales(records[s]), load(at));
      if constexpr (Weights::kMinimums)
        total = fma(broadcast(tile.x_sums[r * tile.x_sums_stride + block]),
                    Weights::minimums(records[s]), total);
      store(at, total);
    });
    records.step(Weights::kRecord - 4 * Weights::kQuarter);
    forget_memory();
  }
}

// 32 activations of one row, rounded to 8 bits.
struct RoundedBlock {
  RoundedNumbers numbers;
  int32_t offset;  // what makes up for the kExcess that all weights are too large by
  float scale;
};

inline constexpr int kRoundedRecord = 544;

// The scales of a record's sixteen outputs.
inline Floats rounded_scales(const uint8_t* record) { return load_halves(record + 512); }

// Adds a block's sums of one row to the totals of sixteen outputs.
[[gnu::always_inline]] inline void add_rounded(float* totals, Ints sums, Floats scales, float x_scale) {
  store(totals, fma(to_floats(sums), scales * broadcast(x_scale), load(totals)));
}

// Weights and activations of 8 bits: sums of a block are whole numbers.
template <class Dots, int Rows, int Strips>
void multiply_rounded_tile(const Tile& tile) {
  Streams<RoundedBlock, Rows> x(tile.x, tile.x_stride * static_cast<int64_t>(sizeof(RoundedBlock)));
  Streams<uint8_t, Strips> records(tile.records, tile.strip_bytes);
  Fetcher<Strips> fetcher(tile);
  float* totals = tile.totals;

  if (!tile.continues) clear(totals, Rows * Strips);
  for (int64_t block = 0; block < tile.blocks; ++block) {
    Ints sums[Rows][Strips];
    for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
      sums[r][s] = broadcast(x[r]->offset);
    });
    repeat<kBlock / 4>([&](int quad) __attribute__((always_inline)) {
      if (quad % 2 == 0) fetcher.quarter();
      repeat<Dots::kParts>([&](int part) __attribute__((always_inline)) {
        Ints weights[Strips];
        repeat<Strips>([&](int s) __attribute__((always_inline)) {
          weights[s] = Dots::weights(records[s] + quad * 64, part);
        });
        repeat<Rows>([&](int r) __attribute__((always_inline)) {
          const Ints numbers = Dots::activations(x[r]->numbers, quad, part);
          repeat<Strips>([&](int s) __attribute__((always_inline)) {
            sums[r][s] = Dots::add(sums[r][s], weights[s], numbers);
          });
        });
      });
      x.step(0);
    });
    for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
      add_rounded(totals + (r * Strips + s) * kStrip, sums[r][s], rounded_scales(records[s]), x[r]->scale);
    });
    x.step(sizeof(RoundedBlock));
    records.step(kRoundedRecord);
    forget_memory();
  }
}

}  // namespace trioserve::TRIOSERVE_ISA
