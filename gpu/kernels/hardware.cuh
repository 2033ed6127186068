// hardware.cuh - everything that differs between a GPU and the CPU emulation, and nothing else.
//
// Kernels include this file and no CUDA header. Each hardware instruction that CUDA C++ has no
// operator for stands behind one named function with two bodies: PTX for NVRTC, and plain C++ over
// gpu/kernels/emulation/cuda.h for g++. Everything else in a .cu file is the same text for both
// compilers.
//
// Element types are structs around their bits, so that no conversion happens unseen:
//   bf16   1 sign, 8 exponent, 7 fraction bits
//   fp16   IEEE binary16
//   e4m3   1 sign, 4 exponent, 3 fraction bits, no infinity, largest 448 (OCP FP8 E4M3)
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };
struct e4m3 { u8 bits; };

#ifdef EMULATED
#define DEVICE inline
#define SHARED(T, name, n) T* name = static_cast<T*>(emu::shared_array(__COUNTER__, sizeof(T) * (n)))
#define DYNAMIC_SHARED(name) unsigned char* name = static_cast<unsigned char*>(emu::dynamic_shared())
#define INFINITY_F __builtin_inff()
#else
#define DEVICE __device__ __forceinline__
#define SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define INFINITY_F __int_as_float(0x7f800000)
#endif

constexpr u32 ALL_LANES = 0xffffffffu;

// ---- numbers ------------------------------------------------------------------------------------

#ifdef EMULATED
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE float to_float(fp16 x) {
  const u32 sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = fraction * 0x1p-24f;
  return sign ? -tiny : tiny;
}
DEVICE bf16 to_bf16(float x) {
  const u32 u = __float_as_uint(x);
  return {static_cast<u16>(x != x ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}
DEVICE fp16 to_fp16(float x) {
  const u32 u = __float_as_uint(x), sign = u >> 16 & 0x8000u;
  if (x != x) return {0x7fff};
  const float size = fabsf(x);
  if (size >= 65520.f) return {static_cast<u16>(sign | 0x7c00u)};
  if (size < 0x1p-14f) return {static_cast<u16>(sign | static_cast<u32>(rintf(size * 0x1p24f)))};
  const u32 v = u & 0x7fffffffu;
  return {static_cast<u16>(sign | (((v + 0xfffu + (v >> 13 & 1)) >> 13) - (112u << 10)))};
}
#else
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE float to_float(fp16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEVICE bf16 to_bf16(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
DEVICE fp16 to_fp16(float x) { fp16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
#endif

#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
DEVICE float to_float(e4m3 x) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(x.bits)));
  return to_float(fp16{static_cast<u16>(pair)});
}
DEVICE e4m3 to_e4m3(float x) {  // saturates at 448
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
  return {static_cast<u8>(pair)};
}
#else  // sm_80 has no e4m3, so its conversions are the emulation's too, and proven there
DEVICE float to_float(e4m3 x) {  // the exponent is moved into a half's, which is 8 larger
  const u16 half = static_cast<u16>((x.bits & 0x80u) << 8 | (x.bits & 0x7fu) << 7);
  return (x.bits & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : to_float(fp16{half}) * 256.f;
}
DEVICE e4m3 to_e4m3(float x) {
  const u32 sign = __float_as_uint(x) >> 24 & 0x80u;
  if (x != x) return {0x7f};
  const float size = fminf(fabsf(x), 448.f);
  // Adding 2^(e - 3) * 1.5 * 2^23 rounds to a multiple of 2^(e - 3), e the exponent of the result.
  const u32 exponent = max(__float_as_uint(size) >> 23, 121u);
  const float magic = __uint_as_float((exponent + 20) << 23) * 1.5f;
  const float rounded = __fadd_rn(__fadd_rn(size, magic), -magic);
  const u32 bits = __float_as_uint(rounded);
  const u32 code = rounded < 0.015625f ? static_cast<u32>(rounded * 512.f) : (bits >> 20) - (120u << 3);
  return {static_cast<u8>(sign | code)};
}
#endif

// from_float<T>: round to the nearest T, ties to even.
template <class T> DEVICE T from_float(float x);
template <> DEVICE bf16 from_float<bf16>(float x) { return to_bf16(x); }
template <> DEVICE fp16 from_float<fp16>(float x) { return to_fp16(x); }
template <> DEVICE e4m3 from_float<e4m3>(float x) { return to_e4m3(x); }
template <> DEVICE float from_float<float>(float x) { return x; }
DEVICE float to_float(float x) { return x; }

// Two 16-bit elements in a register: the lower one in the lower half, as tensor cores want them.
template <class T> DEVICE float low(u32 pair) { return to_float(T{static_cast<u16>(pair)}); }
template <class T> DEVICE float high(u32 pair) { return to_float(T{static_cast<u16>(pair >> 16)}); }
template <class T> DEVICE u32 pack(float lower, float upper);
#ifdef EMULATED
template <> DEVICE u32 pack<bf16>(float lower, float upper) { return to_bf16(lower).bits | static_cast<u32>(to_bf16(upper).bits) << 16; }
template <> DEVICE u32 pack<fp16>(float lower, float upper) { return to_fp16(lower).bits | static_cast<u32>(to_fp16(upper).bits) << 16; }
#else
template <> DEVICE u32 pack<bf16>(float lower, float upper) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower)); return r; }
template <> DEVICE u32 pack<fp16>(float lower, float upper) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower)); return r; }
#endif

// ---- arithmetic ---------------------------------------------------------------------------------

#ifdef EMULATED
DEVICE float exp2_approx(float x) {
  const float y = exp2f(emu::flushed(x));
  return x == 0.f ? y : emu::approximated(y, x);  // 2^0 is exact on a GPU
}
DEVICE float log2_approx(float x) { return emu::approximated_log(log2f(emu::flushed(x)), x); }
DEVICE float rsqrt_approx(float x) { return emu::approximated(1.f / sqrtf(emu::flushed(x)), x); }
DEVICE float reciprocal_approx(float x) { return emu::approximated(1.f / emu::flushed(x), x); }
#else
DEVICE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_approx(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rsqrt_approx(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif

// ---- threads ------------------------------------------------------------------------------------

// threadIdx.x, read anew by every call: what is computed from it before a long loop and again after
// it is not kept in registers in between.
#ifdef EMULATED
DEVICE int reread_thread_index() { return threadIdx.x; }
#else
DEVICE int reread_thread_index() { int x; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x)); return x; }
#endif

// ---- memory -------------------------------------------------------------------------------------

#ifdef EMULATED
// 16 bytes that are read once: they pass the first-level cache by.
DEVICE uint4 load_once16(const void* from) { return *static_cast<const uint4*>(from); }
// A word that other threads change at the same time, by atomics.
DEVICE u32 load_relaxed(const u32* from) {
  emu::interleave();
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
// An address in shared memory as the hardware counts it, plus bytes. Sums of these fold into the
// instructions' own offsets, which sums of ordinary pointers don't.
typedef unsigned char* SharedAddress;
DEVICE SharedAddress shared_address(void* p) { return static_cast<SharedAddress>(p); }
// The address with some bits flipped.
DEVICE SharedAddress flip_bits(SharedAddress p, u32 bits) {
  return reinterpret_cast<SharedAddress>(reinterpret_cast<u64>(p) ^ bits);
}
DEVICE void emulated_copy16(void* to, const void* from) {
  *static_cast<uint4*>(to) = from ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
}
// Start copying 16 bytes from global to shared memory; zeros are written instead where !valid.
DEVICE void copy_async16(void* shared, const void* global, bool valid) {
  const void* from = valid ? global : nullptr;
  if (emu::copy_lands_now(shared, from)) emulated_copy16(shared, from);
}
// Close the group of copies started since the last one.
DEVICE void copy_async_commit() { emu::close_copy_group(); }
// Wait until at most KEEP of this thread's groups are unfinished. A barrier must follow before
// another thread's copies are read.
template <int KEEP> DEVICE void copy_async_wait() {
  emu::Copy copy;
  while (emu::next_finished_copy(KEEP, &copy)) emulated_copy16(copy.to, copy.from);
}
#else
DEVICE uint4 load_once16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
DEVICE u32 load_relaxed(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
typedef u32 SharedAddress;
DEVICE SharedAddress shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
DEVICE SharedAddress flip_bits(SharedAddress p, u32 bits) { return p ^ bits; }
DEVICE void copy_async16(SharedAddress shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy_async16(void* shared, const void* global, bool valid) { copy_async16(shared_address(shared), global, valid); }
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int KEEP> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory"); }
#endif

// ---- tensor cores -------------------------------------------------------------------------------
// Fragment layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix":
//   A 16x16  lane l holds rows l/4 and l/4 + 8, columns 2 (l % 4) + {0, 1} and those + 8
//   B 16x8   lane l holds column l/4, rows 2 (l % 4) + {0, 1} and those + 8
//   C 16x8   lane l holds rows l/4 (c[0], c[1]) and l/4 + 8 (c[2], c[3]), columns 2 (l % 4) + {0, 1}

#ifdef EMULATED
DEVICE void emulated_ldmatrix(u32 (&r)[4], const void* row, bool transposed) {
  emu::LoadMatrices operands{*static_cast<const uint4*>(row), row, transposed, {}};
  emu::meet(emu::WarpOp::load_matrices, ALL_LANES, &operands);
  for (int i = 0; i < 4; i++) r[i] = operands.out[i];
}
// Four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16
// bytes in shared memory) and gets in r[i] two neighbours of row l / 4 of matrix i.
DEVICE void ldmatrix(u32 (&r)[4], const void* row) { emulated_ldmatrix(r, row, false); }
// The same, each matrix transposed.
DEVICE void ldmatrix_transposed(u32 (&r)[4], const void* row) { emulated_ldmatrix(r, row, true); }
// c += a b, a 16x16, b 16x8, products of T summed in float32.
template <class T> DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
DEVICE void emulated_mma(emu::WarpOp op, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::Multiply operands{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  emu::meet(op, ALL_LANES, &operands);
  for (int i = 0; i < 4; i++) c[i] = operands.c[i];
}
template <> DEVICE void mma<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulated_mma(emu::WarpOp::multiply_bf16, c, a, b0, b1);
}
template <> DEVICE void mma<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulated_mma(emu::WarpOp::multiply_fp16, c, a, b0, b1);
}
// c = a b: the first of a chain of mma, which needs no zeros in registers to start from.
template <class T> DEVICE void mma_first(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  for (int i = 0; i < 4; i++) c[i] = 0.f;
  mma<T>(c, a, b0, b1);
}
#else
DEVICE void ldmatrix(u32 (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
DEVICE void ldmatrix(u32 (&r)[4], const void* row) { ldmatrix(r, shared_address(row)); }
DEVICE void ldmatrix_transposed(u32 (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
DEVICE void ldmatrix_transposed(u32 (&r)[4], const void* row) { ldmatrix_transposed(r, shared_address(row)); }
template <class T> DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void mma<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void mma<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T> DEVICE void mma_first(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void mma_first<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
template <> DEVICE void mma_first<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
#endif

template <class T> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<fp16> = true;

// Four e4m3 of a register become two registers of packed T; exact, for T has more bits.
template <class T> DEVICE void unpack_e4m3x4(u32 four, u32& first, u32& second) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
  u32 a, b;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(a), "=r"(b) : "r"(four));
  if constexpr (IS_HALF<T>) {
    first = a; second = b;
  } else {
    first = pack<T>(low<fp16>(a), high<fp16>(a));
    second = pack<T>(low<fp16>(b), high<fp16>(b));
  }
#else
  first = pack<T>(to_float(e4m3{static_cast<u8>(four)}), to_float(e4m3{static_cast<u8>(four >> 8)}));
  second = pack<T>(to_float(e4m3{static_cast<u8>(four >> 16)}), to_float(e4m3{static_cast<u8>(four >> 24)}));
#endif
}

// Four floats become the e4m3 of a register, the first in the lowest byte; 448 is the largest.
DEVICE u32 pack_e4m3x4(float x0, float x1, float x2, float x3) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
  u32 four;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(four) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return four;
#else
  return to_e4m3(x0).bits | to_e4m3(x1).bits << 8 | to_e4m3(x2).bits << 16 |
         static_cast<u32>(to_e4m3(x3).bits) << 24;
#endif
}

// Bytes 0, 2, 1, 3 of x: of two pairs, the firsts and then the seconds.
DEVICE u32 swap_middle_bytes(u32 x) {
#ifdef EMULATED
  return (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x & 0xff00u) << 8;
#else
  u32 y;
  asm("prmt.b32 %0, %1, 0, 0x3120;" : "=r"(y) : "r"(x));
  return y;
#endif
}

// The same value, but the compiler forgets how it was computed: what is added to it later becomes
// the immediate offset of each access, where it would else be folded into separate addresses.
#ifdef EMULATED
DEVICE u32 settled(u32 x) { return x; }
DEVICE const u8* settled(const u8* x) { return x; }
#else
DEVICE u32 settled(u32 x) { asm("" : "+r"(x)); return x; }
DEVICE const u8* settled(const u8* x) { asm("" : "+l"(x)); return x; }
#endif
