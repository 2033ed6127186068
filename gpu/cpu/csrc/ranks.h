// The ranks that compute a model together: processes of one host, each with a part of every layer.
//
// What they exchange lies in memory that all of them map. All threads of all ranks call barrier()
// together; what was written before it can be read after it. Two regions take turns: a rank may write
// to the next one while others still read.
//
// Products whose inputs are split among the ranks are computed in slices, of which each rank has as
// many, one beside the other. The slices' sums are added up in one order, so the bits of a result depend
// on the number of slices and not on that of ranks.
#pragma once

#include <atomic>
#include <cstdint>

#include "bf16.h"
#include "team.h"

namespace trioserve::TRIOSERVE_ISA {

// Of one rank's decoder. The struct is mirrored in Python.
struct RanksShape {
  int32_t rank, size;
  int32_t slices;     // of all ranks together: a multiple of `size`
  int32_t by_expert;  // whether a slice has whole experts, rather than a part of each
  int64_t vocab_size;  // of the whole model; a rank has as many tokens as shape.vocab_size says, the last fewer
  void* memory;        // of ranks_bytes(), zeros at first, the same on all ranks
};

// What the ranks exchange at once, at most.
struct RanksLimits {
  int64_t hidden_size, max_tokens, vocab_part;
  int64_t low_rank_width;  // of adapters
  int64_t logits_rows;
};

int64_t ranks_bytes(const RanksShape& shape, const RanksLimits& limits);

class Ranks {
 public:
  // `threads` is how many each rank has.
  Ranks(const RanksShape& shape, const RanksLimits& limits, int threads);

  int64_t rank() const { return shape_.rank; }
  bool leads() const { return shape_.rank == 0; }
  bool by_expert() const { return shape_.by_expert != 0; }
  int64_t slices() const { return shape_.slices; }
  int64_t own_slices() const { return shape_.slices / shape_.size; }
  int64_t first_slice() const { return shape_.rank * own_slices(); }
  // Experts of a slice, of `count`, if slices have whole experts.
  Share experts(int64_t slice, int64_t count) const;

  int64_t vocab_size() const { return shape_.vocab_size; }
  // Tokens of the vocabulary that a rank has.
  Share vocabulary(int64_t rank) const;
  Share vocabulary() const { return vocabulary(shape_.rank); }
  // Where a rank's part of `rows` rows of logits is, one row after the other.
  float* logits_of(float* parts, int64_t rank, int64_t rows) const {
    return parts + rank * rows * vocab_part_;
  }
  // Puts the parts of all ranks together: logits [rows, vocab_size()].
  void join_logits(const Team& team, float* parts, int64_t rows, float* logits) const;

  // The region that is written to before the next barrier() and read after it.
  template <typename T>
  T* memory() const {
    return reinterpret_cast<T*>(regions_ + (head_->round.load(std::memory_order_relaxed) & 1) * region_bytes_);
  }

  // Called by all threads of all ranks.
  void barrier() const;

 private:
  struct Head {
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> round;
    alignas(64) std::atomic<uint32_t> sleepers;
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  };
  friend int64_t ranks_bytes(const RanksShape& shape, const RanksLimits& limits);

  const RanksShape shape_;
  const int64_t vocab_part_, region_bytes_;
  const uint32_t threads_;  // of all ranks
  Head* const head_;
  uint8_t* const regions_;
};

// y = the sum of `slices` [rows, width] float32, one after the other, and the bias [width] if there is one,
// rounded once. Slices are added up in pairs, and the pairs one after the other.
void add_slices(const Team& team, const float* parts, int64_t slices, int64_t rows, int64_t width,
                const float* bias, bf16* y);

// The same, not rounded and without a bias.
void add_slices(const Team& team, const float* parts, int64_t slices, int64_t rows, int64_t width,
                float* y);

}  // namespace trioserve::TRIOSERVE_ISA
