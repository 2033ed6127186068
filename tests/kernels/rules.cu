// rules.cu - kernels that break a rule of the machine, or keep it where it is easily broken; the
// tests of the emulation run them. out [..] ints or floats; num says how.
#include "hardware.cuh"

struct Parameters {
  void* out;
  int num;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

#define KERNEL(name) \
  extern "C" __global__ void __launch_bounds__(NUM_THREADS) name(const Parameters p)

// Warp 0 waits at a barrier that the others never reach, for they wait for a lane that exited.
KERNEL(deadlock) {
  if (threadIdx.x == 40) return;
  if (threadIdx.x >= 32) __syncwarp();
  __syncthreads();
}

// Half of a warp shuffles, the other half votes.
KERNEL(divergent_operations) {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(ALL_LANES, 1, 1);
  else __any_sync(ALL_LANES, 1);
}

// The two halves of a warp wait at barriers of different lines.
KERNEL(divergent_barrier) {
  if (threadIdx.x % 32 < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// Lane 0 wants a number of lane 16, which isn't in the mask.
KERNEL(shuffle_from_an_absent_lane) {
  if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, threadIdx.x == 0 ? 16 : 0);
}

// A lane that the mask lacks calls.
KERNEL(absent_caller) { __syncwarp(0xfffffffeu); }

// Masks of one warp that overlap.
KERNEL(overlapping_masks) { __syncwarp(threadIdx.x < 16 ? 0x0001ffffu : 0xffff0000u); }

// mma in half of a warp.
KERNEL(half_a_warp_multiplies) {
  float c[4] = {};
  const u32 a[4] = {};
  if (threadIdx.x < 16) mma<bf16>(c, a, 0, 0);
}

// A thread exits before its copy has landed.
KERNEL(exit_with_copies) {
  SHARED(uint4, to, NUM_THREADS);
  for (int i = 0; i < 32; i++) copy_async16(to + threadIdx.x, p.out, true);
  copy_async_commit();
}

// num bytes past the end of a static array (and of dynamic shared memory) are written.
KERNEL(past_a_static_array) {
  SHARED(u8, first, 100);
  SHARED(u8, second, 100);
  if (threadIdx.x == 0) first[99 + p.num] = second[0] = 1;
}
KERNEL(past_dynamic_memory) {
  DYNAMIC_SHARED(shared);
  if (threadIdx.x == 0) shared[999 + p.num] = 1;
}

// More static shared memory than any GPU has.
KERNEL(too_many_static_bytes) {
  SHARED(float, numbers, 12289);
  numbers[threadIdx.x] = 0.f;
}

// All of a block's 227 KB: each thread sums what the next one wrote.
KERNEL(all_shared_memory) {
  DYNAMIC_SHARED(shared);
  u32* words = reinterpret_cast<u32*>(shared);
  const int per_thread = p.num / 4 / NUM_THREADS, next = (threadIdx.x + 1) % NUM_THREADS;
  for (int i = 0; i < per_thread; i++) words[threadIdx.x * per_thread + i] = threadIdx.x;
  __syncthreads();
  u32 sum = 0;
  for (int i = 0; i < per_thread; i++) sum += words[next * per_thread + i];
  static_cast<u32*>(p.out)[threadIdx.x] = sum;
}

// Every thread has an array that takes all registers and more.
KERNEL(large_frames) {
  volatile float numbers[4096];
  for (int i = 0; i < 4096; i++) numbers[i] = static_cast<float>(threadIdx.x + i);
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < 4096; i++) sum += numbers[i] - i;
  static_cast<float*>(p.out)[threadIdx.x] = sum / 4096;
}

// Which thread comes last to write? With num == 1 a barrier decides, not the order.
KERNEL(last_writer) {
  SHARED(int, last, 1);
  *last = threadIdx.x;
  __syncthreads();
  if (p.num == 1) *last = NUM_THREADS;
  __syncthreads();
  if (threadIdx.x == 0) static_cast<int*>(p.out)[blockIdx.x] = *last;
}

// Unwritten shared memory, static and dynamic.
KERNEL(unwritten) {
  SHARED(float, numbers, NUM_THREADS);
  DYNAMIC_SHARED(shared);
  float* out = static_cast<float*>(p.out);
  out[threadIdx.x] = numbers[threadIdx.x];
  out[NUM_THREADS + threadIdx.x] = reinterpret_cast<float*>(shared)[threadIdx.x];
  numbers[threadIdx.x] = reinterpret_cast<float*>(shared)[threadIdx.x] = 1.f;  // for the next block
}

// The copy of a group that is not waited for has landed or not.
KERNEL(early_read) {
  SHARED(uint4, to, NUM_THREADS);
  to[threadIdx.x] = make_uint4(0, 0, 0, 0);
  copy_async16(to + threadIdx.x, static_cast<uint4*>(p.out) + NUM_THREADS, true);
  copy_async_commit();
  copy_async_wait<1>();
  static_cast<uint4*>(p.out)[threadIdx.x] = to[threadIdx.x];
  copy_async_wait<0>();
}

// ldmatrix over rows of num bytes: 8 rows that lie in the same banks, or don't.
KERNEL(load_rows) {
  DYNAMIC_SHARED(shared);
  u32 r[4];
  ldmatrix(r, shared + threadIdx.x * p.num);
  static_cast<u32*>(p.out)[threadIdx.x] = r[0];
}

// A number is read, and written back by a later operation, which others may come before.
KERNEL(lost_update) {
  u32* count = static_cast<u32*>(p.out);
  if (p.num == 1) {
    atomicAdd(count, 1u);
  } else {
    const u32 seen = load_relaxed(count);
    atomicExch(count, seen + 1);
  }
}

// The last block to arrive adds what all blocks wrote; num == 1: with the fences this needs.
KERNEL(last_block) {
  SHARED(int, arrived, 1);
  u32* numbers = static_cast<u32*>(p.out);
  if (threadIdx.x == 0) {
    numbers[2 + blockIdx.x] = blockIdx.x + 1;
    if (p.num == 1) __threadfence();
    *arrived = static_cast<int>(atomicAdd(numbers, 1u));
  }
  __syncthreads();
  if (*arrived != static_cast<int>(gridDim.x) - 1 || threadIdx.x != 0) return;
  if (p.num == 1) __threadfence();
  u32 sum = 0;
  for (u32 i = 0; i < gridDim.x; i++) sum += numbers[2 + i];
  numbers[1] = sum;
}

// A thread reads what another lane wrote; num == 1: after a __syncwarp.
KERNEL(neighbor) {
  SHARED(int, numbers, 32);
  numbers[threadIdx.x] = threadIdx.x;
  if (p.num == 1) __syncwarp();
  else __shfl_sync(ALL_LANES, 0, 0);  // lets all lanes come here, and orders no memory
  static_cast<int*>(p.out)[blockIdx.x * NUM_THREADS + threadIdx.x] = numbers[threadIdx.x ^ 1];
}

// Integer arithmetic that overflows: num + the largest int.
KERNEL(signed_overflow) { static_cast<int*>(p.out)[threadIdx.x] = 0x7fffffff + p.num; }

// Functions of cuda.h; a test computes their results itself.
KERNEL(bit_functions) {
  u32* out = static_cast<u32*>(p.out);
  const u32 x = p.num * 0x9E3779B9u + threadIdx.x * 0x85EBCA6Bu;
  const u64 wide = static_cast<u64>(x) << 32 | ~x;
  const u32 results[] = {static_cast<u32>(__popc(x)), static_cast<u32>(__clz(static_cast<int>(x))),
                         static_cast<u32>(__ffs(static_cast<int>(x))), __brev(x),
                         __umulhi(x, ~x), static_cast<u32>(__umul64hi(wide, wide)),
                         __byte_perm(x, ~x, 0x7531), __funnelshift_l(x, ~x, 7),
                         __funnelshift_r(x, ~x, 7), __reduce_add_sync(ALL_LANES, x),
                         __reduce_max_sync(ALL_LANES, x), __match_any_sync(ALL_LANES, x % 3),
                         __shfl_up_sync(ALL_LANES, x, 3u), __shfl_down_sync(ALL_LANES, x, 3u, 8),
                         static_cast<u32>(__shfl_xor_sync(ALL_LANES, wide, 5) >> 32),
                         __ballot_sync(ALL_LANES, x & 1)};
  constexpr int COUNT = sizeof(results) / 4;
  for (int i = 0; i < COUNT; i++) out[threadIdx.x * COUNT + i] = results[i];
}

// x x - c for two numbers, of which the second must not be fused.
KERNEL(multiply_add) {
  if (threadIdx.x) return;
  int* out = static_cast<int*>(p.out);
  const float x = __int2float_rn(p.num), y = __int2float_rn(p.num + 2);
  out[0] = static_cast<int>(x * x - 16785408.f);
  out[1] = static_cast<int>(__fsub_rn(__fmul_rn(y, y), 16801800.f));
}
