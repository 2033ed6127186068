// A mixture of experts: which of them a token has, the tokens of each expert side by side, and what
// they make of a token added up.
//
// The numbers are those of gpu/models/mlp.py. What a token gets depends on that token alone: its experts
// are those of the largest logits, of equal ones the first, and their results are added up in that
// order.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "product.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

struct ExpertsShape {
  int64_t count = 0;      // in a layer; 0: the model has none
  int64_t per_token = 0;
  int64_t intermediate_size = 0;
  bool normalized = false;  // the weights of a token's experts add up to 1
};

struct Expert {
  Product gate_up, down;
};

// The experts of a step's tokens in one layer. A pair is a token with one of its experts.
struct Routing {
  float* weights = nullptr;   // [tokens, per_token]: the largest first
  int32_t* chosen = nullptr;  // [tokens, per_token]: the experts that have them
  int32_t* places = nullptr;  // [tokens, per_token]: where the pairs stand when they are put together by
                              // expert, those of an expert in the order of their tokens
  int32_t* tokens = nullptr;  // [tokens * per_token]: the pairs' tokens in that order
  int64_t* first = nullptr;   // [count + 1]: where there each expert's pairs begin
};

// Fills weights and chosen from the router's `logits`, [tokens, count]. Each thread does its share.
void choose_experts(const Team& team, const ExpertsShape& shape, const bf16* logits, int64_t tokens,
                    const Routing& routing);

// Fills the rest, from `chosen`. To be called by one thread.
void group_by_expert(const ExpertsShape& shape, int64_t tokens, const Routing& routing);

// y[i] = the sum of token i's pairs in `results`, each times its weight, rounded once. The results are
// [tokens * per_token, width] in the order of the places, and y is [tokens, width].
void add_up(const Team& team, const ExpertsShape& shape, const bf16* results, const Routing& routing,
            int64_t tokens, int64_t width, bf16* y);

// The same of results in float32, not rounded, and of the pairs with `experts` alone.
void add_up(const Team& team, const ExpertsShape& shape, const float* results,
            const Routing& routing, Share experts, int64_t tokens, int64_t width, float* y);

}  // namespace trioserve::TRIOSERVE_ISA
