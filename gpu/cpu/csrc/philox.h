// Philox4x32-10 as gpu/sampling/philox.py has it: a number is a function of seed, position, index, purpose
// and lane alone.
#pragma once

#include <cstdint>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

// What a number is for; the values are those of gpu/sampling/philox.py.
enum class Purpose : uint32_t { kBlock = 0, kToken = 1 };

// A number in [0, 1) with all 53 bits of a double.
inline double uniform(uint64_t seed, uint32_t position, uint32_t index, Purpose purpose,
                      uint32_t lane) {
  uint32_t c0 = position, c1 = index, c2 = static_cast<uint32_t>(purpose), c3 = lane;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return (static_cast<double>(c0 >> 5) * 0x1p26 + (c1 >> 6)) * 0x1p-53;
}

}  // namespace trioserve::TRIOSERVE_ISA
