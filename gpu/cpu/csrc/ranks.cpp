#include "ranks.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "processor.h"
#include "vector.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// How long a thread looks again before it sleeps: the ranks come to a barrier some microseconds apart.
// Between its looks it lets others run, which may be those that it waits for.
constexpr int kYields = 50;

// What one thread takes at a time of rows that are cut.
constexpr int64_t kPiece = 256;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t region_bytes(const RanksShape& shape, const RanksLimits& limits) {
  const int64_t widest = std::max(limits.hidden_size, limits.low_rank_width);
  const int64_t sums = shape.slices * limits.max_tokens * widest;
  const int64_t logits = shape.size * limits.logits_rows * limits.vocab_part;
  return aligned(std::max(sums, logits) * static_cast<int64_t>(sizeof(float)));
}

Floats sum_at(const float* parts, int64_t slices, int64_t distance, Lanes lanes) {
  const auto pair = [&](int64_t slice) {
    const Floats first = load(parts + slice * distance, lanes);
    return slice + 1 < slices ? first + load(parts + (slice + 1) * distance, lanes) : first;
  };
  Floats sum = pair(0);
  for (int64_t slice = 2; slice < slices; slice += 2) sum = sum + pair(slice);
  return sum;
}

template <typename T>
void add_up_slices(const Team& team, const float* parts, int64_t slices, int64_t rows, int64_t width,
                   const float* bias, T* y) {
  const int64_t pieces = (width + kPiece - 1) / kPiece, distance = rows * width;
  const Share share = team.share(rows * pieces);
  for (int64_t item = share.first; item < share.last; ++item) {
    const int64_t row = item / pieces, begin = item % pieces * kPiece;
    for (int64_t i = begin; i < std::min(begin + kPiece, width); i += kLanes) {
      const Lanes lanes = first_lanes(width - i);
      Floats sum = sum_at(parts + row * width + i, slices, distance, lanes);
      if (bias != nullptr) sum = sum + load(bias + i, lanes);
      store(y + row * width + i, sum, lanes);
    }
  }
}

}  // namespace

int64_t ranks_bytes(const RanksShape& shape, const RanksLimits& limits) {
  return aligned(sizeof(Ranks::Head)) + 2 * region_bytes(shape, limits);
}

Ranks::Ranks(const RanksShape& shape, const RanksLimits& limits, int threads)
    : shape_(shape),
      vocab_part_(limits.vocab_part),
      region_bytes_(region_bytes(shape, limits)),
      threads_(static_cast<uint32_t>(shape.size * threads)),
      head_(static_cast<Head*>(shape.memory)),
      regions_(static_cast<uint8_t*>(shape.memory) + aligned(sizeof(Head))) {}

Share Ranks::vocabulary(int64_t rank) const {
  const int64_t first = std::min(rank * vocab_part_, shape_.vocab_size);
  return {first, std::min(first + vocab_part_, shape_.vocab_size)};
}

Share Ranks::experts(int64_t slice, int64_t count) const {
  const auto first = [&](int64_t i) { return (i * count + slices() - 1) / slices(); };
  return {first(slice), first(slice + 1)};
}

void Ranks::join_logits(const Team& team, float* parts, int64_t rows, float* logits) const {
  const Share share = team.share(rows * shape_.size);
  for (int64_t item = share.first; item < share.last; ++item) {
    const int64_t rank = item / rows, row = item % rows;
    const Share own = vocabulary(rank);
    const int64_t width = own.last - own.first;
    std::copy_n(logits_of(parts, rank, rows) + row * width, width, logits + row * vocab_size() + own.first);
  }
}

void Ranks::barrier() const {
  const uint32_t round = head_->round.load(std::memory_order_relaxed);
  if (head_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    head_->arrived.store(0, std::memory_order_relaxed);
    head_->round.store(round + 1);
    if (head_->sleepers.load() > 0)
      syscall(SYS_futex, &head_->round, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
    return;
  }
  const auto waits = [&] { return head_->round.load(std::memory_order_acquire) == round; };
  for (int looks = 0; looks < kSpins && waits(); ++looks) pause();
  for (int looks = 0; looks < kYields && waits(); ++looks) sched_yield();
  if (!waits()) return;
  // The last to arrive sees this one, or this one sees the next round.
  head_->sleepers.fetch_add(1);
  while (head_->round.load() == round)
    syscall(SYS_futex, &head_->round, FUTEX_WAIT, round, nullptr, nullptr, 0);
  head_->sleepers.fetch_sub(1);
}

void add_slices(const Team& team, const float* parts, int64_t slices, int64_t rows, int64_t width,
                const float* bias, bf16* y) {
  add_up_slices(team, parts, slices, rows, width, bias, y);
}

void add_slices(const Team& team, const float* parts, int64_t slices, int64_t rows, int64_t width,
                float* y) {
  add_up_slices(team, parts, slices, rows, width, nullptr, y);
}

}  // namespace trioserve::TRIOSERVE_ISA
