// A llama-like decoder: what gpu/models/decoder.py computes, all layers in one call of all threads.
//
// It owns its weights, its KV cache and all memory that a step needs; a step allocates nothing. The
// numbers are rounded to bfloat16 where the torch decoder rounds them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "bf16.h"
#include "experts.h"
#include "kv_cache.h"
#include "memory.h"
#include "product.h"
#include "ranks.h"
#include "rope.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// Of one model, or of the part of one that a rank or a stage has. The struct is mirrored in Python.
struct DecoderShape {
  int64_t vocab_size, hidden_size, intermediate_size;
  int64_t num_layers, num_heads, num_kv_heads, head_dim;
  int64_t num_experts, experts_per_token, expert_size;  // all 0 where there are none
  float rms_norm_eps;
  int32_t threads;
  int32_t normalizes_experts;
};

// Of its cache and its steps. The struct is mirrored in Python.
struct DecoderLimits {
  int64_t page_size, num_pages;
  int64_t max_tokens;     // of a step
  int64_t num_positions;  // rows of the table of rotary angles
  int64_t max_rank;       // of adapters; 0: there are none
};

// What several ranks exchange for a model of this shape.
RanksLimits ranks_limits(const DecoderShape& shape, int64_t max_tokens, int64_t max_rank);

struct Layer {
  const bf16* attention_norm = nullptr;  // [hidden_size]
  const bf16* mlp_norm = nullptr;        // [hidden_size]
  QkNorm qk_norm{nullptr, 0};
  Product qkv, output;
  Product gate_up, down;        // of a layer without experts
  Product router;               // of a layer with them
  std::vector<Expert> experts;  // none where there is one MLP; without products where another rank has them
  const Product* next = nullptr;  // what the next layer begins with; then the head, or the next step
  int64_t window = 0;  // positions that a query sees; 0: all
  bool rotate = true;
  bf16* pages = nullptr;  // the cache, see kv_cache.h
};

class Decoder {
 public:
  // Its weights are put in, and then finish() is called, before the first step.
  explicit Decoder(const DecoderShape& shape);

  // Makes the cache and room for the steps. `cos_sin` is [num_positions, head_dim], and is copied.
  // With `ranks`, this is the part of one of them; null: the model is whole, and computed in one slice.
  // Throws std::bad_alloc.
  void finish(const DecoderLimits& limits, const float* cos_sin, const RanksShape* ranks);

  // Copies `count` pages one after the other, all layers of each, from pairs[i][0] to pairs[i][1].
  void copy_pages(const int32_t (*pairs)[2], int64_t count);

  // Numbers of a page in all layers, and their copies to and from memory of others. They may be called
  // beside forward(), for pages that it doesn't use.
  int64_t page_numbers() const;
  void read_page(int32_t page, bf16* to) const;
  void write_page(int32_t page, const bf16* from);

  // Of the tokens that forward() computed: [tokens, hidden_size], the same on all ranks.
  const bf16* hidden() const { return h_; }

  // What goes from layer to layer, the same shape. A stage before the last has no hidden states: it leaves
  // what the next stage begins with here.
  bf16* states() { return residual_; }

  // Lets the states() begin with the embeddings of `tokens`, for a forward() without tokens: other
  // embeddings may be written over some of them before that.
  void embed(const int32_t* tokens, int64_t count);

  // Computes the hidden states of `tokens`, which stand as `step` says, and fills the cache. Where `tokens`
  // is null, the states() to begin with are there. Some of the tokens may have adapters;
  // `adapters` is null where none has.
  void forward(const int32_t* tokens, const AttentionStep& step, const AdapterStep* adapters);

  // logits[i] = those of hidden state rows[i], or i where `rows` is null: [count, vocab_size]. All ranks
  // call this, or logits() when the first one calls most_probable(); it alone gets them.
  void logits(const bf16* hidden, const int32_t* rows, int64_t count, float* logits);

  // best[i] = the first of the largest of those logits; -1 if they hold NaN or are all -inf.
  void most_probable(const bf16* hidden, const int32_t* rows, int64_t count, int32_t* best);

  // For loading weights.
  Pool& pool() { return pool_; }
  Memory& weights() { return weights_; }

  const DecoderShape shape;
  std::vector<Layer> layers;
  Product embedding;
  Product head;  // without segments: tied to the embedding
  const bf16* norm = nullptr;  // [hidden_size]; null: another stage has it, and the head

 private:
  // The layers that have one window share a plan.
  struct Plan {
    int64_t window;
    void* memory;
    AttentionPlan* plan;
  };

  void make_room(int64_t tokens);
  void embed(const Team& team, const int32_t* tokens, int64_t count);
  void compute_layer(const Team& team, int64_t index, const AttentionStep& step,
                     const AdapterStep* adapters);

  // From h_ to delta_, complete after these.
  void compute_mlp(const Team& team, int64_t index, int64_t count, const AdapterStep* adapters);
  void compute_experts(const Team& team, Layer& layer, int64_t count);
  void add_up_slices_of_experts(const Team& team, const Layer& layer, int64_t count);
  template <typename Multiply>
  void multiply_by_expert(const Team& team, const Layer& layer, Multiply multiply);
  void link_experts(Layer& layer);

  // One of a layer's products, with the adapters' updates, complete after this.
  struct Projection {
    const Product& product;
    AdapterProduct AdapterLayer::*updates;
    const bf16* x;
    bf16* y;
  };
  void project(const Team& team, int64_t layer, const Projection& projection, int64_t count,
               const AdapterStep* adapters);

  // The same of a product whose inputs are split among the ranks.
  void project_slices(const Team& team, int64_t layer, const Projection& projection, int64_t count,
                      const AdapterStep* adapters);
  void shrink_slices(const Team& team, int64_t layer, const Projection& projection, int64_t count,
                     const AdapterStep& adapters);
  Plan& plan_of(const Layer& layer);

  // The logits of `rows` rows of x, at most kRowsAtOnce if there are ranks; complete after this.
  void multiply_head(const Team& team, const bf16* x, int64_t rows, float* logits);
  int64_t vocab_size() const { return ranks_ ? ranks_->vocab_size() : shape.vocab_size; }

  const ExpertsShape experts_;
  AttentionShape attention_{};
  const float* cos_sin_ = nullptr;
  std::unique_ptr<const Ranks> ranks_;  // null: the model is whole
  Pool pool_;
  Memory weights_, cache_, scratch_;
  std::vector<Plan> plans_;
  bf16 *residual_ = nullptr, *h_ = nullptr;       // [max_tokens, hidden_size]
  bf16 *delta_ = nullptr, *chosen_ = nullptr;     // the same
  bf16 *wide_ = nullptr, *narrow_ = nullptr;      // what a layer's first and second products make
  bf16* router_logits_ = nullptr;                 // [max_tokens, num_experts]
  bf16* pairs_ = nullptr;                         // [max_tokens * experts_per_token, hidden_size]
  float* pair_slices_ = nullptr;                  // the same for each slice of this rank
  Routing routing_;
  float* some_logits_ = nullptr;                  // [kRowsAtOnce, vocab_size()]
  float* low_rank_ = nullptr;                     // [max_tokens, low_rank_width_], for adapters
  int64_t low_rank_width_ = 0;
  void *multiply_scratch_ = nullptr, *attention_scratch_ = nullptr;
};

}  // namespace trioserve::TRIOSERVE_ISA
