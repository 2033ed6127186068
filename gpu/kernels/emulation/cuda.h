// cuda.h - the part of CUDA C++ that the kernels use, for g++.
//
// It stands for the compiler's built-in header: g++ includes it before the kernel. What a GPU has
// an instruction for and CUDA C++ has no function for is in gpu/kernels/hardware.cuh instead.
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(n) alignas(n)

#define threadIdx (emu::current->thread_index)
#define blockIdx (emu::current->block_index)
#define blockDim (emu::current->block_size)
#define gridDim (emu::current->grid_size)
constexpr int warpSize = 32;

// ---- barriers -----------------------------------------------------------------------------------
// The default argument is the line of the call, by which a divergent barrier is noticed.

inline void __syncthreads(int line = __builtin_LINE()) { emu::barrier(0, 0, false, line); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return emu::barrier(0, 0, predicate != 0, line);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return emu::barrier(0, 0, predicate != 0, line) > 0;
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return emu::barrier(0, 0, predicate == 0, line) == 0;
}
inline void __syncwarp(unsigned mask = ~0u) { emu::meet(emu::WarpOp::sync, mask, nullptr); }
inline void __threadfence() { emu::fence(); }
inline void __threadfence_block() { emu::fence(); }
[[noreturn]] inline void __trap() { emu::fail("__trap"); }

// ---- warps --------------------------------------------------------------------------------------

namespace emu {

template <class T>
T shuffle(unsigned mask, T value, int source) {
  Shuffle operands{to_word(value), 0, source};
  meet(WarpOp::shuffle, mask, &operands);
  return from_word<T>(operands.out);
}

// Folds the values of all lanes of `mask`, in the order of the lanes.
template <class T, class Fold>
T reduce(unsigned mask, T value, Fold fold) {
  Gather operands{to_word(value), {}};
  meet(WarpOp::gather, mask, &operands);
  int lane = __builtin_ctz(mask);
  T result = from_word<T>(operands.values[lane]);
  for (lane++; lane < 32; lane++)
    if (mask >> lane & 1) result = fold(result, from_word<T>(operands.values[lane]));
  return result;
}

}  // namespace emu

// A lane outside of its part of `width` lanes reads its own value, as the CUDA guide says.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = emu::current->lane & ~(width - 1);
  return emu::shuffle(mask, value, first | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int lane = emu::current->lane, source = lane ^ lanes;
  return emu::shuffle(mask, value, source < (lane | (width - 1)) + 1 ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu::current->lane, source = lane + static_cast<int>(delta);
  return emu::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu::current->lane, source = lane - static_cast<int>(delta);
  return emu::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  emu::Vote operands{predicate != 0, 0};
  emu::meet(emu::WarpOp::vote, mask, &operands);
  return operands.out;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  emu::Gather operands{emu::to_word(value), {}};
  emu::meet(emu::WarpOp::gather, mask, &operands);
  unsigned same = 0;
  for (int lane = 0; lane < 32; lane++)
    if (mask >> lane & 1 && operands.values[lane] == operands.in) same |= 1u << lane;
  return same;
}

template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return emu::reduce(mask, value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return emu::reduce(mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return emu::reduce(mask, value, [](T a, T b) { return a > b ? a : b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return emu::reduce(mask, value, [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return emu::reduce(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
  return emu::reduce(mask, value, [](unsigned a, unsigned b) { return a ^ b; });
}

// ---- atomics ------------------------------------------------------------------------------------
// Relaxed, as CUDA's are: they order no other memory.

namespace emu {

// Replaces *address by update(old) and returns the old value.
template <class T, class Update>
T atomic_update(T* address, Update update) {
  interleave();
  T old, changed;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    changed = update(old);
  } while (!__atomic_compare_exchange(address, &old, &changed, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return old;
}

// Keeps a second argument from taking part in the deduction of T: atomicAdd(&counter, 1).
template <class T>
struct Same {
  using type = T;
};
template <class T>
using same = typename Same<T>::type;

}  // namespace emu

template <class T>
T atomicAdd(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicSub(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return static_cast<T>(old - value); });
}
template <class T>
T atomicMax(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicAnd(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return old & value; });
}
template <class T>
T atomicOr(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return old | value; });
}
template <class T>
T atomicXor(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return old ^ value; });
}
template <class T>
T atomicExch(T* address, emu::same<T> value) {
  return emu::atomic_update(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, emu::same<T> expected, emu::same<T> value) {
  return emu::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emu::atomic_update(address, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}

// ---- loads and stores with a cache hint ---------------------------------------------------------

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldca(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
template <class T> void __stcg(T* address, T value) { *address = value; }
template <class T> void __stcs(T* address, T value) { *address = value; }
template <class T> void __stwt(T* address, T value) { *address = value; }

// ---- bits ---------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
// Byte i of the result is the byte of {b, a} that the low 3 bits of digit i of `selector` name; the
// digit's top bit spreads that byte's sign instead.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned digit = selector >> 4 * i & 15;
    unsigned byte = bytes >> 8 * (digit & 7) & 255;
    if (digit & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

inline unsigned __float_as_uint(float x) { return emu::from_word<unsigned>(emu::to_word(x)); }
inline int __float_as_int(float x) { return emu::from_word<int>(emu::to_word(x)); }
inline float __uint_as_float(unsigned x) { return emu::from_word<float>(emu::to_word(x)); }
inline float __int_as_float(int x) { return emu::from_word<float>(emu::to_word(x)); }
inline long long __double_as_longlong(double x) {
  return emu::from_word<long long>(emu::to_word(x));
}
inline double __longlong_as_double(long long x) { return emu::from_word<double>(emu::to_word(x)); }

// ---- arithmetic ---------------------------------------------------------------------------------
// The fast forms are exact here: a test's tolerance has to cover what a GPU loses. The forms that
// name their rounding are never fused with what surrounds them.

#define EMU_MIN_MAX(result, left, right)                                                           \
  inline result min(left a, right b) {                                                             \
    const result x = static_cast<result>(a), y = static_cast<result>(b);                           \
    return x < y ? x : y;                                                                          \
  }                                                                                                \
  inline result max(left a, right b) {                                                             \
    const result x = static_cast<result>(a), y = static_cast<result>(b);                           \
    return x > y ? x : y;                                                                          \
  }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(unsigned, unsigned, int)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0.f ? fminf(x, 1.f) : 0.f; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
namespace emu {

// The same value, but the compiler forgets how it was computed.
inline float settled(float x) {
  asm("" : "+x"(x));
  return x;
}

}  // namespace emu

inline float __fadd_rn(float x, float y) { return emu::settled(x) + emu::settled(y); }
inline float __fsub_rn(float x, float y) { return emu::settled(x) - emu::settled(y); }
inline float __fmul_rn(float x, float y) { return emu::settled(x * y); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

// Conversions to an integer saturate, and NaN becomes 0, as on a GPU; in C++ both are undefined.
namespace emu {

inline int to_int(float rounded) {
  if (rounded != rounded) return 0;
  if (rounded >= 0x1p31f) return INT32_MAX;
  return rounded < -0x1p31f ? INT32_MIN : static_cast<int>(rounded);
}
inline unsigned to_uint(float rounded) {
  if (!(rounded > 0.f)) return 0;
  return rounded >= 0x1p32f ? UINT32_MAX : static_cast<unsigned>(rounded);
}

}  // namespace emu

inline int __float2int_rn(float x) { return emu::to_int(rintf(x)); }
inline int __float2int_rz(float x) { return emu::to_int(truncf(x)); }
inline int __float2int_rd(float x) { return emu::to_int(floorf(x)); }
inline int __float2int_ru(float x) { return emu::to_int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return emu::to_uint(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return emu::to_uint(truncf(x)); }
inline unsigned __float2uint_rd(float x) { return emu::to_uint(floorf(x)); }
inline unsigned __float2uint_ru(float x) { return emu::to_uint(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
