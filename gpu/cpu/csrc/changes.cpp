#include "changes.h"

#include <algorithm>
#include <limits>

#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void penalize(const Change& change, int64_t size, float* x, int32_t* counts) {
  const int32_t *begin = change.tokens, *end = begin + change.num_tokens;
  const auto known = [size](int32_t token) { return token >= 0 && token < size; };
  if (change.repetition_penalty != 1) {
    for (const int32_t* token = begin; token < end; ++token) {
      if (!known(*token) || counts[*token]++) continue;
      const double old = x[*token];
      x[*token] = static_cast<float>(old > 0 ? old / change.repetition_penalty
                                             : old * change.repetition_penalty);
    }
    for (const int32_t* token = begin; token < end; ++token)
      if (known(*token)) counts[*token] = 0;
  }
  if (change.frequency_penalty == 0 && change.presence_penalty == 0) return;
  begin += change.prompt_length;
  for (const int32_t* token = begin; token < end; ++token)
    if (known(*token)) ++counts[*token];
  for (const int32_t* token = begin; token < end; ++token) {
    if (!known(*token) || !counts[*token]) continue;
    const double amount = -(change.frequency_penalty * counts[*token] + change.presence_penalty);
    x[*token] = static_cast<float>(x[*token] + amount);
    counts[*token] = 0;
  }
}

void apply(const Change& change, int64_t size, float* x, int32_t* counts) {
  for (int64_t i = 0; i < change.num_biased; ++i)
    if (change.biased[i] < size)
      x[change.biased[i]] = static_cast<float>(x[change.biased[i]] + change.biases[i]);
  penalize(change, size, x, counts);
  for (int64_t i = 0; i < change.num_masked; ++i)
    if (change.masked[i] < size) x[change.masked[i]] = -kInfinity;
}

// Whether any of the first `size` bits is 0.
bool masks_any(const uint32_t* words, int64_t size) {
  for (int64_t i = 0; i < size / 32; ++i)
    if (~words[i]) return true;
  return size % 32 && ~words[size / 32] << (32 - size % 32);
}

void mask(const uint32_t* words, int64_t size, float* x) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes banned = lanes_of(~(words[i / 32] >> (i % 32)));
    store(x + i, broadcast(-kInfinity), both(banned, first_lanes(size - i)));
  }
}

}  // namespace

const float* change_row(const float* logits, int64_t vocab_size, RowChanges changes,
                        float* changed, int32_t* counts) {
  auto [change, bias, words] = changes;
  if (words != nullptr && !masks_any(words, vocab_size)) words = nullptr;
  if (change == nullptr && bias == nullptr && words == nullptr) return logits;
  std::copy_n(logits, vocab_size, changed);
  if (change != nullptr) apply(*change, vocab_size, changed, counts);
  if (bias != nullptr)
    for (int64_t i = 0; i < vocab_size; ++i) changed[i] += bias[i];
  if (words != nullptr) mask(words, vocab_size, changed);
  return changed;
}

}  // namespace trioserve::TRIOSERVE_ISA
