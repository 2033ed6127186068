// barriers.cpp - the barriers of a block, and fences.
#include <cstring>

#include "machine.h"

namespace emu {

int barrier(int id, int num_threads, bool predicate, int line) {
  return here->barrier(id, num_threads, predicate, line);
}

int Multiprocessor::barrier(int id, int num_threads, bool predicate, int line) {
  if (id < 0 || id >= NUM_BARRIERS) fail("there is no barrier %d", id);
  Fiber& fiber = self();
  const int warp = fiber.thread.warp;
  Barrier& barrier = barriers_[id];
  if (!barrier.num_arrived)
    barrier.num_expected = num_threads;
  else if (barrier.num_expected != num_threads)
    fail("barrier %d: thread counts differ (%d and %d)", id, barrier.num_expected, num_threads);
  if (!barrier.waiting[warp])
    barrier.line[warp] = line;
  else if (barrier.line[warp] != line)
    fail("divergent barrier: lanes of one warp wait at line %d and at line %d", barrier.line[warp],
         line);

  release(shared.tag(id));
  fiber.state = State::at_barrier;
  barrier.waiting[warp] |= 1u << fiber.thread.lane;
  barrier.count += predicate;
  barrier.num_arrived++;
  if (barrier.num_arrived == (num_threads ? num_threads : num_live_)) release_barrier(barrier);
  switch_to_scheduler();
  acquire(shared.tag(id));
  return fiber.barrier_count;
}

void Multiprocessor::release_barrier(Barrier& barrier) {
  for (int warp = 0; warp < num_warps_; warp++) {
    for (unsigned left = barrier.waiting[warp]; left; left &= left - 1)
      fibers_[warp * WARP_SIZE + __builtin_ctz(left)]->barrier_count = barrier.count;
    wake(warp, barrier.waiting[warp]);
  }
  std::memset(&barrier, 0, sizeof barrier);
}

void fence() {
  // Any two fences are ordered here. On a GPU an atomic operation must carry the order from one to
  // the other, so a missing atomic stays unseen; a missing fence does not.
  release(here->launch);
  acquire(here->launch);
}

}  // namespace emu
