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
  float* totals;                // [rows][strips][16]: the result
  bool continues;               // whether totals already hold the sums of earlier blocks
  const uint8_t* ahead;         // what to bring into the cache meanwhile: of each strip
  int64_t ahead_stride;         // (this far apart)
  int64_t ahead_lines;          // so many lines of 64 bytes with each block
};

using TileFunction = void (*)(const Tile&);

inline __m512 load_half_scales(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Weights in bfloat16.
struct PlainWeights {
  static constexpr int kRecord = 1024;
  static constexpr bool kScaled = false, kMinimums = false;

  // The 16 pairs of inputs 2 p and 2 p + 1.
  static __m512bh pairs(const uint8_t* record, int p) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(record + p * 64));
  }
};

struct ByteWeights {
  static constexpr int kRecord = 544;
  static constexpr bool kScaled = true, kMinimums = false;

  static __m512bh pairs(const uint8_t* record, int p) {
    const auto half = [&](int at) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(record + p * 32 + at));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    };
    return _mm512_cvtne2ps_pbh(half(16), half(0));
  }
  static __m512 scales(const uint8_t* record) { return load_half_scales(record + 512); }
};

// Four bits, looked up in a table of what they stand for: the instruction takes an index's low five
// bits, so the table is there twice.
template <int Zero, bool Minimums>
struct NibbleWeights {
  static constexpr int kRecord = Minimums ? 320 : 288;
  static constexpr bool kScaled = true, kMinimums = Minimums;

  static __m512bh pairs(const uint8_t* record, int p) {
    const __m512i words = _mm512_loadu_si512(record + p / 4 * 64);
    const __m512i table = _mm512_load_si512(kTable.numbers);
    return reinterpret_cast<__m512bh>(
        _mm512_permutexvar_epi16(_mm512_srli_epi16(words, p % 4 * 4), table));
  }
  static __m512 scales(const uint8_t* record) { return load_half_scales(record + 256); }
  static __m512 minimums(const uint8_t* record) { return load_half_scales(record + 288); }

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
  static constexpr int kRecord = 1024 + 64 + (Minimums ? 64 : 0);
  static constexpr bool kScaled = true, kMinimums = Minimums;

  static __m512bh pairs(const uint8_t* record, int p) { return PlainWeights::pairs(record, p); }
  static __m512 scales(const uint8_t* record) { return _mm512_loadu_ps(record + 1024); }
  static __m512 minimums(const uint8_t* record) { return _mm512_loadu_ps(record + 1088); }
};

// The record of a block of Weights as that of DecodedWeights.
template <class Weights>
void decode_record(const uint8_t* record, uint8_t* decoded) {
#pragma GCC unroll 16
  for (int p = 0; p < kBlock / 2; ++p)
    _mm512_storeu_si512(decoded + p * 64, reinterpret_cast<__m512i>(Weights::pairs(record, p)));
  _mm512_storeu_ps(decoded + 1024, Weights::scales(record));
  if constexpr (Weights::kMinimums) _mm512_storeu_ps(decoded + 1088, Weights::minimums(record));
}

// Asks for a quarter of the lines of each strip that are to come with a block. They are wanted after
// a whole walk along the inputs, so they go to the second cache.
template <int Strips>
const uint8_t* fetch_ahead(const Tile& tile, const uint8_t* at, int quarter) {
  for (int64_t line = (tile.ahead_lines + 3 - quarter) / 4; line > 0; --line, at += 64)
    for (int s = 0; s < Strips; ++s) _mm_prefetch(at + s * tile.ahead_stride, _MM_HINT_T1);
  return at;
}

template <class Weights, int Rows, int Strips>
void multiply_tile(const Tile& tile) {
  const bf16* x[Rows];
  for (int r = 0; r < Rows; ++r) x[r] = static_cast<const bf16*>(tile.x) + r * tile.x_stride;
  const uint8_t *record = tile.records, *ahead = tile.ahead;
  const auto total = [&](int r, int s) { return tile.totals + (r * Strips + s) * kStrip; };

  __m512 sums[Rows][Strips];
  for (int r = 0; r < Rows; ++r)
    for (int s = 0; s < Strips; ++s) {
      sums[r][s] = _mm512_setzero_ps();
      if (!tile.continues)
        _mm512_storeu_ps(total(r, s), sums[r][s]);
      else if (!Weights::kScaled)
        sums[r][s] = _mm512_loadu_ps(total(r, s));
    }
  for (int64_t block = 0; block < tile.blocks; ++block, record += Weights::kRecord) {
    const int64_t k = block * kBlock;
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
      ahead = fetch_ahead<Strips>(tile, ahead, quarter);
#pragma GCC unroll 4
      for (int p = quarter * 4; p < quarter * 4 + 4; ++p) {
        __m512bh weights[Strips];
        for (int s = 0; s < Strips; ++s)
          weights[s] = Weights::pairs(record + s * tile.strip_bytes, p);
        for (int r = 0; r < Rows; ++r) {
          const __m512bh pair = broadcast_pair(x[r] + k + p * 2);
          for (int s = 0; s < Strips; ++s)
            sums[r][s] = _mm512_dpbf16_ps(sums[r][s], pair, weights[s]);
        }
      }
    }
    if constexpr (Weights::kScaled) {
      for (int s = 0; s < Strips; ++s) {
        const uint8_t* of_strip = record + s * tile.strip_bytes;
        const __m512 scales = Weights::scales(of_strip);
        for (int r = 0; r < Rows; ++r) {
          __m512 sum = _mm512_fmadd_ps(sums[r][s], scales, _mm512_loadu_ps(total(r, s)));
          if constexpr (Weights::kMinimums)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(tile.x_sums[r * tile.x_sums_stride + block]),
                                  Weights::minimums(of_strip), sum);
          _mm512_storeu_ps(total(r, s), sum);
          sums[r][s] = _mm512_setzero_ps();
        }
      }
    }
  }
  if constexpr (!Weights::kScaled)
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < Strips; ++s) _mm512_storeu_ps(total(r, s), sums[r][s]);
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
  const RoundedBlock* x[Rows];
  for (int r = 0; r < Rows; ++r) x[r] = static_cast<const RoundedBlock*>(tile.x) + r * tile.x_stride;
  const uint8_t *record = tile.records, *ahead = tile.ahead;
  const auto total = [&](int r, int s) { return tile.totals + (r * Strips + s) * kStrip; };

  if (!tile.continues)
    for (int i = 0; i < Rows * Strips; ++i)
      _mm512_storeu_ps(tile.totals + i * kStrip, _mm512_setzero_ps());
  for (int64_t block = 0; block < tile.blocks; ++block, record += kRoundedRecord) {
    __m512i sums[Rows][Strips];
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < Strips; ++s) sums[r][s] = _mm512_set1_epi32(x[r][block].offset);
#pragma GCC unroll 8
    for (int quad = 0; quad < kBlock / 4; ++quad) {
      if (quad % 2 == 0) ahead = fetch_ahead<Strips>(tile, ahead, quad / 2);
      __m512i weights[Strips];
      for (int s = 0; s < Strips; ++s)
        weights[s] = _mm512_loadu_si512(record + s * tile.strip_bytes + quad * 64);
      for (int r = 0; r < Rows; ++r) {
        int32_t four;
        std::memcpy(&four, x[r][block].numbers + quad * 4, sizeof four);
        const __m512i numbers = _mm512_set1_epi32(four);
        for (int s = 0; s < Strips; ++s)
          sums[r][s] = _mm512_dpbusd_epi32(sums[r][s], weights[s], numbers);
      }
    }
    for (int s = 0; s < Strips; ++s) {
      const __m512 scales = load_half_scales(record + s * tile.strip_bytes + 512);
      for (int r = 0; r < Rows; ++r) {
        const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x[r][block].scale));
        _mm512_storeu_ps(total(r, s), _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][s]), scale,
                                                      _mm512_loadu_ps(total(r, s))));
      }
    }
  }
}

}  // namespace trioserve
