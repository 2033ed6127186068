#include "detection.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace trioserve::detection {
namespace {

#if defined(__x86_64__)

struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;

  Leaf(uint32_t number, uint32_t subleaf) { __get_cpuid_count(number, subleaf, &eax, &ebx, &ecx, &edx); }
};

bool all_of(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

// The registers that the operating system keeps for each thread, by bits of XCR0.
uint64_t kept_registers() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Linux keeps the tiles' registers only for processes that ask for them; one request holds for all of a
// process's threads.
bool may_use_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

uint32_t detect() {
  const Leaf basic(1, 0), extended(7, 0), more(7, 1);
  constexpr uint32_t fma = 1u << 12, xsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  if (!all_of(basic.ecx, fma | xsave | avx | f16c)) return 0;
  const uint64_t kept = kept_registers();
  constexpr uint64_t vectors = 0x6, wide_vectors = 0xe6;
  constexpr uint32_t avx2 = 1u << 5;
  if ((kept & vectors) != vectors || !all_of(extended.ebx, avx2)) return 0;
  uint32_t found = kAvx2;
  if (all_of(more.eax, 1u << 4)) found |= kAvxVnni;
  constexpr uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
  if ((kept & wide_vectors) != wide_vectors || !all_of(extended.ebx, f | dq | bw | vl) ||
      !all_of(extended.ecx, vnni))
    return found;
  found |= kAvx512;
  if (all_of(more.eax, 1u << 5)) found |= kAvx512Bf16;
  constexpr uint32_t tile_bf16 = 1u << 22, tile = 1u << 24, tile_int8 = 1u << 25;
  if (all_of(extended.edx, tile_bf16 | tile | tile_int8) && may_use_tiles()) found |= kAmx;
  return found;
}

#elif defined(__aarch64__)

// The numbers are Linux's; older headers lack some of their names.
uint32_t detect() {
  constexpr unsigned long atomics = 1ul << 8, dot_products = 1ul << 20;
  constexpr unsigned long int8_products = 1ul << 13, bf16 = 1ul << 14;
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if ((first & (atomics | dot_products)) != (atomics | dot_products)) return 0;
  const bool both = (second & (int8_products | bf16)) == (int8_products | bf16);
  return both ? kNeon | kNeonBf16 : uint32_t{kNeon};
}

#else

uint32_t detect() { return 0; }

#endif

}  // namespace

uint32_t instructions() {
  static const uint32_t found = detect();
  return found;
}

}  // namespace trioserve::detection

extern "C" uint32_t detected_instructions() { return trioserve::detection::instructions(); }
