// candidates.cuh - find the most probable tokens of a row without sorting it.
//
// A token's *rank* is a 64-bit number: in the upper half the bits of |(logit - peak) /
// temperature|, its *size*; in the lower half its id. Ranks order tokens by falling probability
// and, among equals, by id; no two are equal. A row's kept tokens are those with a rank below some
// `end`.
//
// Three steps find it, each a safe bet for most rows:
// 1. The blocks' largest logits bound it: the k-th largest of them isn't above the k-th largest
//    logit; and top_p's share is mostly in the blocks that together hold so much. Blocks with
//    their largest logit past the bound are not read.
// 2. The tokens before the bound are collected in shared memory. If they fit, a sort and a running
//    sum give the answer.
// 3. If they don't, a histogram over NUM_INTERVALS of ranks tells which of them holds the answer,
//    and step 2 is tried with that one, or step 3 again within it (a radix selection). The first
//    intervals are equally wide in log-probability, the later ones in bits of the rank.
// Masses are added as integers, multiples of 2^-44, or in a fixed order: sums are always the same.
#pragma once
#include "block.cuh"
#include "sampling.cuh"
#include "vectors.cuh"

constexpr u32 INFINITE = 0x7f800000u;  // the size of a logit of -inf
constexpr int NUM_INTERVALS = LIST_CAPACITY;
constexpr int READ_AHEAD = 3;
static_assert((LIST_CAPACITY & (LIST_CAPACITY - 1)) == 0);

DEVICE u64 rank_of(u32 size, int id) { return static_cast<u64>(size) << 32 | static_cast<u32>(id); }
DEVICE u32 size_of(u64 rank) { return static_cast<u32>(rank >> 32); }
DEVICE u32 id_of(u64 rank) { return static_cast<u32>(rank); }
DEVICE u64 first_rank(u32 size) { return static_cast<u64>(size) << 32; }
DEVICE u64 end_after(u32 size) { return first_rank(size + 1); }
constexpr u64 FINITE_END = static_cast<u64>(INFINITE) << 32;

// The probability over that of the most probable token.
DEVICE float weight_of_size(u32 size) { return exp2_approx(-LOG2_E * __uint_as_float(size)); }
DEVICE float weight_of(u64 rank) { return weight_of_size(size_of(rank)); }
DEVICE u64 fixed_point(float weight) { return static_cast<u64>(weight * 0x1p44f); }
constexpr float FIXED_POINT_UNIT = 0x1p-44f;
DEVICE u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// What is added up in the order of ranks: tokens, or their weights.
enum Amount { TOKENS, MASS };
DEVICE u64 amount_of(Amount amount, u64 rank) {
  return amount == TOKENS ? 1 : fixed_point(weight_of(rank));
}

// (logit - peak) / temperature.
struct Scale {
  float peak, temperature, inverse;

  // Divisions stand here without their rare branches, which would cost registers everywhere: one
  // Newton step makes an exact enough inverse, and the remainder corrects the quotient (Markstein
  // 1990).
  DEVICE Scale(float peak, float temperature) : peak(peak), temperature(temperature) {
    const float estimate = reciprocal_approx(temperature);
    inverse = fmaf(fmaf(-temperature, estimate, 1.f), estimate, estimate);
  }
  DEVICE float operator()(float x) const {
    if (x == peak) return 0.f;  // both may be infinite
    const float difference = x - peak, quotient = difference * inverse;
    if (!(quotient > -INFINITY_F)) return quotient;
    return fmaf(fmaf(-quotient, temperature, difference), inverse, quotient);
  }
  DEVICE u32 size_at(float x) const { return __float_as_uint((*this)(x)) & 0x7fffffffu; }
};

struct Candidates {
  Logits logits;
  Scale scale;
  int num_blocks;  // of the vocabulary
  // Shared memory.
  u64* blocks;   // [next power of two of num_blocks] ranks of the blocks' largest logits, sorted
  u64* sums;     // [num_blocks] mass of each block's tokens before list_begin
  u64* list;     // [LIST_CAPACITY] ranks
  u64* amounts;  // [max(LIST_CAPACITY, size of blocks)]
  u64* scratch;  // [NUM_WARPS]
  int* shared_int;
  // The list holds, sorted, the `listed` tokens of ranks from list_begin up to list_end; -1:
  // nothing.
  u64 list_begin, list_end;
  int listed;

  // Sort the blocks by their largest logit.
  DEVICE void rank_blocks(const float2* stats) {
    const int padded = next_power_of_two(num_blocks);
    for (int b = threadIdx.x; b < padded; b += NUM_THREADS) {
      blocks[b] = b < num_blocks ? rank_of(scale.size_at(stats[b].x), b) : ~0ull;
    }
    sort_over_block(blocks, padded);
  }

  // An end that the `count` first tokens are before for certain, `end` at most: after the count-th
  // of the blocks' largest logits.
  DEVICE u64 bound_tokens(int count, u64 end) const {
    return count <= num_blocks ? end_after_block(count - 1, end) : end;
  }

  // An end before which the mass probably reaches `target`: after twice as many blocks as together
  // hold so much. sums[] must be those of whole blocks.
  DEVICE u64 guess_mass(u64 target, u64 end) {
    for (int i = threadIdx.x; i < num_blocks; i += NUM_THREADS) amounts[i] = sums[id_of(blocks[i])];
    const int enough = 2 * first_to_reach(target, num_blocks) + 8;
    return enough < num_blocks ? end_after_block(enough, end) : end;
  }

  // Whether the list holds every token before `end`.
  DEVICE bool lists_all(u64 end) const { return listed >= 0 && list_begin == 0 && end <= list_end; }

  // Put the tokens of ranks from `begin` up to `end` into the list, sorted, and the masses of those
  // before `begin` into sums[]; false if the list is too short.
  DEVICE bool collect(u64 begin, u64 end) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    if (threadIdx.x == 0) *shared_int = 0;
    for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) sums[b] = 0;
    __syncthreads();
    for_each_block(end, [&](int block, int first, const u32 (&sizes)[4]) {
      u32 votes[4];
      int found = 0;
      for (int k = 0; k < 4; k++) {
        const u64 rank = rank_of(sizes[k], first + k);
        votes[k] = __ballot_sync(ALL_LANES, rank >= begin && rank < end);
        found += __popc(votes[k]);
      }
      int to = 0;
      if (found) {
        if (lane == 0) to = atomicAdd(shared_int, found);
        to = __shfl_sync(ALL_LANES, to, 0);
        for (int k = 0; k < 4; k++) {
          const int at = to + __popc(votes[k] & ((1u << lane) - 1));
          if (votes[k] >> lane & 1 && at < LIST_CAPACITY) list[at] = rank_of(sizes[k], first + k);
          to += __popc(votes[k]);
        }
      }
      if (begin == 0) return to <= LIST_CAPACITY;
      float mass = 0.f;
      for (int k = 0; k < 4; k++) {
        mass += rank_of(sizes[k], first + k) < begin ? weight_of_size(sizes[k]) : 0.f;
      }
      mass = sum_over_lanes<32>(mass);
      if (lane == 0) sums[block] = fixed_point(mass);
      return true;
    });
    __syncthreads();
    listed = *shared_int <= LIST_CAPACITY ? *shared_int : -1;
    list_begin = begin, list_end = end;
    if (listed < 0) return false;
    const int padded = next_power_of_two(listed);
    for (int i = listed + threadIdx.x; i < padded; i += NUM_THREADS) list[i] = ~0ull;
    sort_over_block(list, padded);
    return true;
  }

  // The rank with which the running sum over the tokens before `end` reaches `target`; end - 1 if
  // it never does. It is looked for before `guess` first.
  DEVICE u64 select(Amount amount, u64 target, u64 end, u64 guess) {
    u64 begin = 0;
    bool linear = true;
    while (true) {
      if (lists_all(guess) || collect(begin, guess)) {
        for (int i = threadIdx.x; i < listed; i += NUM_THREADS) {
          amounts[i] = list[i] < guess ? amount_of(amount, list[i]) : 0;
        }
        const int found = first_to_reach(target, listed);
        if (found < listed) return list[found];
        if (guess == end) return end - 1;
      } else if (guess == end) {
        narrow(amount, linear, target, begin, end);
        linear = false;
      }
      guess = end;
    }
  }

  // sums[b] becomes the mass of block b's tokens before `end`. Returns that of all.
  DEVICE u64 sum_blocks(u64 end) {
    if (listed < 0 || end < list_begin || end > list_end) collect(end, end);
    if (list_begin == 0) {  // the last call may have added to them
      for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) sums[b] = 0;
      __syncthreads();
    }
    for (int i = threadIdx.x; i < listed; i += NUM_THREADS) {
      if (list[i] < end) add(sums + id_of(list[i]) / BLOCK, amount_of(MASS, list[i]));
    }
    __syncthreads();
    u64 sum = 0;
    for (int b = threadIdx.x; b < num_blocks; b += NUM_THREADS) sum += sums[b];
    return sum_over_block(sum, scratch);
  }

 private:
  // Call visit(block, first, sizes of the tokens from `first` on) in each lane, warp by warp, for
  // the blocks with a token before `end`, until it returns false. A warp always meets the same
  // blocks in the same order, and has READ_AHEAD of them on the way while it works on one.
  template <class Visit> DEVICE void for_each_block(u64 end, Visit visit) const {
    const int start = threadIdx.x / 32;
    const auto begins_before_end = [&](int i) {
      return i < num_blocks && size_of(blocks[i]) <= size_of(end - 1);
    };
    const auto first_of = [&](int i) {
      return static_cast<int>(id_of(blocks[i])) * BLOCK + static_cast<int>(threadIdx.x) % 32 * 4;
    };
    float ahead[READ_AHEAD][4];
    for (int a = 0; a < READ_AHEAD; a++) {
      const int i = start + a * NUM_WARPS;
      if (begins_before_end(i)) logits.load4(first_of(i), ahead[a]);
    }
#pragma unroll 1
    for (int i = start; begins_before_end(i); i += NUM_WARPS) {
      logits.shift4(first_of(i), ahead[0]);
      u32 sizes[4];
      for (int k = 0; k < 4; k++) sizes[k] = scale.size_at(ahead[0][k]);
      for (int a = 0; a + 1 < READ_AHEAD; a++) {
        for (int k = 0; k < 4; k++) ahead[a][k] = ahead[a + 1][k];
      }
      const int later = i + READ_AHEAD * NUM_WARPS;
      if (begins_before_end(later)) logits.load4(first_of(later), ahead[READ_AHEAD - 1]);
      if (!visit(static_cast<int>(id_of(blocks[i])), first_of(i), sizes)) return;
    }
  }

  // Replace the ranks from `begin` up to `end` by one interval of them, that in which the running
  // sum reaches `target`, and `target` by what is left of it there. `linear` is for begin 0.
  DEVICE void narrow(Amount amount, bool linear, u64& target, u64& begin, u64& end) {
    int shift = 0;
    while ((end - 1 - begin) >> shift >= NUM_INTERVALS) shift++;
    const float per_unit = intervals_per_unit(amount, end);
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_INTERVALS; i += NUM_THREADS) amounts[i] = 0;
    __syncthreads();
    for_each_block(end, [&](int, int first, const u32 (&sizes)[4]) {
      for (int k = 0; k < 4; k++) {
        const u64 rank = rank_of(sizes[k], first + k);
        if (rank < begin || rank >= end) continue;
        const float interval = __uint_as_float(sizes[k]) * per_unit;
        const int i = linear ? static_cast<int>(fminf(interval, NUM_INTERVALS - 1.f))
                             : static_cast<int>((rank - begin) >> shift);
        add(amounts + i, amount_of(amount, rank));
      }
      return true;
    });
    const int i = min(first_to_reach(target, NUM_INTERVALS), NUM_INTERVALS - 1);
    if (i > 0) target -= smaller(target, amounts[i - 1]);
    if (linear) {
      // 1 / per_unit, a power of two: the products are exact.
      const float unit = __uint_as_float((254u << 23) - __float_as_uint(per_unit));
      begin = first_rank(__float_as_uint(i * unit));
      if (i < NUM_INTERVALS - 1) end = smaller(end, first_rank(__float_as_uint((i + 1) * unit)));
    } else {
      begin += static_cast<u64>(i) << shift;
      end = smaller(end, begin + (1ull << shift));
    }
  }

  // How finely the first histogram divides log-probability, a power of two. Its intervals reach to
  // `end`, or as far as weights count, or some times as far as the typical block's largest logit.
  DEVICE float intervals_per_unit(Amount amount, u64 end) const {
    const float typical = __uint_as_float(size_of(blocks[num_blocks / 2]));
    float reach = __uint_as_float(size_of(end - 1));
    if (amount == MASS) reach = fminf(reach, 31.f);  // fixed_point(exp(-31)) is 0
    if (typical > 0.f && typical < INFINITY_F) reach = fminf(reach, 8.f * typical);
    const float most = NUM_INTERVALS * reciprocal_approx(fmaxf(reach, 1e-20f));
    return __uint_as_float(__float_as_uint(most) & INFINITE);
  }

  // The first i where amounts[0] + ... + amounts[i] is at least `target`; n if there is none.
  // amounts[] become running sums.
  DEVICE int first_to_reach(u64 target, int n) {
    __syncthreads();
    if (threadIdx.x == 0) *shared_int = n;
    running_sum(amounts, n, scratch);
    for (int i = threadIdx.x; i < n; i += NUM_THREADS) {
      if (amounts[i] >= target && (i == 0 || amounts[i - 1] < target)) *shared_int = i;
    }
    __syncthreads();
    return *shared_int;
  }

  // After the i-th of the blocks' largest logits, at most `end`.
  DEVICE u64 end_after_block(int i, u64 end) const {
    const u32 size = size_of(blocks[i]);
    return size < INFINITE ? smaller(end, end_after(size)) : end;
  }

  // *sum += amount, in shared memory: in two words, for there is no 64-bit addition. The order of
  // additions doesn't matter; the sum is whole after a barrier.
  DEVICE static void add(u64* sum, u64 amount) {
    u32* const words = reinterpret_cast<u32*>(sum);
    const u32 low = static_cast<u32>(amount);
    const u32 old = atomicAdd(words, low);
    const u32 high = static_cast<u32>(amount >> 32) + (old + low < old);
    if (high) atomicAdd(words + 1, high);
  }
};

// The shared memory of a row's block: its size is `shared_bytes` in gpu/kernels/sampling.py.
struct SharedParts {
  u64 *blocks, *sums, *list, *amounts, *scratch;
  int* shared_int;

  DEVICE SharedParts(unsigned char* shared, int num_blocks) {
    const int padded = next_power_of_two(num_blocks);
    scratch = reinterpret_cast<u64*>(shared);
    shared_int = reinterpret_cast<int*>(scratch + 32);
    list = scratch + 34;
    blocks = list + LIST_CAPACITY;
    amounts = blocks + padded;
    sums = amounts + max(LIST_CAPACITY, padded);
  }
  DEVICE Candidates candidates(const Logits& logits, const Scale& scale, int num_blocks) const {
    return {logits, scale,   num_blocks, blocks, sums, list, amounts,
            scratch, shared_int, 0,      0,      -1};
  }
};
