#include "extension.h"

#include <atomic>

#include "detection.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// What each extension needs, by number.
#if defined(__AVX512BF16__)
constexpr uint32_t kNeeds[] = {0, detection::kAmx, 0};
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr uint32_t kNeeds[] = {0, detection::kAvxVnni, detection::kAvx512};
#else
constexpr uint32_t kNeeds[] = {0};
#endif

std::atomic<Extension> chosen{Extension::kNone};

}  // namespace

Extension current_extension() { return chosen.load(std::memory_order_relaxed); }

bool choose_extension(Extension extension) {
  const auto number = static_cast<uint32_t>(extension);
  if (number >= sizeof kNeeds / sizeof *kNeeds) return false;
  if ((detection::instructions() & kNeeds[number]) != kNeeds[number]) return false;
  chosen.store(extension, std::memory_order_relaxed);
  return true;
}

}  // namespace trioserve::TRIOSERVE_ISA
