// Matrix products with fixed weights, laid out once for one row and for hundreds.
//
// y[rows, outputs] = x[rows, inputs] W^T + bias, with activations in bfloat16 and sums in float32.
// A product may be several weights one after the other along the outputs (queries, keys and values;
// gate and up), its segments, each in a number format of its own.
//
// Each number of y is summed by one thread along the inputs, in an order that depends on the weight's
// format and on nothing else: a row's result is the same bit for bit whatever other rows are computed
// with it, and by however many threads.
//
// Layout of a segment: its outputs in strips of 16, the last one filled up with zeros; a strip in blocks
// of 32 inputs, one after the other. A block's record is its numbers, then its scales [16] float16.
//   bf16    [16][16][2] bfloat16: pairs of inputs, outputs, the two of a pair; no scales. 1,024 bytes
//   q8_0    the same of int8. 544 bytes
//   q4_0    [4][16][2] words; of word [j][n][i], bits 4 p to 4 p + 3 are output n's number of input
//           8 j + 2 p + i. It stands for 8 less than itself. 288 bytes
//   q4_1    as q4_0, but with nothing subtracted; after the scales minimums of the same form. 320 bytes
//   w8a8    [8][16][4] uint8: 128 more than the number. The activations are rounded to 8 bits too, with
//           a scale for each row and 32 inputs. 544 bytes
#pragma once

#include <cstddef>
#include <cstdint>

#include "bf16.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr int64_t kStrip = 16;       // outputs of a strip
inline constexpr int64_t kBlock = 32;       // inputs that share a scale; `inputs` is a multiple of it
inline constexpr int kMaxSegments = 3;
inline constexpr size_t kWeightAlignment = 64;

enum class Kind : int32_t { kBf16 = 0, kQ8_0 = 1, kQ4_0 = 2, kQ4_1 = 3, kW8A8 = 4 };

// One packed weight [outputs, inputs] of a product. It owns nothing.
struct Segment {
  Kind kind = Kind::kBf16;
  int32_t reserved = 0;  // the struct is mirrored in Python
  int64_t first = 0;     // the column of y that its first output is
  int64_t outputs = 0;
  const void* packed = nullptr;
};

struct Product {
  int64_t inputs = 0;
  int64_t outputs = 0;          // of all segments together
  const float* bias = nullptr;  // [outputs], or none
  int64_t num_segments = 0;
  Segment segments[kMaxSegments];
  // The product that will be computed next, or none: its first weights are brought into the cache
  // while this one ends.
  const Product* next = nullptr;
};

// Scratch that multiply() and multiply_float() need for up to `max_rows` rows on `threads` threads;
// it begins at a multiple of 64 bytes. Products may share it with a barrier between them.
size_t multiply_scratch_bytes(const Product& product, int64_t max_rows, int threads);

// y = x W^T + bias, rounded to bfloat16 once. x [rows, inputs] and y [rows, outputs] don't overlap.
// Called by all threads of the team; x must be complete before, and y is after the next barrier.
// There may be one more barrier inside.
void multiply(const Team& team, const Product& product, const bf16* x, int64_t rows, bf16* y,
              void* scratch);

// The same, not rounded: y [rows, outputs] float32. For logits.
void multiply_float(const Team& team, const Product& product, const bf16* x, int64_t rows, float* y,
                    void* scratch);

// Sums over parts of the inputs: `slices` of equal size, each whole blocks. y + i * stride is [rows, outputs]
// float32, the sums over slice i without the bias; they are those of a product with these inputs alone.
void multiply_slices(const Team& team, const Product& product, const bf16* x, int64_t rows,
                     int64_t slices, float* y, int64_t stride, void* scratch);

// Whether multiply_gated() takes a product with so many rows: its weights have to be two in bfloat16, and
// the current extension a matrix unit.
bool is_gated(const Product& product, int64_t rows);

// y = silu(gate) * up [rows, outputs / 2], where gate and up are the results of the product's two weights.
// It has the bits that multiply() and silu_mul() have, but reads and writes less memory.
void multiply_gated(const Team& team, const Product& product, const bf16* x, int64_t rows, bf16* y,
                    void* scratch);

// y[i, inputs] = row ids[i] of the weight, rounded to bfloat16: an embedding table that is also the
// head. The product has one segment. Its first output has the id `first`; y[i] is left as it is where the
// product has no output of that id. Each thread does its share.
void gather_rows(const Team& team, const Product& product, const int32_t* ids, int64_t rows, bf16* y,
                 int64_t first = 0);

}  // namespace trioserve::TRIOSERVE_ISA
