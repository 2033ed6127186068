// The two products of attention over keys of one block: queries by keys, and weights by values.
//
// Keys stand in groups of 16, as do values, of head_dim * 16 numbers each, laid out as in kv_cache.h.
// Each sum is added up by itself, in an order that depends on nothing but its own keys, so it is the
// same however many rows are computed side by side.
#pragma once

#include "attention_plan.h"
#include "operands.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr int kGroups = kKeyBlock / kGroup;
// Groups are fetched ahead of their use by so many.
inline constexpr int kAhead = 4;

// A way to compute them. A thread calls begin(), any number of products, and end() with what begin()
// has returned. `groups` has the address of each group, and kAhead more that are needed later.
class AttentionProducts {
 public:
  virtual int tile_rows() const { return kVectorRows; }
  virtual unsigned begin() const { return 0; }
  virtual void end(unsigned) const {}
  // scores[r][16 g + j] = q[r] * key j of group g. A row of q is head_dim numbers, one of scores
  // kKeyBlock.
  virtual void multiply_keys(const Activation* q, int rows, int head_dim, const bf16* const* groups,
                             int num_groups, float* scores) const = 0;
  // out[r] = weights[r][k] * value k, summed over so many keys; or if it `continues`, out[r] += that.
  // A row of weights is kKeyBlock numbers, 0 for the keys behind the last one of a group; one of `out`
  // is head_dim. The memory of values behind the last one may hold anything.
  virtual void multiply_values(const Activation* weights, int rows, int head_dim,
                               const bf16* const* groups, int num_keys, bool continues,
                               float* out) const = 0;

 protected:
  ~AttentionProducts() = default;
};

// That of the current extension.
const AttentionProducts& attention_products();

extern const AttentionProducts &kVectorAttention, &kAmxAttention, &kEmulatedAmxAttention;

}  // namespace trioserve::TRIOSERVE_ISA
