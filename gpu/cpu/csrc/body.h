// Bodies: implementations of the products for different instruction sets, in one library.
//
// Every processor that loads the library has AVX-512 with BF16 and VNNI. A product's bits depend on the
// body that computes it, and within a body on nothing that product.h doesn't name.
#pragma once

#include <cstdint>

namespace trioserve {

enum class Body : int32_t {
  kAvx512 = 0,
  kAmx = 1,
  // The arithmetic of kAmx in AVX-512 instructions, for tests on processors without AMX: the same bits,
  // slower.
  kAmxEmulated = 2,
};

// The fastest body that this processor has.
Body fastest_body();

// The body of all products: the fastest, unless another was chosen.
Body current_body();

// Chooses a body for all products of the process. Returns false, and changes nothing, where the processor
// or the operating system lacks what it needs. No product may be under way.
bool choose_body(Body body);

}  // namespace trioserve
