#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// One block of a strip as plain numbers, from which records are written.
struct StripBlock {
  alignas(64) uint8_t quants[kStrip][kBlock];  // as the format stores them
  uint16_t scales[kStrip];                     // float16
  uint16_t minimums[kStrip];
};

void write_pairs(const StripBlock& block, uint8_t* record) {  // q8_0
  for (int pair = 0; pair < kBlock / 2; ++pair)
    for (int n = 0; n < kStrip; ++n) std::memcpy(record + pair * 32 + n * 2, block.quants[n] + pair * 2, 2);
}

void write_quads(const StripBlock& block, uint8_t* record) {  // w8a8
  for (int quad = 0; quad < kBlock / 4; ++quad)
    for (int n = 0; n < kStrip; ++n) std::memcpy(record + quad * 64 + n * 4, block.quants[n] + quad * 4, 4);
}

void write_nibbles(const StripBlock& block, uint8_t* record) {  // q4_0, q4_1
  for (int j = 0; j < kBlock / 8; ++j)
    for (int n = 0; n < kStrip; ++n)
      for (int i = 0; i < 2; ++i) {
        const uint8_t* q = block.quants[n] + 8 * j + i;
        const uint16_t word = static_cast<uint16_t>(q[0] | q[2] << 4 | q[4] << 8 | q[6] << 12);
        std::memcpy(record + j * 64 + n * 4 + i * 2, &word, 2);
      }
}

void write_record(Kind kind, const StripBlock& block, uint8_t* record) {
  switch (kind) {
    case Kind::kQ8_0:
      write_pairs(block, record);
      break;
    case Kind::kW8A8:
      write_quads(block, record);
      break;
    default:
      write_nibbles(block, record);
  }
  uint8_t* end = record + record_bytes(kind);
  if (kind == Kind::kQ4_1) {
    end -= sizeof block.minimums;
    std::memcpy(end, block.minimums, sizeof block.minimums);
  }
  std::memcpy(end - sizeof block.scales, block.scales, sizeof block.scales);
}

// The functions that follow fill one row of a block from 32 numbers. They compute what ggml does, in
// its order, so that the numbers are the same as those of a file quantized beforehand.

void quantize_8(const float* x, StripBlock& block, int n, int zero) {
  float largest = 0;
  for (int i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float scale = largest / 127, inverse = scale ? 1 / scale : 0;
  for (int i = 0; i < kBlock; ++i)
    block.quants[n][i] = static_cast<uint8_t>(static_cast<int>(std::round(x[i] * inverse)) + zero);
  block.scales[n] = to_half(scale);
}

void quantize_4_0(const float* x, StripBlock& block, int n) {
  float largest = 0, signed_largest = 0;
  for (int i = 0; i < kBlock; ++i)
    if (std::fabs(x[i]) > largest) largest = std::fabs(x[i]), signed_largest = x[i];
  const float scale = signed_largest / -8, inverse = scale ? 1 / scale : 0;
  for (int i = 0; i < kBlock; ++i)
    block.quants[n][i] = static_cast<uint8_t>(std::min(15, static_cast<int>(x[i] * inverse + 8.5f)));
  block.scales[n] = to_half(scale);
}

void quantize_4_1(const float* x, StripBlock& block, int n) {
  const float least = *std::min_element(x, x + kBlock), greatest = *std::max_element(x, x + kBlock);
  const float scale = (greatest - least) / 15, inverse = scale ? 1 / scale : 0;
  for (int i = 0; i < kBlock; ++i)
    block.quants[n][i] =
        static_cast<uint8_t>(std::min(15, static_cast<int>((x[i] - least) * inverse + 0.5f)));
  block.scales[n] = to_half(scale);
  block.minimums[n] = to_half(least);
}

void quantize(Kind kind, const float* x, StripBlock& block, int n) {
  switch (kind) {
    case Kind::kQ8_0:
      return quantize_8(x, block, n, 0);
    case Kind::kW8A8:
      return quantize_8(x, block, n, 128);
    case Kind::kQ4_0:
      return quantize_4_0(x, block, n);
    default:
      return quantize_4_1(x, block, n);
  }
}

// Numbers of outputs that are only there to fill up the last strip: nothing reads what is computed
// of them.
void fill_row(Kind kind, StripBlock& block, int n) {
  const float zeros[kBlock] = {};
  quantize(kind, zeros, block, n);
}

// One of ggml's blocks: scale, minimum if there is one, numbers.
void read_block(Kind kind, const uint8_t* raw, StripBlock& block, int n) {
  uint8_t* quants = block.quants[n];
  std::memcpy(&block.scales[n], raw, 2);
  raw += 2;
  if (kind == Kind::kQ4_1) {
    std::memcpy(&block.minimums[n], raw, 2);
    raw += 2;
  }
  if (kind == Kind::kQ8_0 || kind == Kind::kW8A8) {
    const uint8_t zero = kind == Kind::kW8A8 ? 128 : 0;
    for (int i = 0; i < kBlock; ++i) quants[i] = static_cast<uint8_t>(raw[i] + zero);
    return;
  }
  for (int i = 0; i < kBlock / 2; ++i) {
    quants[i] = raw[i] & 15;
    quants[i + kBlock / 2] = raw[i] >> 4;
  }
}

size_t raw_block_bytes(Kind kind) {
  switch (kind) {
    case Kind::kQ4_0:
      return 2 + kBlock / 2;
    case Kind::kQ4_1:
      return 4 + kBlock / 2;
    default:
      return 2 + kBlock;
  }
}

// Calls row(output, block, StripBlock&, n) for every output of this thread's strips, block by block.
template <class Row>
void pack_strips(const Team& team, Kind kind, int64_t outputs, int64_t inputs, void* packed, Row row) {
  const int64_t blocks = inputs / kBlock, strips = (outputs + kStrip - 1) / kStrip;
  const size_t bytes = record_bytes(kind);
  const Share share = team.share(strips);
  StripBlock block = {};
  for (int64_t strip = share.first; strip < share.last; ++strip)
    for (int64_t b = 0; b < blocks; ++b) {
      for (int n = 0; n < kStrip; ++n) {
        const int64_t output = strip * kStrip + n;
        if (output < outputs)
          row(output, b, block, n);
        else
          fill_row(kind, block, n);
      }
      write_record(kind, block, static_cast<uint8_t*>(packed) + (strip * blocks + b) * bytes);
    }
}

void interleave_bf16(const Team& team, int64_t outputs, int64_t inputs, const bf16* weight, void* packed) {
  const int64_t strips = (outputs + kStrip - 1) / kStrip, pairs = inputs / 2;
  const Share share = team.share(strips);
  for (int64_t strip = share.first; strip < share.last; ++strip) {
    uint32_t* to = static_cast<uint32_t*>(packed) + strip * pairs * kStrip;
    for (int n = 0; n < kStrip; ++n) {
      const int64_t output = strip * kStrip + n;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        uint32_t both = 0;
        if (output < outputs) std::memcpy(&both, weight + output * inputs + pair * 2, sizeof both);
        to[pair * kStrip + n] = both;
      }
    }
  }
}

void interleave_float(const Team& team, int64_t outputs, int64_t inputs, const float* weight,
                      void* packed) {
  const int64_t strips = (outputs + kStrip - 1) / kStrip;
  const Share share = team.share(strips);
  bf16* to = static_cast<bf16*>(packed);
  for (int64_t strip = share.first; strip < share.last; ++strip)
    for (int64_t k = 0; k < inputs; ++k)
      for (int n = 0; n < kStrip; ++n) {
        const int64_t output = strip * kStrip + n;
        to[strip * kStrip * inputs + (k / 2 * kStrip + n) * 2 + k % 2] =
            output < outputs ? to_bf16(weight[output * inputs + k]) : 0;
      }
}

// What a number of a record stands for.
float number(Kind kind, const uint8_t* record, int n, int k) {
  const auto half = [&](int from_end) {
    uint16_t bits;
    std::memcpy(&bits, record + record_bytes(kind) - 32 * from_end + n * 2, 2);
    return from_half(bits);
  };
  if (kind == Kind::kQ8_0) {
    return static_cast<float>(static_cast<int8_t>(record[k / 2 * 32 + n * 2 + k % 2])) * half(1);
  }
  if (kind == Kind::kW8A8) {
    return static_cast<float>(record[k / 4 * 64 + n * 4 + k % 4] - 128) * half(1);
  }
  uint16_t word;
  std::memcpy(&word, record + k / 8 * 64 + n * 4 + k % 2 * 2, 2);
  const int q = word >> (k % 8 / 2 * 4) & 15;
  if (kind == Kind::kQ4_0) return static_cast<float>(q - 8) * half(1);
  return static_cast<float>(q) * half(2) + half(1);
}

void gather_bf16(const Product& product, int64_t id, bf16* y) {
  const int64_t pairs = product.inputs / 2;
  const uint32_t* from = static_cast<const uint32_t*>(product.segments[0].packed) +
                         id / kStrip * pairs * kStrip + id % kStrip;
  for (int64_t pair = 0; pair < pairs; ++pair) std::memcpy(y + pair * 2, from + pair * kStrip, 4);
}

void gather_blocks(const Product& product, int64_t id, bf16* y) {
  const Segment& segment = product.segments[0];
  const int64_t blocks = product.inputs / kBlock;
  const size_t bytes = record_bytes(segment.kind);
  const uint8_t* record = static_cast<const uint8_t*>(segment.packed) + id / kStrip * blocks * bytes;
  for (int64_t b = 0; b < blocks; ++b, record += bytes)
    for (int k = 0; k < kBlock; ++k)
      y[b * kBlock + k] = to_bf16(number(segment.kind, record, static_cast<int>(id % kStrip), k));
}

}  // namespace

size_t record_bytes(Kind kind) {
  const size_t numbers = kStrip * kBlock, scales = kStrip * 2;
  switch (kind) {
    case Kind::kBf16:
      return numbers * 2;
    case Kind::kQ4_0:
      return numbers / 2 + scales;
    case Kind::kQ4_1:
      return numbers / 2 + 2 * scales;
    default:
      return numbers + scales;
  }
}

size_t packed_bytes(Kind kind, int64_t outputs, int64_t inputs) {
  const int64_t strips = (outputs + kStrip - 1) / kStrip;
  return static_cast<size_t>(strips * (inputs / kBlock)) * record_bytes(kind);
}

void pack_bf16(const Team& team, Kind kind, int64_t outputs, int64_t inputs, const bf16* weight,
               void* packed) {
  if (kind == Kind::kBf16) return interleave_bf16(team, outputs, inputs, weight, packed);
  pack_strips(team, kind, outputs, inputs, packed,
              [&](int64_t output, int64_t b, StripBlock& block, int n) {
                float numbers[kBlock];
                const bf16* from = weight + output * inputs + b * kBlock;
                for (int i = 0; i < kBlock; ++i) numbers[i] = to_float(from[i]);
                quantize(kind, numbers, block, n);
              });
}

void pack_float(const Team& team, Kind kind, int64_t outputs, int64_t inputs, const float* weight,
                void* packed) {
  if (kind == Kind::kBf16) return interleave_float(team, outputs, inputs, weight, packed);
  pack_strips(team, kind, outputs, inputs, packed,
              [&](int64_t output, int64_t b, StripBlock& block, int n) {
                quantize(kind, weight + output * inputs + b * kBlock, block, n);
              });
}

void pack_blocks(const Team& team, Kind kind, int64_t outputs, int64_t inputs, const uint8_t* blocks,
                 void* packed) {
  const int64_t per_row = inputs / kBlock;
  const size_t bytes = raw_block_bytes(kind);
  pack_strips(team, kind, outputs, inputs, packed,
              [&](int64_t output, int64_t b, StripBlock& block, int n) {
                read_block(kind, blocks + (output * per_row + b) * bytes, block, n);
              });
}

void gather_rows(const Team& team, const Product& product, const int32_t* ids, int64_t rows, bf16* y,
                 int64_t first) {
  const Share share = team.share(rows);
  for (int64_t row = share.first; row < share.last; ++row) {
    const int64_t id = ids[row] - first;
    if (id < 0 || id >= product.outputs) continue;
    if (product.segments[0].kind == Kind::kBf16)
      gather_bf16(product, id, y + row * product.inputs);
    else
      gather_blocks(product, id, y + row * product.inputs);
  }
}

}  // namespace trioserve::TRIOSERVE_ISA
