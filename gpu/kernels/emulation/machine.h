// machine.h - the state of the emulated machine, shared by the .cpp files and hidden from kernels.
//
// A launch hands its blocks to multiprocessors, each on a thread of the operating system.
// A multiprocessor runs one block at a time, with a fiber for each CUDA thread: a stack of its own
// and a saved stack pointer. A fiber runs until it waits at a barrier or in a warp operation; then
// the scheduler takes another one that is ready.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator.h"
#include "sanitizers.h"

namespace emu {

// What an H100 or H200 gives to a block at most; and static arrays alone, on every GPU.
constexpr size_t MAX_SHARED_BYTES = 227 << 10, MAX_STATIC_SHARED_BYTES = 48 << 10;
constexpr int MAX_THREADS = 1024, WARP_SIZE = 32, MAX_WARPS = MAX_THREADS / WARP_SIZE;
constexpr int NUM_BARRIERS = 16;

// Pages that no kernel touches cost nothing, so a stack has room for large arrays of registers,
// which the address sanitizer blows up further.
constexpr size_t STACK_BYTES = 512 << 10, PAGE_BYTES = 4096;

enum class Order : int { forward, reverse, random };

// Xorshift (Marsaglia 2003): order and landing of copies need no better.
class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed * 0x9E3779B97F4A7C15ull | 1) {
    for (int i = 0; i < 4; i++) next();
  }
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 8;
  }
  int below(int bound) { return static_cast<int>(next() % static_cast<uint64_t>(bound)); }
  bool coin() { return next() & 1; }

 private:
  uint64_t state_;
};

// The asynchronous copies of one thread that have not landed, oldest first.
struct CopyQueue {
  static constexpr unsigned CAPACITY = 512;
  unsigned head, tail;
  int group;
  Copy copies[CAPACITY];
};

enum class State { ready, at_barrier, in_warp_operation, exited };

struct Fiber {
  Thread thread;
  State state;
  void* stack_pointer;
  char* stack;
  SanitizedStack sanitized;
  int barrier_count;  // what the barrier it waited at returns
  CopyQueue copies;
};

struct Barrier {
  int num_arrived, num_expected, count;
  unsigned waiting[MAX_WARPS];  // lanes
  int line[MAX_WARPS];
};

// Lanes that wait for the others of `mask`.
struct Meeting {
  unsigned mask, arrived;
  WarpOp op;
  void* operands[WARP_SIZE];
};

struct Warp {
  static constexpr int MAX_MEETINGS = 4;
  Meeting meetings[MAX_MEETINGS];  // of disjoint lanes
  int num_meetings;
};

struct Launch {
  void (*kernel)(const void*);
  const void* parameters;
  uint3 grid, block;
  size_t shared_bytes;
  Order order;
  uint64_t seed;
  bool rough;  // arithmetic: see emulator.h
  std::atomic<uint64_t> bank_conflicts{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string error;  // the first

  void report(const std::string& message);
};

// The shared memory of one block, full of 0xFF at its start. Behind each array is a gap that must
// still be full of it at the end, and behind the dynamic part an inaccessible page.
class SharedMemory {
 public:
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void begin_block(size_t dynamic_bytes);
  // What was wrong in this block's use of shared memory, or null.
  const char* end_block();
  void* array(int site, size_t num_bytes);
  void* dynamic() const { return dynamic_; }
  // An address that stands for barrier or warp `index` of this block, for ThreadSanitizer.
  void* tag(int index) const { return memory_ + index; }

 private:
  struct Array {
    int site;
    size_t num_bytes;
    char* address;
  };
  static constexpr int MAX_ARRAYS = 64;
  Array arrays_[MAX_ARRAYS];
  int num_arrays_ = 0;
  size_t static_bytes_ = 0;
  char* memory_ = nullptr;
  char* next_ = nullptr;
  char* dynamic_ = nullptr;
  size_t dynamic_bytes_ = 0;
  std::vector<char*> retired_;  // of earlier blocks, kept until the launch ends

  void map();
  bool written(const char* begin, const char* end) const;
};

class Multiprocessor {
 public:
  Multiprocessor() = default;
  ~Multiprocessor();
  Multiprocessor(const Multiprocessor&) = delete;
  Multiprocessor& operator=(const Multiprocessor&) = delete;

  void run_block(Launch& launch, uint64_t block);

  // For what runs on a fiber:
  Fiber& self() { return *fibers_[self_]; }
  void begin_thread();
  [[noreturn]] void exit_thread();
  [[noreturn]] void abandon_block(const char* message);
  void interleave();
  int barrier(int id, int num_threads, bool predicate, int line);
  void meet(WarpOp op, unsigned mask, void* operands);

  Launch* launch = nullptr;
  Random random;
  SharedMemory shared;
  uint64_t bank_conflicts = 0;

 private:
  std::vector<std::unique_ptr<Fiber>> fibers_;
  int num_threads_ = 0, num_warps_ = 0, num_live_ = 0, self_ = 0;
  bool failed_ = false;
  void* scheduler_pointer_ = nullptr;
  SanitizedStack scheduler_stack_;
  // Lanes that can run, of each warp, and the warps that have some.
  unsigned ready_[MAX_WARPS] = {}, ready_warps_ = 0;
  bool stay_with_warp_ = false;
  int favorite_ = 0;
  Barrier barriers_[NUM_BARRIERS];
  Warp warps_[MAX_WARPS];

  void begin_block(uint64_t block);
  void end_block();
  void make_fiber(int index, uint3 block_index);
  int choose();
  void resume(int index);
  void switch_to_scheduler();
  void wake(int warp, unsigned lanes);
  void release_barrier(Barrier& barrier);
  std::string describe_deadlock() const;
};

// The multiprocessor of this thread of the operating system.
extern __thread Multiprocessor* here;

const char* name(WarpOp op);
// Performs a warp operation once all its lanes have come.
void perform(Meeting& meeting);
void load_matrices(Meeting& meeting);
void multiply(Meeting& meeting, bool half);

void* map_pages(size_t num_bytes);
void protect_page(void* page);

}  // namespace emu
