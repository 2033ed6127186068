// LoRA: for the tokens of each adapter, a product's result y gets (x A^T) B^T added.
//
// The two matrices are small, so a product's own weights are read once for all tokens, and then this
// comes on top, in two parts: shrink() writes t = x A^T, and after a barrier expand() adds t B^T. Each
// number is summed by one thread in one order that depends on the adapter's shape alone: a token's
// result is the same bit for bit whatever other tokens and adapters there are.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// The structs are mirrored in Python, which packs the matrices.

// Of one projection [outputs, inputs]: the columns of y from `first` on.
struct AdapterModule {
  int64_t first, outputs;  // multiples of 16
  int64_t rank;
  const bf16* a;  // [rank / 16, rounded up][inputs / 2][16][2]: pairs of inputs; filled up with zeros
  const bf16* b;  // [outputs / 16][rank][16], with the scale in it
};

// Those of the projections that are computed as one product.
struct AdapterProduct {
  int64_t num_modules;
  AdapterModule modules[3];
};

struct AdapterLayer {
  AdapterProduct qkv, output, gate_up, down;
};

// The tokens of one adapter in a step.
struct AdapterGroup {
  const AdapterLayer* layers;
  const int32_t* tokens;  // rows of x and y
  int64_t num_tokens;
};

// No token is in two groups.
struct AdapterStep {
  const AdapterGroup* groups;
  int64_t num_groups;
};

// The numbers of t that a token has: for up to three modules of up to `max_rank`.
int64_t adapter_width(int64_t max_rank);

// t [tokens, width] float32 = x A^T of layer `layer`, for the tokens of the step's groups. x is
// [tokens, inputs], with inputs a multiple of 32. Of the inputs, `slice` of `slices` equal parts are summed,
// each whole multiples of 32.
void shrink(const Team& team, const AdapterStep& step, int64_t layer,
            AdapterProduct AdapterLayer::*product, const bf16* x, int64_t inputs, float* t,
            int64_t width, int64_t slice = 0, int64_t slices = 1);

// y [tokens, outputs] += t B^T for the same tokens, each number rounded once.
void expand(const Team& team, const AdapterStep& step, int64_t layer,
            AdapterProduct AdapterLayer::*product, const float* t, int64_t width, bf16* y,
            int64_t outputs);

}  // namespace trioserve::TRIOSERVE_ISA
