// cuda.h - compile CUDA C++ kernels with g++ and run them on the CPU.
// One fiber per CUDA thread; fibers switch only at __syncthreads / warp collectives.
// The scheduler (emu_core.cpp) is never instrumented; this header and the kernels may be
// built with -fsanitize=address / thread / undefined.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

namespace emu {
enum Op : int { SHFL = 1, VOTE, SYNCWARP, LDMATRIX, MMA_BF16, MMA_FP16 };
struct Thread { uint3 tid, bid, bdim, gdim; int lane, warp; };
extern thread_local Thread* cur;                       // the CUDA thread now running on this OS thread
void sync_block(int id, int nthreads);                 // bar.sync id, nthreads (0 = all live threads)
int sync_block_count(int pred);
void collective(Op op, unsigned mask, void* args);     // blocks until every lane in mask arrives with the same op
void* shared_mem(int site, size_t bytes);              // one buffer per (block, site), poisoned with 0xFF
void* dyn_shared();
struct Pending { void* dst; const void* src; int group; };   // src null: zero-fill
bool cp_async_push(void* dst, const void* src);        // true: copy now (seeded coin); false: queued until a wait
void cp_async_commit_();
bool cp_async_pop(int keep_groups, Pending* out);      // next queued copy that a wait for all but keep_groups completes
[[noreturn]] void fail(const char* fmt, ...);

template <class F, F f> struct Thunk;                  // void** args (as cuLaunchKernel takes them) -> call
template <class... A, void (*f)(A...)> struct Thunk<void (*)(A...), f> {
  template <size_t... I> static void go(void** a, std::index_sequence<I...>) { f(*static_cast<std::remove_cv_t<A>*>(a[I])...); }
  static void call(void** a) { go(a, std::index_sequence_for<A...>{}); }
};

struct ShflArgs { uint64_t in, out; int src, width; };
struct VoteArgs { int pred; unsigned out; };
struct LdmArgs { uint4 row; const void* p; unsigned out[4]; int n, trans; };
struct MmaArgs { unsigned a[4], b[2]; float c[4]; };

template <class T> T shfl(unsigned mask, T v, int src, int width) {
  static_assert(sizeof(T) <= 8);
  ShflArgs s{0, 0, src, width};
  std::memcpy(&s.in, &v, sizeof(T));
  collective(SHFL, mask, &s);
  std::memcpy(&v, &s.out, sizeof(T));
  return v;
}
}  // namespace emu

#define threadIdx (emu::cur->tid)
#define blockIdx (emu::cur->bid)
#define blockDim (emu::cur->bdim)
#define gridDim (emu::cur->gdim)

inline void __syncthreads() { emu::sync_block(0, 0); }
inline int __syncthreads_or(int p) { return emu::sync_block_count(p) > 0; }
inline int __syncthreads_count(int p) { return emu::sync_block_count(p); }
inline void __syncwarp(unsigned m = ~0u) { emu::collective(emu::SYNCWARP, m, nullptr); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) { return emu::shfl(m, v, emu::cur->lane ^ x, w); }
template <class T> T __shfl_sync(unsigned m, T v, int s, int w = 32) {
  return emu::shfl(m, v, (emu::cur->lane & ~(w - 1)) | (s & (w - 1)), w);
}
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = emu::cur->lane, s = l + int(d);
  return emu::shfl(m, v, (l & (w - 1)) + int(d) < w ? s : l, w);
}
template <class T> T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = emu::cur->lane;
  return emu::shfl(m, v, (l & (w - 1)) >= int(d) ? l - int(d) : l, w);
}
inline unsigned __ballot_sync(unsigned m, int p) { emu::VoteArgs a{p, 0}; emu::collective(emu::VOTE, m, &a); return a.out; }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == m; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <class T> T atomicAdd(T* p, T v) {
  T o, n;
  __atomic_load(p, &o, __ATOMIC_RELAXED);
  do n = o + v; while (!__atomic_compare_exchange(p, &o, &n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return o;
}
inline int atomicMax(int* p, int v) { int o = *p; while (o < v && !__atomic_compare_exchange_n(p, &o, v, false, 0, 0)); return o; }
