// warps.cpp - where the lanes of a warp meet, and the operations that exchange values among them.
#include "machine.h"

namespace emu {

const char* name(WarpOp op) {
  switch (op) {
    case WarpOp::shuffle: return "shuffle";
    case WarpOp::vote: return "vote";
    case WarpOp::gather: return "reduction or match";
    case WarpOp::sync: return "__syncwarp";
    case WarpOp::load_matrices: return "ldmatrix";
    case WarpOp::multiply_bf16: return "mma<bf16>";
    case WarpOp::multiply_fp16: return "mma<fp16>";
  }
  return "?";
}

void meet(WarpOp op, unsigned mask, void* operands) { here->meet(op, mask, operands); }

void Multiprocessor::meet(WarpOp op, unsigned mask, void* operands) {
  Fiber& fiber = self();
  Warp& warp = warps_[fiber.thread.warp];
  const unsigned lane = static_cast<unsigned>(fiber.thread.lane);
  if (!(mask >> lane & 1)) fail("%s with mask %08x, which lacks lane %u", name(op), mask, lane);

  int index = 0;
  while (index < warp.num_meetings && warp.meetings[index].mask != mask) {
    const Meeting& other = warp.meetings[index];
    if (other.mask & mask)
      fail("%s with mask %08x while lanes of mask %08x are in %s", name(op), mask, other.mask,
           name(other.op));
    index++;
  }
  Meeting& meeting = warp.meetings[index];
  if (index == warp.num_meetings) {
    if (index == Warp::MAX_MEETINGS) fail("more than %d meetings in a warp", Warp::MAX_MEETINGS);
    warp.num_meetings++;
    meeting.mask = mask;
    meeting.arrived = 0;
    meeting.op = op;
  }
  if (meeting.op != op)
    fail("divergent warp: some lanes are in %s, some in %s", name(meeting.op), name(op));

  meeting.operands[lane] = operands;
  meeting.arrived |= 1u << lane;
  // Of these operations only __syncwarp orders memory (CUDA C++ Programming Guide, "Warp Shuffle
  // Functions": they imply no memory barrier).
  void* tag = shared.tag(NUM_BARRIERS + fiber.thread.warp);
  if (op == WarpOp::sync) release(tag);
  fiber.state = State::in_warp_operation;
  if (meeting.arrived == mask) {
    perform(meeting);
    meeting = warp.meetings[--warp.num_meetings];
    wake(fiber.thread.warp, mask);
  }
  switch_to_scheduler();
  if (op == WarpOp::sync) acquire(tag);
}

namespace {

template <class Operands>
Operands& operands(const Meeting& meeting, int lane) {
  return *static_cast<Operands*>(meeting.operands[lane]);
}

void shuffle(const Meeting& meeting) {
  for (int lane = 0; lane < WARP_SIZE; lane++) {
    if (!(meeting.mask >> lane & 1)) continue;
    Shuffle& mine = operands<Shuffle>(meeting, lane);
    const int source = mine.source & (WARP_SIZE - 1);
    if (!(meeting.mask >> source & 1))
      fail("shuffle: lane %d reads lane %d, which mask %08x lacks", lane, source, meeting.mask);
    mine.out = operands<Shuffle>(meeting, source).in;
  }
}

void vote(const Meeting& meeting) {
  unsigned ballot = 0;
  for (int lane = 0; lane < WARP_SIZE; lane++)
    if (meeting.mask >> lane & 1 && operands<Vote>(meeting, lane).predicate) ballot |= 1u << lane;
  for (int lane = 0; lane < WARP_SIZE; lane++)
    if (meeting.mask >> lane & 1) operands<Vote>(meeting, lane).out = ballot;
}

void gather(const Meeting& meeting) {
  for (int from = 0; from < WARP_SIZE; from++) {
    if (!(meeting.mask >> from & 1)) continue;
    const uint64_t value = operands<Gather>(meeting, from).in;
    for (int to = 0; to < WARP_SIZE; to++)
      if (meeting.mask >> to & 1) operands<Gather>(meeting, to).values[from] = value;
  }
}

}  // namespace

void perform(Meeting& meeting) {
  switch (meeting.op) {
    case WarpOp::shuffle: return shuffle(meeting);
    case WarpOp::vote: return vote(meeting);
    case WarpOp::gather: return gather(meeting);
    case WarpOp::sync: return;
    case WarpOp::load_matrices: return load_matrices(meeting);
    case WarpOp::multiply_bf16: return multiply(meeting, false);
    case WarpOp::multiply_fp16: return multiply(meeting, true);
  }
}

}  // namespace emu
