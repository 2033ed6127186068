// scheduler.cpp - fibers: their stacks, the switch between them, and their order.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"

#if !defined(__x86_64__)
#error "the emulation switches stacks in x86-64 instructions"
#endif

// Saves the registers that a function must keep, stores the stack pointer at *save and goes on with
// the stack `load`, which another call saved (System V ABI, section 3.2.1).
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
  .text
  .globl emu_switch_stack
  .hidden emu_switch_stack
  .type emu_switch_stack, @function
emu_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size emu_switch_stack, . - emu_switch_stack
)");

namespace emu {

__thread Thread* current;
__thread Multiprocessor* here;

void* map_pages(size_t num_bytes) {
  void* pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    std::perror("the emulation of CUDA kernels: mmap");
    std::abort();
  }
  return pages;
}

void protect_page(void* page) {
  if (mprotect(page, PAGE_BYTES, PROT_NONE)) {
    std::perror("the emulation of CUDA kernels: mprotect");
    std::abort();
  }
}

namespace {

char* map_stack() {
  char* stack = static_cast<char*>(map_pages(STACK_BYTES));
  protect_page(stack);  // an overflow runs into it
  return stack;
}

// The first function on every fiber's stack.
void run_thread() {
  here->begin_thread();
  here->launch->kernel(here->launch->parameters);
  here->exit_thread();
}

int lowest(unsigned bits) { return __builtin_ctz(bits); }
int highest(unsigned bits) { return 31 - __builtin_clz(bits); }

// One of the set bits; those after a gap come a little more often.
int any(unsigned bits, Random& random) {
  const int turn = random.below(32);
  return (lowest(bits >> turn | bits << (-turn & 31)) + turn) & 31;
}

}  // namespace

Multiprocessor::~Multiprocessor() {
  for (auto& fiber : fibers_)
    if (fiber->stack) munmap(fiber->stack, STACK_BYTES);
}

void Multiprocessor::run_block(Launch& of, uint64_t block) {
  launch = &of;
  here = this;
  begin_block(block);
  while (ready_warps_ && !failed_) resume(choose());
  if (!failed_ && num_live_) {
    failed_ = true;
    launch->report(describe_deadlock());
  }
  end_block();
}

void Multiprocessor::begin_block(uint64_t block) {
  const uint3 grid = launch->grid, size = launch->block;
  random = Random((launch->seed + 1) * 0xD1B54A32D192ED03ull ^ (block + 1));
  // Two kinds of unfairness show different defects: threads of all warps at random, and one warp
  // that runs as far ahead as it can.
  stay_with_warp_ = random.coin();
  favorite_ = 0;
  failed_ = false;
  num_live_ = num_threads_ = static_cast<int>(size.x * size.y * size.z);
  num_warps_ = (num_threads_ + WARP_SIZE - 1) / WARP_SIZE;
  ready_warps_ = 0;
  bank_conflicts = 0;
  std::memset(barriers_, 0, sizeof barriers_);
  for (Warp& warp : warps_) warp.num_meetings = 0;
  scheduler_stack_ = {};
  name_current_fiber(scheduler_stack_);
  shared.begin_block(launch->shared_bytes);
  const uint3 index = {static_cast<unsigned>(block % grid.x),
                       static_cast<unsigned>(block / grid.x % grid.y),
                       static_cast<unsigned>(block / grid.x / grid.y)};
  for (int i = 0; i < num_threads_; i++) make_fiber(i, index);
}

void Multiprocessor::make_fiber(int index, uint3 block_index) {
  if (index == static_cast<int>(fibers_.size())) fibers_.push_back(std::make_unique<Fiber>());
  Fiber& fiber = *fibers_[index];
  if (!fiber.stack) fiber.stack = map_stack();
  const unsigned i = static_cast<unsigned>(index);
  const uint3 size = launch->block;
  fiber.thread = {{i % size.x, i / size.x % size.y, i / size.x / size.y},
                  block_index,
                  size,
                  launch->grid,
                  index % WARP_SIZE,
                  index / WARP_SIZE};
  fiber.copies.head = fiber.copies.tail = 0;
  fiber.copies.group = 0;
  fiber.sanitized.bottom = fiber.stack;
  fiber.sanitized.size = STACK_BYTES;
  create_fiber(fiber.sanitized);

  // As emu_switch_stack leaves it: six registers under a return address. The ABI wants the stack
  // pointer to be 8 past a multiple of 16 when a function starts, and a caller of null ends traces.
  void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(run_thread);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
  wake(fiber.thread.warp, 1u << fiber.thread.lane);
}

void Multiprocessor::end_block() {
  if (const char* wrong = shared.end_block(); wrong && !failed_) {
    failed_ = true;
    launch->report(wrong);
  }
  launch->bank_conflicts += bank_conflicts;
  for (int i = 0; i < num_threads_; i++) {
    Fiber& fiber = *fibers_[i];
    destroy_fiber(fiber.sanitized);
    if (fiber.state != State::exited) allow(fiber.stack + PAGE_BYTES, STACK_BYTES - PAGE_BYTES);
    // ThreadSanitizer would see the next block's threads reuse this one's stacks without an order.
    if (THREAD_SANITIZER) {
      munmap(fiber.stack, STACK_BYTES);
      fiber.stack = nullptr;
    }
  }
  if (failed_) launch->failed = true;
}

int Multiprocessor::choose() {
  int warp = 0, lane = 0;
  switch (launch->order) {
    case Order::forward:
      warp = lowest(ready_warps_);
      lane = lowest(ready_[warp]);
      break;
    case Order::reverse:
      warp = highest(ready_warps_);
      lane = highest(ready_[warp]);
      break;
    case Order::random:
      if (!stay_with_warp_ || !ready_[favorite_]) favorite_ = any(ready_warps_, random);
      warp = favorite_;
      lane = any(ready_[warp], random);
      break;
  }
  return warp * WARP_SIZE + lane;
}

void Multiprocessor::wake(int warp, unsigned lanes) {
  for (unsigned left = lanes; left; left &= left - 1)
    fibers_[warp * WARP_SIZE + lowest(left)]->state = State::ready;
  ready_[warp] |= lanes;
  if (lanes) ready_warps_ |= 1u << warp;
}

void Multiprocessor::resume(int index) {
  Fiber& fiber = *fibers_[index];
  const int warp = fiber.thread.warp;
  ready_[warp] &= ~(1u << fiber.thread.lane);
  if (!ready_[warp]) ready_warps_ &= ~(1u << warp);
  self_ = index;
  current = &fiber.thread;
  leave_stack(scheduler_stack_, fiber.sanitized, false);
  emu_switch_stack(&scheduler_pointer_, fiber.stack_pointer);
  enter_stack(scheduler_stack_, nullptr);
}

void Multiprocessor::switch_to_scheduler() {
  Fiber& fiber = self();
  leave_stack(fiber.sanitized, scheduler_stack_, fiber.state == State::exited);
  emu_switch_stack(&fiber.stack_pointer, scheduler_pointer_);
  enter_stack(fiber.sanitized, nullptr);
}

void Multiprocessor::interleave() {
  if (launch->order != Order::random || random.coin()) return;
  const Thread& thread = self().thread;
  wake(thread.warp, 1u << thread.lane);
  switch_to_scheduler();
}

void Multiprocessor::begin_thread() { enter_stack(self().sanitized, &scheduler_stack_); }

void Multiprocessor::exit_thread() {
  Fiber& fiber = self();
  if (fiber.copies.head != fiber.copies.tail) fail("the thread exits with copies in flight");
  release(launch);  // all that it wrote is there when the launch has ended
  fiber.state = State::exited;
  num_live_--;
  // Since sm_70 a barrier waits for the threads that have not exited.
  for (Barrier& barrier : barriers_)
    if (barrier.num_arrived && !barrier.num_expected && barrier.num_arrived == num_live_)
      release_barrier(barrier);
  switch_to_scheduler();
  std::abort();
}

void Multiprocessor::abandon_block(const char* message) {
  const uint3 block = current->block_index, thread = current->thread_index;
  char where[128];
  std::snprintf(where, sizeof where, "block (%u, %u, %u) thread (%u, %u, %u): ", block.x, block.y,
                block.z, thread.x, thread.y, thread.z);
  launch->report(std::string(where) + message);
  failed_ = true;
  for (;;) switch_to_scheduler();  // it never comes back
}

std::string Multiprocessor::describe_deadlock() const {
  int num_waiting[4] = {};
  for (int i = 0; i < num_threads_; i++) num_waiting[static_cast<int>(fibers_[i]->state)]++;
  const uint3 block = fibers_[0]->thread.block_index;
  char text[256];
  std::snprintf(text, sizeof text,
                "block (%u, %u, %u): deadlock, of %d threads %d wait at a barrier, %d in a warp "
                "operation, and %d have exited",
                block.x, block.y, block.z, num_threads_,
                num_waiting[static_cast<int>(State::at_barrier)],
                num_waiting[static_cast<int>(State::in_warp_operation)],
                num_waiting[static_cast<int>(State::exited)]);
  std::string message = text;
  for (int id = 0; id < NUM_BARRIERS; id++)
    for (int warp = 0; warp < num_warps_; warp++)
      if (barriers_[id].waiting[warp]) {
        std::snprintf(text, sizeof text,
                      "; warp %d waits at the barrier of line %d with lanes %08x", warp,
                      barriers_[id].line[warp], barriers_[id].waiting[warp]);
        message += text;
        id = NUM_BARRIERS;  // one of them is enough of a lead
        break;
      }
  for (int warp = 0; warp < num_warps_; warp++)
    if (warps_[warp].num_meetings) {
      const Meeting& meeting = warps_[warp].meetings[0];
      std::snprintf(text, sizeof text, "; warp %d: %s by lanes %08x, of which %08x have come", warp,
                    name(meeting.op), meeting.mask, meeting.arrived);
      return message + text;
    }
  return message;
}

void interleave() { here->interleave(); }

void fail(const char* format, ...) {
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  here->abandon_block(message);
}

}  // namespace emu
