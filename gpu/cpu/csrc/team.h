// Threads that compute one step together.
//
// Every function of a step is called by all threads of a team at once, and each does its share.
// Between one function and another that reads what the first wrote stands a barrier; a function that
// needs one inside calls it itself. What a thread computes must not depend on how many there are:
// each number of a result is computed by one thread, in one fixed order.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "processor.h"

namespace trioserve::TRIOSERVE_ISA {

// A share of some work: items first to last - 1.
struct Share {
  int64_t first, last;
};

// How a thread waits for the others: first it looks again at once, then it lets others run in
// between. Two threads that share a core with another process would otherwise wait out its time slice.
// With other numbers the rate hardly changes, and the longest gaps grow.
#ifndef TRIOSERVE_SPINS
#define TRIOSERVE_SPINS 200
#endif
inline constexpr int kSpins = TRIOSERVE_SPINS;

class Barrier {
 public:
  explicit Barrier(int size) : size_(size), missing_(size) {}

  void wait() {
    if (size_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      missing_.store(size_, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins)
        pause();
      else
        sched_yield();
    }
  }

 private:
  const int size_;
  alignas(64) std::atomic<int> missing_;
  alignas(64) std::atomic<uint32_t> round_{0};
};

// A number that threads sleep on until it changes. That of the standard library would leave functions in
// the object that are no instruction set's own: see isa.h.
class Signal {
 public:
  void advance() {
    number_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
  }
  // Returns when the number isn't `seen`.
  void wait(uint32_t seen) const {
    for (int looks = 0; looks < kLooks; ++looks) {
      if (number_.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    while (number_.load(std::memory_order_acquire) == seen)
      syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }

 private:
  static constexpr int kLooks = 16;
  std::atomic<uint32_t> number_{0};
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
};

// One thread's place among those that compute together.
class Team {
 public:
  Team(int rank, int size, Barrier& barrier) : rank_(rank), size_(size), barrier_(barrier) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  void barrier() const { barrier_.wait(); }

  // This thread's share of `total` items, in whole groups of `grain`.
  Share share(int64_t total, int64_t grain = 1) const {
    const int64_t groups = (total + grain - 1) / grain;
    const int64_t first = groups * rank_ / size_ * grain, last = groups * (rank_ + 1) / size_ * grain;
    return {std::min(first, total), std::min(last, total)};
  }

 private:
  const int rank_, size_;
  Barrier& barrier_;
};

// A team's threads, which sleep between steps. The caller of run() is its thread 0. Making one fails
// with std::system_error where there is no room for another thread.
class Pool {
 public:
  explicit Pool(int size) : barrier_(size) {
    for (int rank = 0; rank < size; ++rank) teams_.emplace_back(rank, size, barrier_);
    try {
      for (int rank = 1; rank < size; ++rank) threads_.push_back({std::thread([this, rank] { serve(rank); })});
    } catch (...) {
      end();  // those that there are already: a thread that isn't joined ends the process
      throw;
    }
  }
  ~Pool() { end(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(teams_.size()); }

  // Calls `work` with every thread's Team, and returns when all have done it. Allocates nothing.
  template <typename Work>
  void run(const Work& work) {
    work_ = &work;
    call_ = [](const void* work, const Team& team) { (*static_cast<const Work*>(work))(team); };
    step_.advance();
    work(teams_[0]);
    barrier_.wait();
  }

 private:
  void end() {
    work_ = nullptr;
    step_.advance();
    for (Thread& each : threads_) each.thread.join();
  }

  void serve(int rank) {
    for (uint32_t seen = 0;; ++seen) {
      step_.wait(seen);
      if (work_ == nullptr) return;
      call_(work_, teams_[rank]);
      barrier_.wait();
    }
  }

  struct Thread {
    std::thread thread;
  };

  Barrier barrier_;
  std::vector<Team> teams_;
  const void* work_ = nullptr;
  void (*call_)(const void*, const Team&) = nullptr;
  Signal step_;
  std::vector<Thread> threads_;
};

}  // namespace trioserve::TRIOSERVE_ISA
