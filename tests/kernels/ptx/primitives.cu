// primitives.cu - the primitives of hardware.cuh that conformance.cu leaves out.
#include "hardware.cuh"

struct Parameters {
  const void* a;
  const void* b;
  const void* c;
  void* out;
  int num;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

// d[lane] = mma_first of the fragments a [32, 4] and b [32, 2] registers.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) multiply_first(const Parameters p) {
  const int lane = threadIdx.x;
  const u32* from_a = static_cast<const u32*>(p.a) + lane * 4;
  const u32* b = static_cast<const u32*>(p.b) + lane * 2;
  const u32 a[4] = {from_a[0], from_a[1], from_a[2], from_a[3]};
  float c[4];
  mma_first<HALF>(c, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) static_cast<float*>(p.out)[lane * 4 + i] = c[i];
}

// out [32, 8] = 16 bytes of a, a word of b, bytes swapped, a settled word, the thread's number.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) words(const Parameters p) {
  const int lane = threadIdx.x;
  u32* out = static_cast<u32*>(p.out) + lane * 8;
  const uint4 four = load_once16(static_cast<const uint4*>(p.a) + lane);
  out[0] = four.x;
  out[1] = four.y;
  out[2] = four.z;
  out[3] = four.w;
  out[4] = load_relaxed(static_cast<const u32*>(p.b) + lane);
  out[5] = swap_middle_bytes(four.x);
  out[6] = settled(four.y);
  out[7] = reread_thread_index();
}

// out [2, 32] of 16 bytes: of two groups of copies, the first after a wait for all but one, the
// second after a wait for all; each lane reads what its neighbour copied.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_groups(const Parameters p) {
  DYNAMIC_SHARED(copied);
  const int lane = threadIdx.x;
  for (int group = 0; group < 2; group++) {
    copy_async16(copied + (group * 32 + lane) * 16, static_cast<const uint4*>(p.a) + group * 32 + lane, true);
    copy_async_commit();
  }
  const SharedAddress own = shared_address(copied) + lane * 16;
  const SharedAddress neighbour = flip_bits(own, 16);
  uint4* out = static_cast<uint4*>(p.out);
  const uint4* rows = reinterpret_cast<const uint4*>(copied) + (neighbour - shared_address(copied)) / 16;
  copy_async_wait<1>();
  __syncwarp();
  out[lane] = rows[0];
  copy_async_wait<0>();
  __syncwarp();
  out[32 + lane] = rows[32];
}

// out [32, 4] = what another lane holds, whether any lane holds more than num, a bit for each lane that
// does, and what the two sides of a branch give.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) votes(const Parameters p) {
  const int lane = threadIdx.x;
  int* out = static_cast<int*>(p.out) + lane * 4;
  const int mine = static_cast<const int*>(p.a)[lane];
  out[0] = __shfl_sync(ALL_LANES, mine, lane * 7 + p.num);
  out[1] = __any_sync(ALL_LANES, mine > p.num);
  out[2] = __ballot_sync(ALL_LANES, mine > p.num);
  if (mine > p.num) out[3] = lane * 3;
  else out[3] = mine;
}
