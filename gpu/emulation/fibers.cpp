// emu_core.cpp - fiber scheduler and warp collectives. Built WITHOUT sanitizers; it tells the
// sanitizer runtimes about fibers when EMU_TSAN / EMU_ASAN is defined.
#include "cuda.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#include <sys/mman.h>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>
#ifdef EMU_TSAN
extern "C" {
void* __tsan_get_current_fiber(); void* __tsan_create_fiber(unsigned); void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned); void __tsan_acquire(void*); void __tsan_release(void*);
}
#define TSAN(x) x
#else
#define TSAN(x)
#endif
#ifdef EMU_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
}
#define ASAN(x) x
#else
#define ASAN(x)
#endif

extern "C" void emu_swap(void** save_sp, void* load_sp);   // x86-64 SysV: callee-saved registers only
asm(R"(.text
.globl emu_swap
emu_swap:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi); mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

namespace emu {
constexpr size_t STACK = 64 << 10, ARENA = 256 << 10;
struct AsyncQ { unsigned head, tail; int group; Pending q[512]; };
enum State { READY, WAIT_BLOCK, WAIT_WARP, DONE };
struct Fiber {
  Thread t; void* sp; char* stack; State st; int bar; AsyncQ aq; void* tsan; void* fake;
};
struct Coll { unsigned mask, arrived; Op op; void* args[32]; };
struct Warp { Coll c[4]; int n; };
struct Worker {
  std::vector<Fiber*> f; std::vector<int> ready; std::vector<Warp> warps;
  struct Bar { int arrived, need, count; std::vector<int> who; } bar[16];
  struct Site { int id; size_t n; void* p; };
  std::vector<Site> sites; std::vector<void*> dead, keep; char* arena; size_t used; void* dyn; size_t dyn_bytes; int nthr, live, self, order;
  uint64_t rng; void* main_sp; void* main_tsan; void* main_fake; const void* main_stack; size_t main_size;
  void (*fn)(void**); void** args; bool failed; uint64_t conflicts;
};
thread_local Thread* cur;
static thread_local Worker* W;
static std::mutex err_mu; static std::string err;

static uint64_t rnd() { uint64_t& s = W->rng; s ^= s << 13; s ^= s >> 7; s ^= s << 17; return s; }
__attribute__((noinline)) static void to_main() {
  Fiber* f = W->f[W->self];
  ASAN(__sanitizer_start_switch_fiber(f->st == DONE ? nullptr : &f->fake, W->main_stack, W->main_size));
  TSAN(__tsan_switch_to_fiber(W->main_tsan, 1));
  emu_swap(&f->sp, W->main_sp);
  ASAN(__sanitizer_finish_switch_fiber(f->fake, nullptr, nullptr));
}
void fail(const char* fmt, ...) {
  char b[512]; va_list ap; va_start(ap, fmt); vsnprintf(b, sizeof b, fmt, ap); va_end(ap);
  { std::lock_guard<std::mutex> g(err_mu);
    if (err.empty()) { char h[128]; auto& t = *cur;
      snprintf(h, sizeof h, "block (%u,%u,%u) thread %u: ", t.bid.x, t.bid.y, t.bid.z, t.tid.x); err = std::string(h) + b; } }
  W->failed = true;
  for (;;) to_main();
}
static void wake(int i) { W->f[i]->st = READY; W->ready.push_back(i); }
static void release_bar(int id) { auto& b = W->bar[id]; for (int i : b.who) wake(i); b.who.clear(); b.arrived = 0; }
void sync_block(int id, int n) {
  auto& b = W->bar[id]; int self = W->self;
  TSAN(__tsan_release(&b));
  if (b.who.empty()) b.need = n;
  else if (b.need != n) fail("bar.sync %d: thread counts differ (%d, %d)", id, b.need, n);
  b.who.push_back(self); b.arrived++;
  if (b.arrived == (n ? n : W->live)) release_bar(id);
  else W->f[self]->st = WAIT_BLOCK, W->f[self]->bar = id;
  to_main();
  TSAN(__tsan_acquire(&b));
}
int sync_block_count(int p) {
  static thread_local int slot; auto& b = W->bar[1];
  if (b.who.empty()) slot = 0;
  slot += p != 0;
  int* s = &slot; sync_block(1, 0); int v = *s; sync_block(2, 0); return v;
}
static float bf(unsigned h) { unsigned u = h << 16; float f; memcpy(&f, &u, 4); return f; }
static float hf(unsigned h) { int e = h >> 10 & 31; float f = e == 31 ? ((h & 1023) ? __builtin_nanf("") : __builtin_inff()) : e ? ldexpf(1024 + (h & 1023), e - 25) : ldexpf(h & 1023, -24); return h & 0x8000 ? -f : f; }
static void exec(Coll& c) {
  switch (c.op) {
    case SHFL:
      for (int l = 0; l < 32; l++) if (c.mask >> l & 1) { auto* a = (ShflArgs*)c.args[l]; int s = a->src & 31;
          if (!(c.mask >> s & 1)) fail("__shfl_sync: lane %d reads lane %d, which is not in mask %08x", l, s, c.mask);
          a->out = ((ShflArgs*)c.args[s])->in; } break;
    case VOTE: { unsigned b = 0;
      for (int l = 0; l < 32; l++) if (c.mask >> l & 1) b |= unsigned(((VoteArgs*)c.args[l])->pred != 0) << l;
      for (int l = 0; l < 32; l++) if (c.mask >> l & 1) ((VoteArgs*)c.args[l])->out = b; } break;
    case LDMATRIX: {                                    // PTX ISA, ldmatrix: lane l addresses row l%8 of matrix l/8
      if (c.mask != ~0u) fail("ldmatrix needs all 32 lanes");
      uint16_t m[4][8][8];
      for (int i = 0; i < ((LdmArgs*)c.args[0])->n; i++) { unsigned seen = 0;    // 8 rows of 16 bytes in one pass of 32 banks?
        for (int r = 0; r < 8; r++) seen |= 1u << ((size_t)((LdmArgs*)c.args[i * 8 + r])->p / 16 % 8);
        W->conflicts += 8 - __builtin_popcount(seen); }
      for (int l = 0; l < 32; l++) memcpy(m[l >> 3][l & 7], &((LdmArgs*)c.args[l])->row, 16);
      for (int l = 0; l < 32; l++) { auto* a = (LdmArgs*)c.args[l];
        for (int i = 0; i < a->n; i++) { int r = l >> 2, k = (l & 3) * 2;
          a->out[i] = a->trans ? m[i][k][r] | unsigned(m[i][k + 1][r]) << 16 : m[i][r][k] | unsigned(m[i][r][k + 1]) << 16; } } } break;
    case MMA_BF16: case MMA_FP16: { auto el = [&](unsigned h) { return c.op == MMA_FP16 ? hf(h) : bf(h); };                                         // PTX ISA, mma.m16n8k16 bf16 fragment layouts
      if (c.mask != ~0u) fail("mma.sync needs all 32 lanes");
      float A[16][16], B[16][8], C[16][8];
      for (int l = 0; l < 32; l++) { auto* a = (MmaArgs*)c.args[l]; int g = l >> 2, t = (l & 3) * 2;
        for (int r = 0; r < 4; r++) for (int h = 0; h < 2; h++)
          A[g + (r & 1) * 8][t + h + (r >> 1) * 8] = el(a->a[r] >> (16 * h) & 0xffff);
        for (int r = 0; r < 2; r++) for (int h = 0; h < 2; h++) B[t + h + r * 8][g] = el(a->b[r] >> (16 * h) & 0xffff);
        for (int i = 0; i < 4; i++) C[g + (i >> 1) * 8][t + (i & 1)] = a->c[i]; }
      for (int i = 0; i < 16; i++) for (int k = 0; k < 16; k++) for (int j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
      for (int l = 0; l < 32; l++) { auto* a = (MmaArgs*)c.args[l]; int g = l >> 2, t = (l & 3) * 2;
        for (int i = 0; i < 4; i++) a->c[i] = C[g + (i >> 1) * 8][t + (i & 1)]; } } break;
    case SYNCWARP: break;
  }
}
void collective(Op op, unsigned mask, void* args) {
  Warp& w = W->warps[cur->warp]; int lane = cur->lane, self = W->self, i = 0;
  if (!(mask >> lane & 1)) fail("lane %d calls a warp op with mask %08x that lacks it", lane, mask);
  for (; i < w.n && w.c[i].mask != mask; i++) if (w.c[i].mask & mask) fail("overlapping masks %08x and %08x in one warp", w.c[i].mask, mask);
  Coll& c = w.c[i];
  if (i == w.n) { if (w.n == 4) fail("too many concurrent warp ops"); w.n++; c.mask = mask; c.arrived = 0; c.op = op; }
  if (c.op != op) fail("divergent warp ops: lanes of mask %08x are in op %d and op %d", mask, c.op, op);
  c.args[lane] = args; c.arrived |= 1u << lane;
  // __shfl/vote/ldmatrix/mma order no memory (CUDA guide); only __syncwarp does.
  if (op == SYNCWARP) { TSAN(__tsan_release(&w)); }
  if (c.arrived == mask) {
    exec(c);
    int base = self - lane;
    for (int l = 0; l < 32; l++) if (mask >> l & 1) wake(base + l);
    w.c[i] = w.c[--w.n];
  } else W->f[self]->st = WAIT_WARP;
  to_main();
  if (op == SYNCWARP) { TSAN(__tsan_acquire(&w)); }
}
#ifdef EMU_TSAN   // no allocator calls inside fibers: TSan would take them for unordered writes
#define POISON(p, n)
static void* take(size_t n) { void* p = W->arena + W->used; W->used += n; if (W->used > ARENA) fail("static shared memory over %zu bytes", ARENA); return p; }
#else
#define POISON(p, n) memset(p, 0xFF, n)
static void* take(size_t n) { return aligned_alloc(128, n); }
#endif
void* shared_mem(int site, size_t n) {
  for (auto& s : W->sites) if (s.id == site) { if (s.n != n) fail("shared site %d: two sizes", site); return s.p; }
  if (W->sites.size() == 64) fail("more than 64 shared arrays");
  void* p = take((n + 127) / 128 * 128); POISON(p, n);
  W->sites.push_back({site, n, p});
  return p;
}
void* dyn_shared() { return W->dyn; }
bool cp_async_push(void* d, const void* s) {
  auto& q = W->f[W->self]->aq;
  if (rnd() & 1) return true;
  if (q.tail - q.head == 512) fail("more than 512 cp.async queued");
  q.q[q.tail++ % 512] = {d, s, q.group};
  return false;
}
void cp_async_commit_() { W->f[W->self]->aq.group++; }
bool cp_async_pop(int keep, Pending* out) {
  auto& q = W->f[W->self]->aq; auto& p = q.q[q.head % 512];
  if (q.head == q.tail || p.group >= q.group - keep) return false;
  out->dst = p.dst; out->src = p.src; q.head++;
  return true;
}

static void entry() {
  ASAN(__sanitizer_finish_switch_fiber(nullptr, &W->main_stack, &W->main_size));
  W->fn(W->args);
  Fiber* f = W->f[W->self];
  if (f->aq.head != f->aq.tail) fail("thread exits with cp.async in flight");
  TSAN(__tsan_release(&err));
  f->st = DONE; W->live--;
  for (int b = 0; b < 16; b++)                                    // exited threads no longer count in bar.sync (sm_70+)
    if (!W->bar[b].who.empty() && !W->bar[b].need && W->bar[b].arrived == W->live) release_bar(b);
  to_main(); abort();
}
static void* map(size_t n) { return mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); }
static char* map_stack() { char* s = (char*)map(STACK); mprotect(s, 4096, PROT_NONE); return s; }
static void run_block(uint3 bid, uint3 bdim, uint3 gdim) {
  int n = W->nthr; W->ready.clear(); W->live = n; W->warps.assign((n + 31) / 32, Warp{});
  for (auto& b : W->bar) b.arrived = b.need = 0, b.who.clear();
  for (auto& b : W->bar) b.who.reserve(n);
  W->ready.reserve(2 * n); W->sites.reserve(64);
#ifdef EMU_TSAN   // fresh memory per block, so that TSan sees blocks as unordered (races between blocks of one launch show)
  for (auto* f : W->f) f->stack = map_stack();
  W->arena = (char*)map(ARENA); memset(W->arena, 0xFF, ARENA); W->used = 0;
#endif
  if (W->dyn_bytes) { W->dyn = aligned_alloc(128, W->dyn_bytes + (-W->dyn_bytes & 127)); memset(W->dyn, 0xFF, W->dyn_bytes); }
  for (int i = 0; i < n; i++) {
    if ((int)W->f.size() <= i) { auto* f = (Fiber*)calloc(1, sizeof(Fiber));
      f->stack = map_stack(); W->f.push_back(f); }
    Fiber* f = W->f[i]; unsigned u = i;
    f->t = {{u % bdim.x, u / bdim.x % bdim.y, u / bdim.x / bdim.y}, bid, bdim, gdim, i & 31, i >> 5};
    f->st = READY; f->aq.head = f->aq.tail = f->aq.group = 0; f->fake = nullptr;
    void** sp = (void**)(f->stack + STACK) - 3; *--sp = (void*)entry; for (int k = 0; k < 6; k++) *--sp = nullptr;
    f->sp = sp; TSAN(f->tsan = __tsan_create_fiber(0)); W->ready.push_back(i);
  }
  while (!W->ready.empty() && !W->failed) {
    size_t k = W->order == 0 ? 0 : W->order == 1 ? W->ready.size() - 1 : rnd() % W->ready.size();
    int i = W->ready[k];
    if (W->order == 2) W->ready[k] = W->ready.back(), W->ready.pop_back(); else W->ready.erase(W->ready.begin() + k);
    W->self = i; cur = &W->f[i]->t;
    ASAN(__sanitizer_start_switch_fiber(&W->main_fake, W->f[i]->stack, STACK));
    TSAN(__tsan_switch_to_fiber(W->f[i]->tsan, 1));
    emu_swap(&W->main_sp, W->f[i]->sp);
    ASAN(__sanitizer_finish_switch_fiber(W->main_fake, nullptr, nullptr));
  }
  if (!W->failed && W->live) { int nb = 0, nw = 0; for (int i = 0; i < n; i++) nb += W->f[i]->st == WAIT_BLOCK, nw += W->f[i]->st == WAIT_WARP;
    std::lock_guard<std::mutex> g(err_mu); W->failed = true; char b[200];
    snprintf(b, sizeof b, "block (%u,%u,%u): deadlock, %d threads wait at __syncthreads, %d in warp ops", bid.x, bid.y, bid.z, nb, nw); if (err.empty()) err = b; }
  TSAN(for (int i = 0; i < n; i++) __tsan_destroy_fiber(W->f[i]->tsan));
#ifdef EMU_TSAN
  for (auto* f : W->f) munmap(f->stack, STACK);
  W->dead.push_back(W->arena); if (W->dyn_bytes) W->keep.push_back(W->dyn);
#else
  for (auto& s : W->sites) free(s.p);
  if (W->dyn_bytes) free(W->dyn);
#endif
  W->sites.clear();
}
}  // namespace emu

using namespace emu;
static std::atomic<uint64_t> conflicts;
extern "C" uint64_t emu_conflicts() { return conflicts; }   // ldmatrix bank conflicts of the last launch
extern "C" const char* emu_error() { return err.c_str(); }
// order: 0 forward, 1 reverse, 2 random (fibers and blocks) from seed. Returns 0, or -1 with emu_error().
extern "C" int emu_launch(void (*fn)(void**), const unsigned* g, const unsigned* b, size_t smem, void** args,
                          int order, uint64_t seed, int workers) {
  err.clear(); conflicts = 0;
  uint64_t nblk = uint64_t(g[0]) * g[1] * g[2]; std::vector<uint64_t> perm(nblk);
  for (uint64_t i = 0; i < nblk; i++) perm[i] = order == 1 ? nblk - 1 - i : i;
  uint64_t s = seed * 0x9E3779B97F4A7C15ull + 1;
  if (order == 2) for (uint64_t i = nblk; i > 1; i--) { s ^= s << 13; s ^= s >> 7; s ^= s << 17; std::swap(perm[i - 1], perm[s % i]); }
  std::atomic<uint64_t> next{0}; std::atomic<bool> bad{false};
  auto work = [&] {
    Worker w{}; W = &w; w.nthr = b[0] * b[1] * b[2]; w.order = order; w.fn = fn; w.args = args; w.dyn_bytes = smem;
    TSAN(w.main_tsan = __tsan_get_current_fiber());
    for (uint64_t i; !bad && (i = next++) < nblk;) { uint64_t x = perm[i]; w.rng = (seed + 1) * 0xD1B54A32D192ED03ull ^ (x + 1) * 0x9E3779B97F4A7C15ull;
      run_block({unsigned(x % g[0]), unsigned(x / g[0] % g[1]), unsigned(x / g[0] / g[1])}, {b[0], b[1], b[2]}, {g[0], g[1], g[2]});
      if (w.failed) bad = true; }
    conflicts += w.conflicts;
    TSAN(__tsan_acquire(&err));
    for (void* p : w.dead) munmap(p, ARENA);
    for (void* p : w.keep) free(p);
    for (auto* f : w.f) { if (w.dead.empty()) munmap(f->stack, STACK); free(f); }
  };
  std::vector<std::thread> th; for (int i = 1; i < workers; i++) th.emplace_back(work);
  work(); for (auto& t : th) t.join();
  return bad ? -1 : 0;
}
