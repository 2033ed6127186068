// candidates.cuh - find the most probable tokens of a row without sorting it.
//
// A token's *rank* is a 64-bit number: in the upper half the bits of |(logit - peak) / temperature|,
// in the lower half its id. Ranks order tokens by falling probability and, among equals, by id; no
// two are equal. A row's kept tokens are those with a rank below some `end`.
//
// Three steps find it, each a safe bet for most rows:
// 1. The blocks' largest logits bound it: the k-th largest of them isn't above the k-th largest
//    logit. Blocks whose largest logit is past the bound are never read again.
// 2. The tokens before the bound are collected in shared memory. If they fit, a sort and a running
//    sum give the answer.
// 3. If they don't, a histogram over NUM_INTERVALS of ranks tells which of them holds the answer,
//    and step 2 is tried with that one, or step 3 again within it (a radix selection; the first
//    intervals are equally wide in log-probability, the later ones in bits of the rank).
// Probabilities are added as integers, multiples of 2^-44, so sums are the same in any order.
#pragma once
#include "block.cuh"
#include "sampling.cuh"

constexpr u32 INFINITE = 0x7f800000u;  // the size of a logit of -inf
constexpr u64 FINITE_END = static_cast<u64>(INFINITE) << 32;
constexpr int NUM_INTERVALS = LIST_CAPACITY;
static_assert((LIST_CAPACITY & (LIST_CAPACITY - 1)) == 0);

enum Amount { COUNT, MASS };

DEVICE u64 rank_of(u32 size, int id) { return static_cast<u64>(size) << 32 | static_cast<u32>(id); }
DEVICE u32 size_of(u64 rank) { return static_cast<u32>(rank >> 32); }
DEVICE u64 end_after(u32 size) { return static_cast<u64>(size + 1) << 32; }
// The probability over that of the most probable token.
DEVICE float weight_of(u64 rank) { return expf(-__uint_as_float(size_of(rank))); }
DEVICE u64 fixed_point(float weight) { return static_cast<u64>(weight * 0x1p44f); }
template <Amount AMOUNT> DEVICE u64 amount_of(u64 rank) {
  return AMOUNT == COUNT ? 1 : fixed_point(weight_of(rank));
}

// (logit - peak) / temperature.
struct Scale {
  float peak, temperature, inverse;

  DEVICE Scale(float peak, float temperature)
      : peak(peak), temperature(temperature), inverse(1.f / temperature) {}
  // The quotient is corrected by its remainder, which gives what a division gives (Markstein 1990)
  // without its branches.
  DEVICE float operator()(float x) const {
    if (x == peak) return 0.f;  // both may be infinite
    const float difference = x - peak, quotient = difference * inverse;
    if (!(quotient > -INFINITY_F)) return quotient;
    return fmaf(fmaf(-quotient, temperature, difference), inverse, quotient);
  }
  // The upper half of the rank of a token with logit x.
  DEVICE u32 size_at(float x) const { return __float_as_uint((*this)(x)) & 0x7fffffffu; }
};

struct Candidates {
  Logits logits;
  Scale scale;
  int num_blocks;  // of the vocabulary
  // Shared memory.
  u64* blocks;   // [next power of two of num_blocks] ranks of the blocks' largest logits, sorted
  u64* list;     // [LIST_CAPACITY] ranks
  u64* amounts;  // [max(LIST_CAPACITY, size of blocks)]
  u64* scratch;  // [NUM_WARPS]
  int* shared_int;
  u64* shared_rank;
  // What the list holds, sorted: all tokens of ranks from list_begin up to list_end; if listed >= 0.
  u64 list_begin, list_end;
  int listed;

  // Sort the blocks by their largest logit.
  DEVICE void rank_blocks(const float2* stats) {
    const int padded = next_power_of_two(num_blocks);
    for (int b = threadIdx.x; b < padded; b += NUM_THREADS) {
      blocks[b] = b < num_blocks ? rank_of(scale.size_at(stats[b].x), b) : ~0ull;
    }
    listed = -1;
    sort_over_block(blocks, padded);
  }

  // Call visit(block, ranks of four tokens) in each lane, warp by warp, for all blocks with a token
  // before `end`, until it returns false.
  template <class Visit> DEVICE void for_each_block(u64 end, Visit visit) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < num_blocks; i += NUM_WARPS) {
      const u64 block = blocks[i];
      if (size_of(block) > size_of(end - 1)) return;
      const int first = static_cast<int>(static_cast<u32>(block)) * BLOCK + lane * 4;
      float x[4];
      logits.load4(first, x);
      u64 ranks[4];
      for (int k = 0; k < 4; k++) ranks[k] = rank_of(scale.size_at(x[k]), first + k);
      if (!visit(static_cast<int>(static_cast<u32>(block)), ranks)) return;
    }
  }

  // Put the tokens of ranks from `begin` up to `end` into the list, sorted; false if they don't fit.
  DEVICE bool collect(u64 begin, u64 end) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    if (threadIdx.x == 0) *shared_int = 0;
    __syncthreads();
    for_each_block(end, [&](int, const u64 (&ranks)[4]) {
      u32 votes[4];
      int found = 0;
      for (int k = 0; k < 4; k++) {
        votes[k] = __ballot_sync(ALL_LANES, ranks[k] >= begin && ranks[k] < end);
        found += __popc(votes[k]);
      }
      int to = 0;
      if (lane == 0 && found) to = atomicAdd(shared_int, found);
      to = __shfl_sync(ALL_LANES, to, 0);
      for (int k = 0; k < 4; k++) {
        const int at = to + __popc(votes[k] & ((1u << lane) - 1));
        if (votes[k] >> lane & 1 && at < LIST_CAPACITY) list[at] = ranks[k];
        to += __popc(votes[k]);
      }
      return to <= LIST_CAPACITY;
    });
    __syncthreads();
    listed = *shared_int <= LIST_CAPACITY ? *shared_int : -1;
    if (listed < 0) return false;
    list_begin = begin, list_end = end;
    const int padded = next_power_of_two(listed);
    for (int i = listed + threadIdx.x; i < padded; i += NUM_THREADS) list[i] = ~0ull;
    sort_over_block(list, padded);
    return true;
  }

  // Whether the list holds all tokens before `end`.
  DEVICE bool lists_all(u64 end) const { return listed >= 0 && list_begin == 0 && end <= list_end; }

  // The rank with which the running sum of amounts, in the order of ranks, reaches `target`; that of
  // the last token if all together don't. Only tokens before `end` count.
  template <Amount AMOUNT> DEVICE u64 select(u64 target, u64 end) {
    if (lists_all(end)) return find<AMOUNT>(target, end);
    u64 begin = 0;
    bool linear = true;
    while (!collect(begin, end)) {
      narrow<AMOUNT>(begin, end, target, linear);
      linear = false;
    }
    return find<AMOUNT>(target, end);
  }

  // An end up to `end` before which the tokens' weights reach `target` for certain: the blocks'
  // largest alone do. It is `end` itself where they never do.
  DEVICE u64 bound_mass(u64 target, u64 end) {
    for (int i = threadIdx.x; i < num_blocks; i += NUM_THREADS) {
      amounts[i] = blocks[i] < end ? amount_of<MASS>(blocks[i]) : 0;
    }
    if (threadIdx.x == 0) *shared_rank = end;
    running_sum(amounts, num_blocks, scratch);
    for (int i = threadIdx.x; i < num_blocks; i += NUM_THREADS) {
      if (amounts[i] >= target && (i == 0 || amounts[i - 1] < target)) {
        *shared_rank = min_u64(end, end_after(size_of(blocks[i])));
      }
    }
    __syncthreads();
    const u64 bound = *shared_rank;
    __syncthreads();
    return bound;
  }

  // The sum of the weights of all tokens before `end`.
  DEVICE u64 mass_before(u64 end) const {
    u64 sum = 0;
    if (lists_all(end)) {
      for (int i = threadIdx.x; i < listed; i += NUM_THREADS) {
        if (list[i] < end) sum += amount_of<MASS>(list[i]);
      }
    } else {
      for_each_block(end, [&](int, const u64 (&ranks)[4]) {
        for (int k = 0; k < 4; k++) {
          if (ranks[k] < end) sum += amount_of<MASS>(ranks[k]);
        }
        return true;
      });
    }
    return sum_over_block(sum, scratch);
  }

  // sums[b]: that of block b's tokens before `end` whose weight is at least `least_weight`.
  DEVICE void sum_blocks(u64* sums, u64 end, float least_weight) const {
    for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) sums[b] = 0;
    __syncthreads();
    if (lists_all(end)) {
      for (int i = threadIdx.x; i < listed; i += NUM_THREADS) {
        const float weight = weight_of(list[i]);
        if (list[i] < end && weight >= least_weight) {
          atomicAdd(sums + static_cast<u32>(list[i]) / BLOCK, fixed_point(weight));
        }
      }
    } else {
      for_each_block(end, [&](int block, const u64 (&ranks)[4]) {
        u64 sum = 0;
        for (int k = 0; k < 4; k++) {
          const float weight = weight_of(ranks[k]);
          if (ranks[k] < end && weight >= least_weight) sum += fixed_point(weight);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        }
        if (threadIdx.x % 32 == 0) sums[block] = sum;
        return true;
      });
    }
    __syncthreads();
  }

 private:
  // select() within the list; `target` still counts what is before it by way of `narrow`.
  template <Amount AMOUNT> DEVICE u64 find(u64 target, u64 end) {
    for (int i = threadIdx.x; i < listed; i += NUM_THREADS) {
      amounts[i] = list[i] < end ? amount_of<AMOUNT>(list[i]) : 0;
    }
    if (threadIdx.x == 0) *shared_rank = end - 1;
    running_sum(amounts, listed, scratch);
    for (int i = threadIdx.x; i < listed; i += NUM_THREADS) {
      if (amounts[i] >= target && (i == 0 || amounts[i - 1] < target)) *shared_rank = list[i];
    }
    __syncthreads();
    const u64 last = *shared_rank;
    __syncthreads();
    return last;
  }

  // Replace the ranks from `begin` up to `end` by one interval of them, that in which the running
  // sum reaches `target`, and `target` by what is left of it there.
  template <Amount AMOUNT> DEVICE void narrow(u64& begin, u64& end, u64& target, bool linear) {
    int shift = 0;
    while ((end - 1 - begin) >> shift >= NUM_INTERVALS) shift++;
    const float scale = linear ? intervals_per_unit<AMOUNT>(end) : 0.f;
    u64* const sums = amounts;
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_INTERVALS; i += NUM_THREADS) sums[i] = 0;
    if (threadIdx.x == 0) *shared_int = NUM_INTERVALS - 1;
    __syncthreads();
    for_each_block(end, [&](int, const u64 (&ranks)[4]) {
      for (int k = 0; k < 4; k++) {
        if (ranks[k] < begin || ranks[k] >= end) continue;
        const u64 amount = amount_of<AMOUNT>(ranks[k]);
        const float interval = __uint_as_float(size_of(ranks[k])) * scale;
        const int i = linear ? static_cast<int>(fminf(interval, NUM_INTERVALS - 1.f))
                             : static_cast<int>((ranks[k] - begin) >> shift);
        if (amount) atomicAdd(sums + i, amount);
      }
      return true;
    });
    running_sum(sums, NUM_INTERVALS, scratch);
    for (int i = threadIdx.x; i < NUM_INTERVALS; i += NUM_THREADS) {
      if (sums[i] >= target && (i == 0 || sums[i - 1] < target)) *shared_int = i;
    }
    __syncthreads();
    const int i = *shared_int;
    if (i > 0) target -= min_u64(target, sums[i - 1]);
    if (linear) {
      // Exact, for `scale` is a power of two.
      const u64 from = static_cast<u64>(__float_as_uint(i / scale)) << 32;
      const u64 to = static_cast<u64>(__float_as_uint((i + 1) / scale)) << 32;
      begin = from > begin ? from : begin;
      if (i < NUM_INTERVALS - 1) end = min_u64(end, to);
    } else {
      begin += static_cast<u64>(i) << shift;
      end = min_u64(end, begin + (1ull << shift));
    }
    __syncthreads();  // the sums are read no more
  }

  // How finely the first histogram divides log-probability, a power of two. Its intervals reach to
  // `end`, or as far as weights count, or some times as far as the typical block's largest logit.
  template <Amount AMOUNT> DEVICE float intervals_per_unit(u64 end) const {
    const float typical = __uint_as_float(size_of(blocks[num_blocks / 2]));
    float reach = __uint_as_float(size_of(end - 1));
    if (AMOUNT == MASS) reach = fminf(reach, 31.f);  // fixed_point(exp(-31)) is 0
    if (typical > 0.f && typical < INFINITY_F) reach = fminf(reach, 8.f * typical);
    const float most = NUM_INTERVALS / fmaxf(reach, 1e-20f);
    return __uint_as_float(__float_as_uint(most) & INFINITE);
  }

  DEVICE static u64 min_u64(u64 a, u64 b) { return a < b ? a : b; }
};

// The shared memory of a row's block: its size is `shared_bytes` in gpu/kernels/sampling.py.
struct SharedParts {
  u64 *blocks, *sums, *list, *amounts, *scratch;
  int* shared_int;

  DEVICE SharedParts(unsigned char* shared, int num_blocks) {
    const int padded = next_power_of_two(num_blocks);
    scratch = reinterpret_cast<u64*>(shared);
    shared_int = reinterpret_cast<int*>(scratch + 33);
    list = scratch + 34;
    blocks = list + LIST_CAPACITY;
    amounts = blocks + padded;
    sums = amounts + max(LIST_CAPACITY, padded);
  }
  DEVICE Candidates candidates(const Logits& logits, Scale scale, int num_blocks) const {
    return {logits, scale, num_blocks, blocks, list, amounts, scratch, shared_int, scratch + 32, 0, 0, -1};
  }
};
