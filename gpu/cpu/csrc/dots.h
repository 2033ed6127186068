// Sums of products of weights and activations of 8 bits, four at a time. They are whole numbers, so they
// are the same however a processor computes them.
//
// A header for each instruction set has RoundedNumbers, which are 32 activations as products read them,
// kExcess, by which the weights of its products are larger than the numbers that they stand for, and one or
// several Dots:
//
//   kParts                      what a quad of inputs is multiplied in
//   weights(quads, part)        sixteen outputs' numbers of four inputs
//   activations(x, quad, part)  four numbers, sixteen times
//   add(sums, weights, x)       sixteen sums with the products added
//
// RoundedDots are those of an instruction set by the numbers of extension.h.
#pragma once

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

template <class... Dots>
struct DotsOf {};

}  // namespace trioserve::TRIOSERVE_ISA

#if defined(__AVX512F__)
#include "dots_avx512.h"
#elif defined(__AVX2__)
#include "dots_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "dots_neon.h"
#else
#error "no such header for this instruction set"
#endif
