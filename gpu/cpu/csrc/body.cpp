#include "body.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace trioserve {
namespace {

bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if ((edx & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
  // Linux keeps the tiles' registers only for processes that ask for them; one request holds for all of a
  // process's threads.
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool amx_is_there() {
  static const bool there = has_amx();
  return there;
}

std::atomic<Body>& chosen() {
  static std::atomic<Body> body{fastest_body()};
  return body;
}

}  // namespace

Body fastest_body() { return amx_is_there() ? Body::kAmx : Body::kAvx512; }

Body current_body() { return chosen().load(std::memory_order_relaxed); }

bool choose_body(Body body) {
  if (body == Body::kAmx && !amx_is_there()) return false;
  chosen().store(body, std::memory_order_relaxed);
  return true;
}

}  // namespace trioserve
