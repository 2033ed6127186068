#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "elementwise.h"

namespace trioserve::TRIOSERVE_ISA {

namespace {

// Rows of logits that are looked through while they are in the cache.
constexpr int64_t kRowsAtOnce = 32;

// Those of a layer that are computed whatever its tokens are, in this order.
std::vector<Product*> products_of(Layer& layer) {
  if (!layer.experts.empty()) return {&layer.qkv, &layer.output, &layer.router};
  return {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
}

}  // namespace

RanksLimits ranks_limits(const DecoderShape& shape, int64_t max_tokens, int64_t max_rank) {
  return {shape.hidden_size, max_tokens, shape.vocab_size, adapter_width(max_rank), kRowsAtOnce};
}

Decoder::Decoder(const DecoderShape& given)
    : shape(given),
      layers(given.num_layers),
      experts_{given.num_experts, given.experts_per_token, given.expert_size,
               given.normalizes_experts != 0},
      pool_(given.threads),
      weights_(Pages::kLarge),
      cache_(Pages::kLarge),
      scratch_(Pages::kSmall) {}

void Decoder::finish(const DecoderLimits& limits, const float* cos_sin, const RanksShape* ranks) {
  if (ranks != nullptr)
    ranks_ = std::make_unique<const Ranks>(
        *ranks, ranks_limits(shape, limits.max_tokens, limits.max_rank), shape.threads);
  if (head.num_segments == 0) head = embedding;
  const Product** next = &head.next;
  for (Layer& layer : layers) {
    for (Product* product : products_of(layer)) {
      *next = product;
      next = &product->next;
    }
    if (!layer.experts.empty()) next = &layer.next;
  }
  *next = norm == nullptr ? head.next : &head;
  attention_.num_heads = static_cast<int>(shape.num_heads);
  attention_.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  attention_.head_dim = static_cast<int>(shape.head_dim);
  attention_.page_size = static_cast<int>(limits.page_size);
  attention_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  float* angles = cache_.take<float>(limits.num_positions * shape.head_dim);
  std::copy_n(cos_sin, limits.num_positions * shape.head_dim, angles);
  cos_sin_ = angles;
  for (Layer& layer : layers)
    layer.pages = cache_.take<bf16>(limits.num_pages * attention_.page_stride());
  low_rank_width_ = adapter_width(limits.max_rank);
  make_room(limits.max_tokens);
}

void Decoder::copy_pages(const int32_t (*pairs)[2], int64_t count) {
  const int64_t stride = attention_.page_stride();
  for (int64_t i = 0; i < count; ++i)
    for (Layer& layer : layers)
      std::copy_n(layer.pages + pairs[i][0] * stride, stride, layer.pages + pairs[i][1] * stride);
}

int64_t Decoder::page_numbers() const {
  return static_cast<int64_t>(layers.size()) * attention_.page_stride();
}

void Decoder::read_page(int32_t page, bf16* to) const {
  const int64_t stride = attention_.page_stride();
  for (const Layer& layer : layers) to = std::copy_n(layer.pages + page * stride, stride, to);
}

void Decoder::write_page(int32_t page, const bf16* from) {
  const int64_t stride = attention_.page_stride();
  for (Layer& layer : layers) {
    std::copy_n(from, stride, layer.pages + page * stride);
    from += stride;
  }
}

void Decoder::make_room(int64_t tokens) {
  const int64_t width = shape.hidden_size;
  const int64_t query_width = shape.num_heads * shape.head_dim;
  for (bf16** rows : {&residual_, &h_, &delta_, &chosen_})
    *rows = scratch_.take<bf16>(tokens * width);
  const int64_t pairs = tokens * experts_.per_token, inner = pairs * experts_.intermediate_size;
  const int64_t of_mlp = tokens * shape.intermediate_size;
  wide_ = scratch_.take<bf16>(std::max({tokens * attention_.qkv_width(), 2 * of_mlp, 2 * inner}));
  narrow_ = scratch_.take<bf16>(std::max({tokens * query_width, of_mlp, inner}));
  router_logits_ = scratch_.take<bf16>(tokens * experts_.count);
  pairs_ = scratch_.take<bf16>(pairs * width);
  if (ranks_) pair_slices_ = scratch_.take<float>(ranks_->own_slices() * pairs * width);
  routing_ = {scratch_.take<float>(pairs), scratch_.take<int32_t>(pairs),
              scratch_.take<int32_t>(pairs), scratch_.take<int32_t>(pairs),
              scratch_.take<int64_t>(experts_.count + 1)};
  low_rank_ = scratch_.take<float>(tokens * low_rank_width_);
  some_logits_ = scratch_.take<float>(std::min(tokens, kRowsAtOnce) * vocab_size());

  size_t needed = multiply_scratch_bytes(head, tokens, shape.threads);
  const auto need = [&](const Product& product) {
    needed = std::max(needed, multiply_scratch_bytes(product, tokens, shape.threads));
  };
  for (Layer& layer : layers) {
    for (const Product* product : products_of(layer)) need(*product);
    for (const Expert& expert : layer.experts) {
      need(expert.gate_up);
      need(expert.down);
    }
  }
  multiply_scratch_ = scratch_.take_bytes(needed);
  attention_scratch_ = scratch_.take_bytes(attention_scratch_bytes(attention_, shape.threads));
  for (const Layer& layer : layers) {
    const auto same = [&](const Plan& plan) { return plan.window == layer.window; };
    if (std::any_of(plans_.begin(), plans_.end(), same)) continue;
    const int64_t bytes = attention_plan_bytes(attention_, tokens, shape.threads);
    plans_.push_back({layer.window, scratch_.take_bytes(bytes), nullptr});
  }
}

void Decoder::forward(const int32_t* tokens, const AttentionStep& step,
                      const AdapterStep* adapters) {
  const int64_t count = step.num_tokens();
  pool_.run([&](const Team& team) {
    if (tokens != nullptr) embed(team, tokens, count);
    if (team.rank() == 0)
      for (Plan& plan : plans_)
        plan.plan = plan_attention(attention_, step, plan.window, team.size(), plan.memory);
    team.barrier();
    rms_norm(team, residual_, layers[0].attention_norm, shape.rms_norm_eps, count,
             shape.hidden_size, h_);
    team.barrier();
    for (int64_t i = 0; i < shape.num_layers; ++i) compute_layer(team, i, step, adapters);
  });
}

void Decoder::embed(const int32_t* tokens, int64_t count) {
  pool_.run([&](const Team& team) { embed(team, tokens, count); });
}

// A token's row is on one rank, which writes it.
void Decoder::embed(const Team& team, const int32_t* tokens, int64_t count) {
  if (!ranks_) return gather_rows(team, embedding, tokens, count, residual_);
  bf16* rows = ranks_->memory<bf16>();
  gather_rows(team, embedding, tokens, count, rows, ranks_->vocabulary().first);
  ranks_->barrier();
  const Share share = team.share(count * shape.hidden_size);
  std::copy(rows + share.first, rows + share.last, residual_ + share.first);
}

void Decoder::compute_layer(const Team& team, int64_t index, const AttentionStep& step,
                            const AdapterStep* adapters) {
  const Layer& layer = layers[index];
  // A norm comes with the addition before it, so each layer ends with the norm of the next, if that is here.
  const bf16* next_norm = index + 1 < shape.num_layers ? layers[index + 1].attention_norm : norm;
  const int64_t count = step.num_tokens(), width = shape.hidden_size;
  const float eps = shape.rms_norm_eps;
  project(team, index, {layer.qkv, &AdapterLayer::qkv, h_, wide_}, count, adapters);
  rope_and_write(team, attention_, step, layer.rotate ? cos_sin_ : nullptr, layer.qk_norm, wide_,
                 layer.pages);
  team.barrier();
  attend(team, attention_, step, *plan_of(layer).plan, layer.pages, wide_,
         attention_.qkv_width(), narrow_, attention_scratch_);
  team.barrier();
  project_slices(team, index, {layer.output, &AdapterLayer::output, narrow_, delta_}, count, adapters);
  add_rms_norm(team, delta_, residual_, layer.mlp_norm, eps, count, width, h_);
  team.barrier();
  if (layer.experts.empty())
    compute_mlp(team, index, count, adapters);
  else
    compute_experts(team, layers[index], count);
  add_rms_norm(team, delta_, residual_, next_norm, eps, count, width, h_);
  team.barrier();
}

void Decoder::compute_mlp(const Team& team, int64_t index, int64_t count,
                          const AdapterStep* adapters) {
  const Layer& layer = layers[index];
  if (adapters == nullptr && is_gated(layer.gate_up, count)) {
    multiply_gated(team, layer.gate_up, h_, count, narrow_, multiply_scratch_);
  } else {
    project(team, index, {layer.gate_up, &AdapterLayer::gate_up, h_, wide_}, count, adapters);
    silu_mul(team, wide_, count, shape.intermediate_size, narrow_);
  }
  team.barrier();
  project_slices(team, index, {layer.down, &AdapterLayer::down, narrow_, delta_}, count, adapters);
}

void Decoder::compute_experts(const Team& team, Layer& layer, int64_t count) {
  const int64_t pairs = count * experts_.per_token, width = shape.hidden_size;
  multiply(team, layer.router, h_, count, router_logits_, multiply_scratch_);
  team.barrier();
  choose_experts(team, experts_, router_logits_, count, routing_);
  team.barrier();
  if (team.rank() == 0) {
    group_by_expert(experts_, count, routing_);
    link_experts(layer);
  }
  team.barrier();
  gather_rows(team, h_, routing_.tokens, pairs, width, pairs_);
  team.barrier();
  const int64_t inner = experts_.intermediate_size;
  multiply_by_expert(team, layer, [&](const Expert& expert, int64_t first, int64_t rows) {
    multiply(team, expert.gate_up, pairs_ + first * width, rows, wide_ + first * 2 * inner,
             multiply_scratch_);
  });
  silu_mul(team, wide_, pairs, inner, narrow_);
  team.barrier();
  if (ranks_) return add_up_slices_of_experts(team, layer, count);
  multiply_by_expert(team, layer, [&](const Expert& expert, int64_t first, int64_t rows) {
    multiply(team, expert.down, narrow_ + first * inner, rows, pairs_ + first * width,
             multiply_scratch_);
  });
  add_up(team, experts_, pairs_, routing_, count, width, delta_);
  team.barrier();
}

// The last of compute_experts(). A slice is a part of each expert's inner numbers, or some of the experts.
void Decoder::add_up_slices_of_experts(const Team& team, const Layer& layer, int64_t count) {
  const int64_t width = shape.hidden_size, inner = experts_.intermediate_size;
  const int64_t slices = ranks_->slices(), own = ranks_->own_slices(), first_slice = ranks_->first_slice();
  const int64_t each = ranks_->by_expert() ? 0 : count * experts_.per_token * width;
  multiply_by_expert(team, layer, [&](const Expert& expert, int64_t first, int64_t rows) {
    multiply_slices(team, expert.down, narrow_ + first * inner, rows, each == 0 ? 1 : own,
                    pair_slices_ + first * width, each, multiply_scratch_);
  });
  float* sums = ranks_->memory<float>();
  for (int64_t slice = first_slice; slice < first_slice + own; ++slice) {
    Share experts{0, experts_.count};
    if (ranks_->by_expert()) experts = ranks_->experts(slice, experts_.count);
    add_up(team, experts_, pair_slices_ + (slice - first_slice) * each, routing_, experts, count, width,
           sums + slice * count * width);
  }
  ranks_->barrier();
  add_slices(team, sums, slices, count, width, nullptr, delta_);
  team.barrier();
}

// Calls multiply(expert, its first pair, its pairs) for those that have pairs here, one after the other;
// complete after this. A product has as many rows as there are pairs, those of one expert side by side.
template <typename Multiply>
void Decoder::multiply_by_expert(const Team& team, const Layer& layer, Multiply multiply) {
  for (int64_t i = 0; i < experts_.count; ++i) {
    const int64_t first = routing_.first[i], rows = routing_.first[i + 1] - first;
    if (rows == 0 || layer.experts[i].down.num_segments == 0) continue;
    multiply(layer.experts[i], first, rows);
    team.barrier();  // the next one has the same scratch
  }
}

// Has each product of the experts in use fetch the next one's weights.
void Decoder::link_experts(Layer& layer) {
  const Product** next = &layer.router.next;
  for (Product Expert::*product : {&Expert::gate_up, &Expert::down})
    for (int64_t i = 0; i < experts_.count; ++i) {
      Product& own = layer.experts[i].*product;
      if (routing_.first[i] == routing_.first[i + 1] || own.num_segments == 0) continue;
      *next = &own;
      next = &own.next;
    }
  *next = layer.next;
}

void Decoder::project(const Team& team, int64_t layer, const Projection& projection, int64_t count,
                      const AdapterStep* adapters) {
  const auto& [product, updates, x, y] = projection;
  multiply(team, product, x, count, y, multiply_scratch_);
  if (adapters != nullptr)
    shrink(team, *adapters, layer, updates, x, product.inputs, low_rank_, low_rank_width_);
  team.barrier();
  if (adapters == nullptr) return;
  expand(team, *adapters, layer, updates, low_rank_, low_rank_width_, y, product.outputs);
  team.barrier();
}

void Decoder::project_slices(const Team& team, int64_t layer, const Projection& projection,
                             int64_t count, const AdapterStep* adapters) {
  if (!ranks_) return project(team, layer, projection, count, adapters);
  const auto& [product, updates, x, y] = projection;
  if (adapters != nullptr) shrink_slices(team, layer, projection, count, *adapters);
  const int64_t width = product.outputs, each = count * width;
  float* parts = ranks_->memory<float>();
  multiply_slices(team, product, x, count, ranks_->own_slices(),
                  parts + ranks_->first_slice() * each, each, multiply_scratch_);
  ranks_->barrier();
  add_slices(team, parts, ranks_->slices(), count, width, product.bias, y);
  team.barrier();
  if (adapters == nullptr) return;
  expand(team, *adapters, layer, updates, low_rank_, low_rank_width_, y, width);
  team.barrier();
}

// Fills low_rank_ with the sum over all ranks; complete after the next barrier.
void Decoder::shrink_slices(const Team& team, int64_t layer, const Projection& projection,
                            int64_t count, const AdapterStep& adapters) {
  const auto& [product, updates, x, y] = projection;
  const int64_t own = ranks_->own_slices(), each = count * low_rank_width_;
  float* parts = ranks_->memory<float>();
  for (int64_t slice = 0; slice < own; ++slice)
    shrink(team, adapters, layer, updates, x, product.inputs,
           parts + (ranks_->first_slice() + slice) * each, low_rank_width_, slice, own);
  ranks_->barrier();
  add_slices(team, parts, ranks_->slices(), count, low_rank_width_, low_rank_);
}

Decoder::Plan& Decoder::plan_of(const Layer& layer) {
  return *std::find_if(plans_.begin(), plans_.end(),
                       [&](const Plan& plan) { return plan.window == layer.window; });
}

void Decoder::multiply_head(const Team& team, const bf16* x, int64_t rows, float* logits) {
  if (!ranks_) {
    multiply_float(team, head, x, rows, logits, multiply_scratch_);
    return team.barrier();
  }
  float* parts = ranks_->memory<float>();
  multiply_float(team, head, x, rows, ranks_->logits_of(parts, ranks_->rank(), rows), multiply_scratch_);
  ranks_->barrier();
  if (ranks_->leads()) ranks_->join_logits(team, parts, rows, logits);
  team.barrier();
}

void Decoder::logits(const bf16* hidden, const int32_t* rows, int64_t count, float* logits) {
  const int64_t at_once = ranks_ ? kRowsAtOnce : count;
  pool_.run([&](const Team& team) {
    if (rows != nullptr) {
      gather_rows(team, hidden, rows, count, shape.hidden_size, chosen_);
      team.barrier();
    }
    const bf16* x = rows == nullptr ? hidden : chosen_;
    for (int64_t first = 0; first < count; first += at_once)
      multiply_head(team, x + first * shape.hidden_size, std::min(count - first, at_once),
                    logits + first * vocab_size());
  });
}

void Decoder::most_probable(const bf16* hidden, const int32_t* rows, int64_t count,
                            int32_t* best) {
  const int64_t width = vocab_size();
  pool_.run([&](const Team& team) {
    gather_rows(team, hidden, rows, count, shape.hidden_size, chosen_);
    team.barrier();
    for (int64_t first = 0; first < count; first += kRowsAtOnce) {
      const int64_t some = std::min(count - first, kRowsAtOnce);
      multiply_head(team, chosen_ + first * shape.hidden_size, some, some_logits_);
      argmax_rows(team, some_logits_, some, width, best + first);
      team.barrier();
      if (team.rank() == 0)
        for (int64_t i = 0; i < some; ++i) {
          const float largest = some_logits_[i * width + best[first + i]];
          if (!(largest > -INFINITY)) best[first + i] = -1;
        }
      team.barrier();  // the next product overwrites the logits
    }
  });
}

}  // namespace trioserve::TRIOSERVE_ISA
