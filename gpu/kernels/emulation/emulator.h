// emulator.h - what a kernel that was compiled with g++ asks of the emulator.
//
// cuda.h and the emulation bodies of hardware.cuh call these; the bodies are in the .cpp files
// beside this one. They are compiled without sanitizers and linked to every kernel, so everything
// that touches the kernel's own memory stays in code that the kernel's compilation sees.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "vector_types.h"

namespace emu {

// ---- threads ------------------------------------------------------------------------------------

// What a CUDA thread knows of itself.
struct Thread {
  uint3 thread_index, block_index, block_size, grid_size;
  int lane, warp;
};

// The CUDA thread that this thread of the operating system runs now.
extern __thread Thread* current;

// Before an atomic operation: perhaps other threads run first. Without it a thread would never be
// interrupted between a load and the atomic operation that depends on it.
void interleave();

// The kernel broke a rule: the launch ends with this message.
[[noreturn]] [[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

// ---- barriers -----------------------------------------------------------------------------------

// bar.sync: waits for `num_threads` threads at this barrier, 0 for all that have not exited, and
// returns for how many of them `predicate` held. The lanes of a warp must come from one `line`.
int barrier(int id, int num_threads, bool predicate, int line);

// __threadfence. Matters to ThreadSanitizer only, which knows no fences of other kinds.
void fence();

// ---- warp operations ----------------------------------------------------------------------------

// Each takes a pointer to one of the structs below, for this lane.
enum class WarpOp { shuffle, vote, gather, sync, load_matrices, multiply_bf16, multiply_fp16 };

struct Shuffle {  // out = the `in` of lane `source`
  uint64_t in, out;
  int source;
};
struct Vote {  // out = the lanes where the predicate holds
  bool predicate;
  unsigned out;
};
struct Gather {  // values = the `in` of every lane of the mask
  uint64_t in;
  uint64_t values[32];
};
struct LoadMatrices {  // ldmatrix .x4
  uint4 row;           // the 16 bytes that this lane's address points at
  const void* address;
  bool transposed;
  unsigned out[4];
};
struct Multiply {  // mma.m16n8k16: c += a b
  unsigned a[4], b[2];
  float c[4];
};

// Waits until every lane of `mask` has come with the same operation, and performs it.
void meet(WarpOp op, unsigned mask, void* operands);

// ---- rough arithmetic ---------------------------------------------------------------------------
// A GPU's approximate operations and its tensor cores round otherwise than IEEE 754 does. A launch
// with rough arithmetic shows the worst that a kernel has to expect of them; in any other launch the
// functions below return their first argument.

// An operand of an operation with .ftz: 0 in place of a subnormal number.
float flushed(float x);
// The result of an approximate operation on x, up to 2 units in the last place away, and flushed.
// How far depends on x alone, so the same operation gives the same result.
float approximated(float exact, float x);
// The same for a logarithm; its error next to 1 is absolute: up to 2^-22.
float approximated_log(float exact, float x);

// ---- memory -------------------------------------------------------------------------------------

// The static shared array of declaration `site`: one for a block, at first full of 0xFF, which is
// NaN in every floating-point type.
void* shared_array(int site, size_t num_bytes);
void* dynamic_shared();

// An asynchronous copy of 16 bytes. Null as `from` stands for zeros.
struct Copy {
  void* to;
  const void* from;
  int group;
};

// Whether the copy lands at once, or is kept until the thread waits for it: a coin decides.
bool copy_lands_now(void* to, const void* from);
// Closes the group of the copies so far.
void close_copy_group();
// The next copy that a wait for all but the `num_kept` newest groups finishes; false if no other.
bool next_finished_copy(int num_kept, Copy* copy);

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a lane passes at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emu
