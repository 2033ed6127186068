// Between the product that makes queries, keys and values, and attention over them.
#pragma once

#include "bf16.h"
#include "kv_cache.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// A norm of each head of the queries and the keys: x * weight / sqrt(mean(x^2) + eps), rounded
// before it is multiplied by the weight, and after.
struct QkNorm {
  const bf16* weight;  // [num_heads + num_kv_heads, head_dim]; null: no norm
  float eps;
};

// Norms and rotates queries and keys, and writes keys and values to the pages of one layer.
//
// qkv is [num_tokens, num_heads + 2 num_kv_heads, head_dim]: a token's queries, its keys, both
// changed where they stand, and its values. cos_sin is the table of gpu.rope, [positions, head_dim]
// float32; null: queries and keys aren't rotated. The step may have other angles.
void rope_and_write(const Team& team, const AttentionShape& shape, const AttentionStep& step,
                    const float* cos_sin, const QkNorm& norm, bf16* qkv, bf16* pages);

}  // namespace trioserve::TRIOSERVE_ISA
