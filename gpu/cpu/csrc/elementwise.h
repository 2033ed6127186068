// The small operations between products and attention, as gpu/models/operations says and rounded where it
// rounds: to bfloat16 where a result is stored, in float32 before that.
//
// Each is called by all threads of a team, none waits inside. Rows stand one after the other.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// y = x * weight / sqrt(mean(x^2) + eps) for each of `rows` rows; x and y are [rows, width].
void rms_norm(const Team& team, const bf16* x, const bf16* weight, float eps, int64_t rows,
              int64_t width, bf16* y);

// residual += x, rounded, and y = the norm of that sum; all three are [rows, width]. Without a `weight`
// there is no norm.
void add_rms_norm(const Team& team, const bf16* x, bf16* residual, const bf16* weight, float eps,
                  int64_t rows, int64_t width, bf16* y);

// y = silu(gate) * up, [rows, width]; a row of gate_up, [rows, 2 width], has its gates, then its
// ups. silu(gate) is rounded before it is multiplied.
void silu_mul(const Team& team, const bf16* gate_up, int64_t rows, int64_t width, bf16* y);

// y[i] = table[ids[i]], [rows, width].
void gather_rows(const Team& team, const bf16* table, const int32_t* ids, int64_t rows,
                 int64_t width, bf16* y);

// best[i] = the index of the first largest number of row i; a NaN counts as the largest.
void argmax_rows(const Team& team, const float* x, int64_t rows, int64_t width, int32_t* best);

}  // namespace trioserve::TRIOSERVE_ISA
