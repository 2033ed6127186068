// Sums of products of activations and weights, whose numbers stand in memory by pairs of bfloat16.
//
// Where a processor multiplies pairs, a pair has one part; elsewhere two, which are multiplied one after
// the other in float32. A sum goes through the pairs and their parts in order.
//
//   Activation                   how activations are prepared; two stand for a pair
//   Operand                      sixteen pairs, or one number of each
//   activation_part(at, part)    the pair at an address, sixteen times
//   weight_part(at, part)        sixteen pairs; first_weight_part: with 0 for the second of each
//   byte_part, nibble_part       the same of numbers of 8 and 4 bits, as product.h lays them out
//   add_products                 what is added to sixteen sums
//   load_operand, store_operand  64 bytes
//   to_activations               from bfloat16
#pragma once

#if defined(__AVX512BF16__)
#include "operands_bf16.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "operands_neon.h"
#else
#include "operands_float.h"
#endif
