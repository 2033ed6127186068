// decode_products.cuh - decode_attention's two products of a tile: S = Q K^T and O += P V.
//
// Q is the A operand of the first: its fragments stay in registers, or in shared memory behind the
// rings. The head of decode_attention.cu says how an e4m3 cache is multiplied.
#pragma once
#include "decode_tiles.cuh"

// The accumulators of the largest heads leave no registers for Q: it stays in shared memory.
constexpr bool QUERIES_IN_SHARED = D > 128;
constexpr int QUERY_BYTES = QUERIES_IN_SHARED ? D / 16 * 32 * 16 : 0;

// What the tensor cores multiply.
template <bool HALF> struct Operand { using type = TYPE; };
template <> struct Operand<true> { using type = fp16; };
using Multiplied = Operand<QUANTIZED>::type;

// The A operand of S = Q K^T: 16 rows, those past the group zero. For an e4m3 cache the columns
// stand in the order in which unpacked keys have them.
DEVICE void load_queries(u32 (&queries)[D / 16][4], const TYPE* q, int group) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i % 2 * 8;
      const int column = QUANTIZED ? lane % 4 * 4 + i / 2 * 2 : lane % 4 * 2 + i / 2 * 8;
      queries[k][i] =
          row < group ? *reinterpret_cast<const u32*>(q + row * D + k * 16 + column) : 0;
    }
}

// bf16 queries as fp16: all are multiplied by one power of two, and its inverse is returned.
DEVICE float queries_to_half(u32 (&queries)[D / 16][4]) {
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      largest = fmaxf(largest, fmaxf(fabsf(low<bf16>(queries[k][i])),
                                     fabsf(high<bf16>(queries[k][i]))));
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
  const u32 exponent = __float_as_uint(largest) & 0x7f800000u;
  const float inverse = __uint_as_float(0x7f000000u - exponent);
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      queries[k][i] = pack<fp16>(low<bf16>(queries[k][i]) * inverse,
                                 high<bf16>(queries[k][i]) * inverse);
  return __uint_as_float(exponent);
}

// Put the queries where query_fragment finds them, if they don't stay in registers.
DEVICE void store_queries(u8* shared, const u32 (&queries)[D / 16][4]) {
  if constexpr (QUERIES_IN_SHARED) {
    uint4* to = reinterpret_cast<uint4*>(shared + RING_BYTES);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < D / 16; k++)  // all warps have the same
      if (k % WARPS == warp)
        to[k * 32 + lane] = uint4{queries[k][0], queries[k][1], queries[k][2], queries[k][3]};
    __syncthreads();
  }
}
DEVICE void query_fragment(u32 (&a)[4], const u32 (&queries)[D / 16][4], const u8* shared, int k) {
  if constexpr (QUERIES_IN_SHARED) {
    const uint4 q = reinterpret_cast<const uint4*>(shared + RING_BYTES)[k * 32 + threadIdx.x % 32];
    a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = queries[k][i];
  }
}

// scores[n] = Q K^T for positions 8n .. 8n + 7 of the tile (C fragments of the mma).
DEVICE void multiply_keys(float (&scores)[2][4], const u32 (&queries)[D / 16][4],
                          const u8* shared, u32 keys) {
  // Matrices: chunk 2f, then 2f + 1, of positions 0-7, then the same of 8-15.
  const int lane = threadIdx.x % 32;
  const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
  // Two sums for each output: a chain of dependent mma half as long.
  float sums[2][2][4] = {};
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    u32 k[4], q[4];
    ldmatrix(k, fragment(shared, keys, row, half, f));
    if constexpr (QUANTIZED) {
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (2 * f + c < CHUNKS) {
          query_fragment(q, queries, shared, 2 * f + c);
#pragma unroll
          for (int n = 0; n < 2; n++) {
            u32 first, second;
            unpack_e4m3x4<Multiplied>(k[2 * n + c], first, second);
            mma<Multiplied>(sums[c][n], q, first, second);
          }
        }
    } else {
      query_fragment(q, queries, shared, f);
#pragma unroll
      for (int n = 0; n < 2; n++) mma<Multiplied>(sums[f % 2][n], q, k[2 * n], k[2 * n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = sums[0][n][i] + sums[1][n][i];
}

// output += P V. Column j of output[2c + n] is element 16c + 8n + j of the head, or, for an e4m3
// cache, element 16c + 2j + n.
DEVICE void multiply_values(float (&output)[D / 8][4], const u32 (&weights)[4], const u8* shared,
                            u32 values) {
  // Matrices: chunk 2f of positions 0-7, then 8-15, then chunk 2f + 1 of the same.
  const int lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    u32 v[4];
    ldmatrix_transposed(v, fragment(shared, values, row, half, f));
    if constexpr (QUANTIZED) {
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (2 * f + c < CHUNKS) {
          u32 even[2], odd[2];
#pragma unroll
          for (int k = 0; k < 2; k++)
            unpack_e4m3x4<Multiplied>(swap_middle_bytes(v[2 * c + k]), even[k], odd[k]);
          mma<Multiplied>(output[2 * (2 * f + c)], weights, even[0], even[1]);
          mma<Multiplied>(output[2 * (2 * f + c) + 1], weights, odd[0], odd[1]);
        }
    } else {
#pragma unroll
      for (int n = 0; n < 2; n++)
        mma<Multiplied>(output[2 * f + n], weights, v[2 * n], v[2 * n + 1]);
    }
  }
}
