// processor.h for x86.
#pragma once

#include <immintrin.h>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

// A moment's rest in a loop that waits for another thread.
inline void pause() { _mm_pause(); }

// Ask for a line of memory, into all caches or from the second one on. gcc drops the calls of a function that
// does nothing else, unless it has inlined them before it looks for such functions.
[[gnu::always_inline]] inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
[[gnu::always_inline]] inline void prefetch_to_second(const void* at) { __builtin_prefetch(at, 0, 2); }

// Asks for a line that will be written. gcc has no other way without an option.
inline void prefetch_to_write(const void* at) {
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(at)));
}

// How a thread computes with numbers below the normal ones: as what they are, unless it takes them for 0.
inline unsigned float_control() { return _mm_getcsr(); }
inline void set_float_control(unsigned control) { _mm_setcsr(control); }
inline unsigned without_small_numbers(unsigned control) { return control | 0x8040; }

}  // namespace trioserve::TRIOSERVE_ISA
