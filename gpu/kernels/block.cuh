// block.cuh - what all NUM_THREADS threads of a block compute together: reductions, a running sum
// and a sort. Each thread must call them; results don't depend on the order of the threads.
#pragma once
#include "hardware.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
static_assert(NUM_THREADS % 32 == 0 && (NUM_WARPS & (NUM_WARPS - 1)) == 0 && NUM_WARPS <= 32);

// Combine a number of every thread, in a fixed order; all get the result. `scratch` is shared
// memory of NUM_WARPS numbers. `combine` must not mind which of its arguments is which.
template <class T, class Combine>
DEVICE T reduce_over_block(T x, T* scratch, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(ALL_LANES, x, distance));
  }
  __syncthreads();  // another warp may still read what was there
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[threadIdx.x % NUM_WARPS];
#pragma unroll
  for (int distance = NUM_WARPS / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(ALL_LANES, x, distance));
  }
  return x;
}

DEVICE u64 min_over_block(u64 x, u64* scratch) {
  return reduce_over_block(x, scratch, [](u64 a, u64 b) { return a < b ? a : b; });
}

template <class T> DEVICE T sum_over_block(T x, u64* scratch) {
  static_assert(sizeof(T) == sizeof(u64));
  return reduce_over_block(x, reinterpret_cast<T*>(scratch), [](T a, T b) { return a + b; });
}

// values[i], in shared memory, becomes values[0] + ... + values[i].
DEVICE void running_sum(u64* values, int n, u64* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int per_thread = (n + NUM_THREADS - 1) / NUM_THREADS;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, n);
  const int end = min(begin + per_thread, n);
  __syncthreads();
  u64 sum = 0;
#pragma unroll 1
  for (int i = begin; i < end; i++) sum += values[i];
  u64 before = sum;  // becomes the sum of this and all earlier lanes
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 earlier = __shfl_up_sync(ALL_LANES, before, distance);
    if (lane >= distance) before += earlier;
  }
  if (lane == 31) scratch[warp] = before;
  before -= sum;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < warp; i++) before += scratch[i];
#pragma unroll 1
  for (int i = begin; i < end; i++) values[i] = before += values[i];
  __syncthreads();
}

// Sort `n` numbers in shared memory, a power of two, ascending: a bitonic network (Batcher 1968).
// Pairs up to 32 apart stay within the 64 numbers of one warp, which then needs no other.
DEVICE void sort_over_block(u64* values, int n) {
  int last_distance = 64;  // other warps may have written the numbers
  for (int size = 2; size <= n; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      if (distance > 32 || last_distance > 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      last_distance = distance;
#pragma unroll 1
      for (int pair = threadIdx.x; pair < n / 2; pair += NUM_THREADS) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const u64 a = values[low], b = values[high];
        if ((a > b) == ((low & size) == 0)) values[low] = b, values[high] = a;
      }
    }
  }
  __syncthreads();
}

DEVICE int next_power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}
