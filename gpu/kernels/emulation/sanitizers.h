// sanitizers.h - tells AddressSanitizer and ThreadSanitizer about fibers and shared memory.
//
// Both follow the stack of each thread of the operating system. A switch of stacks behind their
// back looks like a wild jump to the first; to the second all fibers look like one thread.
// The emulator is compiled without instrumentation, once for each mode: EMU_ADDRESS or EMU_THREAD
// says which run-time library will be there. Without one, every function here is empty.
#pragma once
#include <cstddef>

#ifdef EMU_ADDRESS
extern "C" {
void __sanitizer_start_switch_fiber(void** save, const void* stack, size_t size);
void __sanitizer_finish_switch_fiber(void* saved, const void** old_stack, size_t* old_size);
void __asan_poison_memory_region(const volatile void* address, size_t size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif
#ifdef EMU_THREAD
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace emu {

#ifdef EMU_ADDRESS
constexpr bool ADDRESS_SANITIZER = true;
#else
constexpr bool ADDRESS_SANITIZER = false;
#endif
#ifdef EMU_THREAD
constexpr bool THREAD_SANITIZER = true;
#else
constexpr bool THREAD_SANITIZER = false;
#endif

// A stack as the sanitizers know it. The scheduler has one, and each fiber.
struct SanitizedStack {
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's own, kept while another stack runs
  void* fiber = nullptr;       // ThreadSanitizer's name for it
};

// Before the switch from one stack to the other; `ends` if the first will never run again.
inline void leave_stack([[maybe_unused]] SanitizedStack& from,
                        [[maybe_unused]] const SanitizedStack& to, [[maybe_unused]] bool ends) {
#ifdef EMU_ADDRESS
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.bottom, to.size);
#endif
#ifdef EMU_THREAD
  constexpr unsigned NO_ORDER = 1;  // a switch is no synchronization: only barriers are
  __tsan_switch_to_fiber(to.fiber, NO_ORDER);
#endif
}

// After the switch, on the new stack. `from` learns where the old one is, if that is not known.
inline void enter_stack([[maybe_unused]] SanitizedStack& now,
                        [[maybe_unused]] SanitizedStack* from) {
#ifdef EMU_ADDRESS
  __sanitizer_finish_switch_fiber(now.fake_stack, from ? &from->bottom : nullptr,
                                  from ? &from->size : nullptr);
#endif
}

inline void name_current_fiber([[maybe_unused]] SanitizedStack& stack) {
#ifdef EMU_THREAD
  stack.fiber = __tsan_get_current_fiber();
#endif
}
inline void create_fiber([[maybe_unused]] SanitizedStack& stack) {
  stack.fake_stack = nullptr;
#ifdef EMU_THREAD
  stack.fiber = __tsan_create_fiber(0);
#endif
}
inline void destroy_fiber([[maybe_unused]] SanitizedStack& stack) {
#ifdef EMU_THREAD
  __tsan_destroy_fiber(stack.fiber);
#endif
}

// What happened before a release of an address happens before what follows an acquire of it.
inline void release([[maybe_unused]] void* address) {
#ifdef EMU_THREAD
  __tsan_release(address);
#endif
}
inline void acquire([[maybe_unused]] void* address) {
#ifdef EMU_THREAD
  __tsan_acquire(address);
#endif
}

inline void forbid([[maybe_unused]] const void* address, [[maybe_unused]] size_t size) {
#ifdef EMU_ADDRESS
  __asan_poison_memory_region(address, size);
#endif
}
inline void allow([[maybe_unused]] const void* address, [[maybe_unused]] size_t size) {
#ifdef EMU_ADDRESS
  __asan_unpoison_memory_region(address, size);
#endif
}

}  // namespace emu
