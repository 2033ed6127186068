// conformance.cu - one instruction of hardware.cuh at a time, registers in and out.
// TYPE is any element; HALF is bf16 or fp16, which tensor cores and packed pairs are made of.
//
// What these kernels give on a GPU, the emulation must give; the same test runs on both.
#include "hardware.cuh"

struct Parameters {
  const void* a;
  const void* b;
  const void* c;
  void* out;
  int num;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

// d[lane] = mma of the fragments a [32, 4], b [32, 2] registers and c [32, 4] floats.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) multiply(const Parameters p) {
  const int lane = threadIdx.x;
  const u32* from_a = static_cast<const u32*>(p.a) + lane * 4;
  const u32* b = static_cast<const u32*>(p.b) + lane * 2;
  const float* from_c = static_cast<const float*>(p.c) + lane * 4;
  const u32 a[4] = {from_a[0], from_a[1], from_a[2], from_a[3]};
  float c[4] = {from_c[0], from_c[1], from_c[2], from_c[3]};
  mma<HALF>(c, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) static_cast<float*>(p.out)[lane * 4 + i] = c[i];
}

// out [32, 4] registers = ldmatrix of rows a [32] of 16 bytes; transposed if num is 1.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) load_matrices(const Parameters p) {
  SHARED(uint4, rows, 32);
  const int lane = threadIdx.x;
  rows[lane] = static_cast<const uint4*>(p.a)[lane];
  __syncwarp();
  u32 r[4];
  if (p.num) ldmatrix_transposed(r, rows + lane);
  else ldmatrix(r, rows + lane);
  for (int i = 0; i < 4; i++) static_cast<u32*>(p.out)[lane * 4 + i] = r[i];
}

// out [32] of 16 bytes = copy_async16 of a, the first num lanes valid; the others' source is null.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_async(const Parameters p) {
  SHARED(uint4, copied, 32);
  const int lane = threadIdx.x;
  const bool valid = lane < p.num;
  copy_async16(copied + lane, static_cast<const uint4*>(p.a) + (valid ? lane : 0), valid);
  copy_async_commit();
  copy_async_wait<0>();
  static_cast<uint4*>(p.out)[lane] = copied[lane];
}

// out [num] floats = a [num] elements of TYPE.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) widen(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i < p.num) static_cast<float*>(p.out)[i] = to_float(static_cast<const TYPE*>(p.a)[i]);
}

// out [num] elements of TYPE = a [num] floats.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) narrow(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i < p.num) static_cast<TYPE*>(p.out)[i] = from_float<TYPE>(static_cast<const float*>(p.a)[i]);
}

// out [num] pairs of HALF = a [num, 2] floats.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) pack_pairs(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i >= p.num) return;
  const float2 pair = static_cast<const float2*>(p.a)[i];
  static_cast<u32*>(p.out)[i] = pack<HALF>(pair.x, pair.y);
}

// out [num, 2] registers of packed HALF = a [num] registers of four e4m3.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) unpack_e4m3(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i >= p.num) return;
  u32 first, second;
  unpack_e4m3x4<HALF>(static_cast<const u32*>(p.a)[i], first, second);
  static_cast<u32*>(p.out)[2 * i] = first;
  static_cast<u32*>(p.out)[2 * i + 1] = second;
}

// out [num] registers of four e4m3 = a [num, 4] floats.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) pack_e4m3(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i >= p.num) return;
  const float4 x = static_cast<const float4*>(p.a)[i];
  static_cast<u32*>(p.out)[i] = pack_e4m3x4(x.x, x.y, x.z, x.w);
}

// out [num, 4] floats = exp2, log2, reciprocal square root and reciprocal of a [num] floats.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) approximate(const Parameters p) {
  const int i = blockIdx.x * NUM_THREADS + threadIdx.x;
  if (i >= p.num) return;
  const float x = static_cast<const float*>(p.a)[i];
  float* out = static_cast<float*>(p.out) + i * 4;
  out[0] = exp2_approx(x);
  out[1] = log2_approx(x);
  out[2] = rsqrt_approx(x);
  out[3] = reciprocal_approx(x);
}

// Sums of exchanged lanes, votes and atomics: num threads of each block take part. out [grid + 2]
// = for each block its sum over thread numbers, then the count and the largest of all values.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) exchange(const Parameters p) {
  SHARED(int, total, 1);
  const int thread = threadIdx.x;
  if (thread == 0) *total = 0;
  __syncthreads();
  int x = thread < p.num ? thread : 0;
  for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  if (thread % 32 == 0) atomicAdd(total, x);
  const int count = __syncthreads_count(thread < p.num);
  int* out = static_cast<int*>(p.out);
  if (thread == 0) {
    out[blockIdx.x] = *total;
    atomicAdd(out + gridDim.x, count);
    atomicMax(out + gridDim.x + 1, *total + static_cast<int>(blockIdx.x));
  }
}
