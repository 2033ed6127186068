// The innermost loops of products: a few rows of activations by a few strips of weights.
//
// A tile's sums stay in registers while it walks along the inputs. One instruction multiplies 16 pairs
// of bfloat16 and adds both products to 16 sums in float32; the pair of the activations is the same for
// all 16. Numbers of 4 or 8 bits become bfloat16 on the way, which holds them exactly: each block's
// sum is exact up to float32's rounding, and then scaled.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstring>
#include <utility>

#include "product.h"
#include "vector.h"

// g++ 12 finds fault with the vectors that its own header leaves undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace trioserve {

inline constexpr int kTileRows = 8, kTileStrips = 3;  // 24 sums: of 32 registers as many as can be

struct Tile {
  const void* x;                // the first row, at the first block: bf16, or RoundedBlock
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

inline __m512 load_half_scales(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Weights in bfloat16.
struct PlainWeights {
  static constexpr int kRecord = 1024, kQuarter = 256;
  static constexpr bool kScaled = false, kMinimums = false;

  // The 16 pairs of inputs 2 p and 2 p + 1 of a quarter of a block, 8 inputs.
  static __m512bh pairs(const uint8_t* quarter, int p) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(quarter + p * 64));
  }
};

struct ByteWeights {
  static constexpr int kRecord = 544, kQuarter = 128;
  static constexpr bool kScaled = true, kMinimums = false;

  static __m512bh pairs(const uint8_t* quarter, int p) {
    const auto half = [&](int at) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quarter + p * 32 + at));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    };
    return _mm512_cvtne2ps_pbh(half(16), half(0));
  }
  static __m512 scales(const uint8_t* after) { return load_half_scales(after); }
};

// Four bits, looked up in a table of what they stand for: the instruction takes an index's low five
// bits, so the table is there twice.
template <int Zero, bool Minimums>
struct NibbleWeights {
  static constexpr int kRecord = Minimums ? 320 : 288, kQuarter = 64;
  static constexpr bool kScaled = true, kMinimums = Minimums;

  static __m512bh pairs(const uint8_t* quarter, int p) {
    const __m512i words = _mm512_loadu_si512(quarter);
    const __m512i table = _mm512_load_si512(kTable.numbers);
    return reinterpret_cast<__m512bh>(
        _mm512_permutexvar_epi16(_mm512_srli_epi16(words, p * 4), table));
  }
  static __m512 scales(const uint8_t* after) { return load_half_scales(after); }
  static __m512 minimums(const uint8_t* after) { return load_half_scales(after + 32); }

 private:
  struct Table {
    alignas(64) bf16 numbers[32];
    constexpr Table() : numbers() {
      for (int i = 0; i < 32; ++i)
        numbers[i] = static_cast<bf16>(
            std::bit_cast<uint32_t>(static_cast<float>(i % 16 - Zero)) >> 16);
    }
  };
  static constexpr Table kTable = {};
};

// Quantized weights that were made bfloat16 beforehand, for many rows; scales as float32.
template <bool Minimums>
struct DecodedWeights {
  static constexpr int kRecord = 1024 + 64 + (Minimums ? 64 : 0), kQuarter = 256;
  static constexpr bool kScaled = true, kMinimums = Minimums;

  static __m512bh pairs(const uint8_t* quarter, int p) { return PlainWeights::pairs(quarter, p); }
  static __m512 scales(const uint8_t* after) { return _mm512_loadu_ps(after); }
  static __m512 minimums(const uint8_t* after) { return _mm512_loadu_ps(after + 64); }
};

// The record of a block of Weights as that of DecodedWeights.
template <class Weights>
void decode_record(const uint8_t* record, uint8_t* decoded) {
#pragma GCC unroll 16
  for (int p = 0; p < kBlock / 2; ++p) {
    const __m512bh pairs = Weights::pairs(record + p / 4 * Weights::kQuarter, p % 4);
    _mm512_storeu_si512(decoded + p * 64, reinterpret_cast<__m512i>(pairs));
  }
  const uint8_t* after = record + 4 * Weights::kQuarter;
  _mm512_storeu_ps(decoded + 1024, Weights::scales(after));
  if constexpr (Weights::kMinimums) _mm512_storeu_ps(decoded + 1088, Weights::minimums(after));
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
  for (int i = 0; i < count; ++i) _mm512_storeu_ps(totals + i * kStrip, _mm512_setzero_ps());
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
          [&](int s) __attribute__((always_inline)) { _mm_prefetch(lines_[s], _MM_HINT_T1); });
      lines_.step(64);
    }
  }

 private:
  Streams<uint8_t, Strips> lines_;
  const int64_t rate_;
  int64_t due_ = 0;
};

// Sixteen sums of products, by the processor's instruction for pairs.
struct PairSums {
  __m512 sums = _mm512_setzero_ps();

  void add(__m512bh x, __m512bh weights) { sums = _mm512_dpbf16_ps(sums, x, weights); }
  __m512 value() const { return sums; }
};

// The same in the order of a matrix unit (matrix_unit.h): even and odd inputs apart.
struct EvenOddSums {
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();

  void add(__m512bh x, __m512bh weights) {
    even = _mm512_fmadd_ps(first_of_pairs(x), first_of_pairs(weights), even);
    odd = _mm512_fmadd_ps(second_of_pairs(x), second_of_pairs(weights), odd);
  }
  __m512 value() const { return _mm512_add_ps(even, odd); }
};

// Four pairs of inputs.
template <class Weights, class Sums, int Rows, int Strips>
[[gnu::always_inline]] inline void multiply_quarter(Sums (&sums)[Rows][Strips], Streams<bf16, Rows>& x,
                                                    const Streams<uint8_t, Strips>& records) {
  repeat<4>([&](int p) __attribute__((always_inline)) {
    __m512bh weights[Strips];
    repeat<Strips>([&](int s) __attribute__((always_inline)) {
      weights[s] = Weights::pairs(records[s], p);
    });
    repeat<Rows>([&](int r) __attribute__((always_inline)) {
      const __m512bh pair = broadcast_pair(x[r]);
      repeat<Strips>([&](int s) __attribute__((always_inline)) {
        sums[r][s].add(pair, weights[s]);
      });
    });
    x.step(4);
  });
}

// Weights without scales: the sums go on from block to block.
template <class Weights, class Sums, int Rows, int Strips>
void multiply_tile(const Tile& tile) requires(!Weights::kScaled) {
  Streams<bf16, Rows> x(tile.x, tile.x_stride * 2);
  Streams<uint8_t, Strips> records(tile.records, tile.strip_bytes);
  Fetcher<Strips> fetcher(tile);
  const int64_t quarters = tile.blocks * 4;
  float* totals = tile.totals;

  Sums sums[Rows][Strips];
  for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
    if (tile.continues) sums[r][s] = {_mm512_loadu_ps(totals + (r * Strips + s) * kStrip)};
  });
  for (int64_t quarter = 0; quarter < quarters; ++quarter) {
    fetcher.quarter();
    multiply_quarter<Weights>(sums, x, records);
    records.step(Weights::kQuarter);
  }
  for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
    _mm512_storeu_ps(totals + (r * Strips + s) * kStrip, sums[r][s].value());
  });
}

// Weights with scales: the sum of each block is added to the totals, which are in memory.
template <class Weights, class Sums, int Rows, int Strips>
void multiply_tile(const Tile& tile) requires(Weights::kScaled) {
  Streams<bf16, Rows> x(tile.x, tile.x_stride * 2);
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
      __m512 total =
          _mm512_fmadd_ps(sums[r][s].value(), Weights::scales(records[s]), _mm512_loadu_ps(at));
      if constexpr (Weights::kMinimums)
        total = _mm512_fmadd_ps(_mm512_set1_ps(tile.x_sums[r * tile.x_sums_stride + block]),
                                Weights::minimums(records[s]), total);
      _mm512_storeu_ps(at, total);
    });
    records.step(Weights::kRecord - 4 * Weights::kQuarter);
    forget_memory();
  }
}

// 32 activations of one row, rounded to 8 bits.
struct RoundedBlock {
  int8_t numbers[kBlock];
  int32_t offset;  // what makes up for the 128 that all weights are too large by
  float scale;
};

inline constexpr int kRoundedRecord = 544;

// Weights and activations of 8 bits: sums of a block are whole numbers.
template <int Rows, int Strips>
void multiply_rounded_tile(const Tile& tile) {
  Streams<RoundedBlock, Rows> x(tile.x, tile.x_stride * static_cast<int64_t>(sizeof(RoundedBlock)));
  Streams<uint8_t, Strips> records(tile.records, tile.strip_bytes);
  Fetcher<Strips> fetcher(tile);
  float* totals = tile.totals;

  if (!tile.continues) clear(totals, Rows * Strips);
  for (int64_t block = 0; block < tile.blocks; ++block) {
    __m512i sums[Rows][Strips];
    for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
      sums[r][s] = _mm512_set1_epi32(x[r]->offset);
    });
    repeat<kBlock / 4>([&](int quad) __attribute__((always_inline)) {
      if (quad % 2 == 0) fetcher.quarter();
      __m512i weights[Strips];
      repeat<Strips>([&](int s) __attribute__((always_inline)) {
        weights[s] = _mm512_loadu_si512(records[s] + quad * 64);
      });
      repeat<Rows>([&](int r) __attribute__((always_inline)) {
        int32_t four;
        std::memcpy(&four, x[r]->numbers + quad * 4, sizeof four);
        const __m512i numbers = _mm512_set1_epi32(four);
        repeat<Strips>([&](int s) __attribute__((always_inline)) {
          sums[r][s] = _mm512_dpbusd_epi32(sums[r][s], weights[s], numbers);
        });
      });
      x.step(0);
    });
    for_each_sum<Rows, Strips>([&](int r, int s) __attribute__((always_inline)) {
      float* at = totals + (r * Strips + s) * kStrip;
      const __m512 scales = load_half_scales(records[s] + 512);
      const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x[r]->scale));
      const __m512 sum = _mm512_cvtepi32_ps(sums[r][s]);
      _mm512_storeu_ps(at, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(at)));
    });
    x.step(sizeof(RoundedBlock));
    records.step(kRoundedRecord);
    forget_memory();
  }
}

}  // namespace trioserve
