// vectors.cuh - rows of 16-bit elements in 16-byte vectors, and sums over the lanes of a warp.
//
// Element T is bf16 or fp16. A thread moves 8 elements with one 16-byte access and computes with
// them in float32.
#pragma once
#include "hardware.cuh"

constexpr int VECTOR = 8;  // elements in 16 bytes

DEVICE uint4 load16(const void* from) { return *static_cast<const uint4*>(from); }
DEVICE void store16(void* to, uint4 value) { *static_cast<uint4*>(to) = value; }

template <class T> DEVICE void unpack8(uint4 packed, float (&x)[VECTOR]) {
  x[0] = low<T>(packed.x), x[1] = high<T>(packed.x);
  x[2] = low<T>(packed.y), x[3] = high<T>(packed.y);
  x[4] = low<T>(packed.z), x[5] = high<T>(packed.z);
  x[6] = low<T>(packed.w), x[7] = high<T>(packed.w);
}

template <class T> DEVICE uint4 pack8(const float (&x)[VECTOR]) {
  return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                    pack<T>(x[6], x[7]));
}

DEVICE float sum_of_squares(const float (&x)[VECTOR]) {
  float sum = 0.f;
  for (int i = 0; i < VECTOR; i++) sum += x[i] * x[i];
  return sum;
}

DEVICE float largest_size(const float (&x)[VECTOR]) {
  float largest = 0.f;
  for (int i = 0; i < VECTOR; i++) largest = fmaxf(largest, fabsf(x[i]));
  return largest;
}

// Over each LANES neighboring lanes of a warp, a power of two. All of them get the same bits.
// Every lane of the warp must call it.
template <int LANES> DEVICE float sum_over_lanes(float x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(ALL_LANES, x, distance);
  }
  return x;
}

template <int LANES> DEVICE float max_over_lanes(float x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
  }
  return x;
}
