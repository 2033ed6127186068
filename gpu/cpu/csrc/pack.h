// Weights from files into the layout that product.h describes.
#pragma once

#include "product.h"

namespace trioserve::TRIOSERVE_ISA {

// The bytes of one block's record, and of a whole packed weight [outputs, inputs].
size_t record_bytes(Kind kind);
size_t packed_bytes(Kind kind, int64_t outputs, int64_t inputs);

// The functions below fill `packed`, packed_bytes() from a multiple of kWeightAlignment on. They are
// called by all threads of the team, which each pack their share of the strips.

// From row-major [outputs, inputs] numbers. In formats with scales each 32 numbers of a row get theirs
// as ggml's quantization gives it (q8_0 and w8a8: the largest magnitude / 127; q4_0: the number of
// largest magnitude / -8; q4_1: 15 steps from the least to the greatest).
void pack_bf16(const Team& team, Kind kind, int64_t outputs, int64_t inputs, const bf16* weight,
               void* packed);
void pack_float(const Team& team, Kind kind, int64_t outputs, int64_t inputs, const float* weight,
                void* packed);

// From ggml's own blocks, row-major: Q8_0 for q8_0 and w8a8, Q4_0 for q4_0, Q4_1 for q4_1. Exact.
void pack_blocks(const Team& team, Kind kind, int64_t outputs, int64_t inputs, const uint8_t* blocks,
                 void* packed);

}  // namespace trioserve::TRIOSERVE_ISA
