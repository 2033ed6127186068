// What the processor and the operating system allow. Compiled for the least of all processors.
#pragma once

#include <cstdint>

namespace trioserve::detection {

// Bits of a set of instructions. They are mirrored in Python.
enum Instructions : uint32_t {
  kAvx2 = 1 << 0,        // with FMA and F16C
  kAvx512 = 1 << 1,      // F, BW, DQ, VL and VNNI, with kAvx2
  kAvx512Bf16 = 1 << 2,  // with kAvx512
  kAmx = 1 << 3,         // tiles of bfloat16 and int8
  kAvxVnni = 1 << 4,     // the products of VNNI without AVX-512
  kNeon = 1 << 5,        // ARMv8.2 with the products of bytes
  kNeonBf16 = 1 << 6,    // ARMv8.6's products of bfloat16 and of bytes, with kNeon
};

// All that this process can compute with.
uint32_t instructions();

}  // namespace trioserve::detection
