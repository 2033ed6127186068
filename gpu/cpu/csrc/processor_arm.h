// processor.h for ARM.
#pragma once

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

// A moment's rest in a loop that waits for another thread. Most processors do nothing at a yield; this
// instruction empties the pipeline, which takes about as long as x86's pause.
inline void pause() { asm volatile("isb"); }

// Ask for a line of memory, into all caches or from the second one on. gcc drops the calls of a function that
// does nothing else, unless it has inlined them before it looks for such functions.
[[gnu::always_inline]] inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
[[gnu::always_inline]] inline void prefetch_to_second(const void* at) { __builtin_prefetch(at, 0, 2); }

// Asks for a line that will be written.
inline void prefetch_to_write(const void* at) { asm volatile("prfm pstl1keep, [%0]" ::"r"(at)); }

}  // namespace trioserve::TRIOSERVE_ISA
