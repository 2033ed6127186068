// vector_types.h - CUDA's built-in vector types, with the alignment that CUDA gives them.
//
// The alignment matters: a load of a float4 from an address that is no multiple of 16 is an error
// on a GPU, and the undefined-behavior sanitizer reports it here.
#pragma once

#define EMU_VECTOR_TYPE(scalar, base)                                                              \
  struct alignas(2 * sizeof(scalar)) base##2 { scalar x, y; };                                     \
  struct base##3 { scalar x, y, z; };                                                              \
  struct alignas(sizeof(scalar) == 8 ? 16 : 4 * sizeof(scalar)) base##4 { scalar x, y, z, w; };    \
  inline base##2 make_##base##2(scalar x, scalar y) { return {x, y}; }                             \
  inline base##3 make_##base##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                \
  inline base##4 make_##base##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

EMU_VECTOR_TYPE(signed char, char)
EMU_VECTOR_TYPE(unsigned char, uchar)
EMU_VECTOR_TYPE(short, short)
EMU_VECTOR_TYPE(unsigned short, ushort)
EMU_VECTOR_TYPE(int, int)
EMU_VECTOR_TYPE(unsigned, uint)
EMU_VECTOR_TYPE(long long, longlong)
EMU_VECTOR_TYPE(unsigned long long, ulonglong)
EMU_VECTOR_TYPE(float, float)
EMU_VECTOR_TYPE(double, double)
#undef EMU_VECTOR_TYPE

using dim3 = uint3;
