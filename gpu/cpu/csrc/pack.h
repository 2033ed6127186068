// Weights from files into the layout that product.h describes.
#pragma once

#include "product.h"

namespace trioserve {

// The bytes that a packed weight takes; its memory begins at a multiple of kWeightAlignment.
size_t packed_bytes(Kind kind, int64_t outputs, int64_t inputs);

// A segment whose pointers lie in `memory` of packed_bytes(), which the functions below fill.
Segment packed_segment(Kind kind, int64_t outputs, int64_t inputs, int64_t first, void* memory);

// From row-major [outputs, inputs] numbers. Formats of blocks: each 32 numbers of a row get a scale of
// their own as ggml's quantization gives it (q8_0 and w8a8: the largest magnitude / 127; q4_0: the
// number of largest magnitude / -8; q4_1: from the least to the greatest in 15 steps).
// Called by all threads of the team, which each pack their share of the strips.
void pack_bf16(const Team& team, const Segment& segment, int64_t inputs, const bf16* weight);
void pack_float(const Team& team, const Segment& segment, int64_t inputs, const float* weight);

// From ggml's own blocks, row-major: Q8_0 for q8_0 and w8a8, Q4_0 for q4_0, Q4_1 for q4_1. Exact.
void pack_blocks(const Team& team, const Segment& segment, int64_t inputs, const uint8_t* blocks);

}  // namespace trioserve
