// philox.cuh - Philox4x32-10 on the device: the twin of gpu/sampling/philox.py.
//
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A number is a
// pure function of (seed, position, sequence index, purpose, lane): there is no state to keep.
#pragma once
#include "hardware.cuh"

// What a number is for; the values are those of gpu.philox.Purpose and never change.
constexpr u32 FOR_BLOCK = 0;
constexpr u32 FOR_TOKEN = 1;

// The random numbers of one draw; each lane of each purpose has one.
struct RandomNumbers {
  u64 seed;
  u32 position;
  u32 sequence_index;

  // Uniform in [0, 1), with all 53 bits of a double.
  DEVICE double uniform(u32 purpose, u32 lane) const {
    u32 c0 = position, c1 = sequence_index, c2 = purpose, c3 = lane;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
      const u64 product0 = static_cast<u64>(0xD2511F53u) * c0;
      const u64 product1 = static_cast<u64>(0xCD9E8D57u) * c2;
      const u32 high0 = static_cast<u32>(product0 >> 32), high1 = static_cast<u32>(product1 >> 32);
      c0 = high1 ^ c1 ^ k0, c1 = static_cast<u32>(product1);
      c2 = high0 ^ c3 ^ k1, c3 = static_cast<u32>(product0);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const u64 bits = static_cast<u64>(c0 >> 5) << 26 | c1 >> 6;
    return static_cast<double>(bits) * 0x1p-53;
  }

  // Exponentially distributed, of rate 1: -log(1 - u); the difference is exact, as u is a
  // multiple of 2^-53.
  DEVICE double exponential(u32 purpose, u32 lane) const {
    return -log(1.0 - uniform(purpose, lane));
  }
};
