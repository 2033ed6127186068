// Attention's products on a matrix unit. Nothing but where bfloat16 is multiplied by AVX-512 otherwise.
//
// The groups of keys and of values are the unit's weights as they stand in the cache. A sum goes through
// its numbers 32 at a time for a score, and 16 at a time for a value, which are the keys of one group: so
// no bit depends on where the keys that several queries share end.
#ifdef __AVX512BF16__

#include <algorithm>

#include "attention_products.h"
#include "matrix_unit.h"
#include "processor.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Registers 0 to 3 hold sums. Queries and keys come 32 numbers at a time, weights and values 16.
inline constexpr int kSums = 4, kQueries = 4, kWeights = 5, kKeys = 6, kValues = 7;
inline constexpr int kNumbersAtOnce = 32;
// Groups of values that are read with all rows before the next ones are.
inline constexpr int kValueGroupsAtOnce = 8;

template <class Function>
[[gnu::always_inline]] inline void for_each_sum(Function f) {
  f.template operator()<0>();
  f.template operator()<1>();
  f.template operator()<2>();
  f.template operator()<3>();
}

// The rows of a product in equal turns where that goes, since another number of rows costs the unit about
// 200 cycles (Intel's optimization manual, LDTILECFG).
struct Turns {
  int count;

  explicit Turns(int rows) : count((rows + kUnitRows - 1) / kUnitRows) {
    if (rows % count != 0 && rows % (count + 1) == 0) ++count;
  }
  int first(int turn, int rows) const { return rows * turn / count; }
};

template <class Unit>
class MatrixAttention final : public AttentionProducts {
 public:
  int tile_rows() const override { return kTileRows; }

  unsigned begin() const override {
    const unsigned before = float_control();
    set_float_control(without_small_numbers(before));
    shaped_for = 0;
    return before;
  }

  void end(unsigned before) const override {
    set_float_control(before);
    Unit::end();
  }

  void multiply_keys(const Activation* q, int rows, int head_dim, const bf16* const* groups,
                     int num_groups, float* scores) const override {
    const Turns turns(rows);
    for (int group = 0; group < num_groups; group += kSums) {
      const int count = std::min(kSums, num_groups - group);
      for (int turn = 0; turn < turns.count; ++turn) {
        const int row = turns.first(turn, rows);
        shape_for(turns.first(turn + 1, rows) - row);
        const auto multiply = turn == 0 ? multiply_keys_at_once<true> : multiply_keys_at_once<false>;
        multiply(q + row * head_dim, head_dim, groups + group, count,
                 scores + row * kKeyBlock + group * kGroup);
      }
    }
  }

  void multiply_values(const Activation* weights, int rows, int head_dim, const bf16* const* groups,
                       int num_keys, bool continues, float* out) const override {
    const Turns turns(rows);
    alignas(64) bf16 last[kGroup * 256];
    const int num_groups = (num_keys + kGroup - 1) / kGroup;
    for (int first = 0; first < num_groups; first += kValueGroupsAtOnce) {
      const bf16* at[kValueGroupsAtOnce + kAhead];
      const int count = std::min(kValueGroupsAtOnce, num_groups - first);
      std::copy_n(groups + first, count + kAhead, at);
      if (first + count == num_groups && num_keys % kGroup != 0)
        at[count - 1] = copy_values(at[count - 1], num_keys % kGroup, head_dim, last);
      for (int turn = 0; turn < turns.count; ++turn) {
        const int row = turns.first(turn, rows);
        shape_for(turns.first(turn + 1, rows) - row);
        const auto multiply =
            turn == 0 ? multiply_values_at_once<true> : multiply_values_at_once<false>;
        for (int number = 0; number < head_dim; number += kSums * kGroup)
          multiply(weights + row * kKeyBlock + first * kGroup, at, count, number, head_dim,
                   continues || first > 0, out + row * head_dim + number);
      }
    }
  }

 private:
  // Rows that this thread's registers have the shape for; 0: none.
  static inline thread_local int shaped_for;

  static void shape_for(int rows) {
    if (rows == shaped_for) return;
    UnitShape shape;
    for (int tile = 0; tile < kSums; ++tile) shape.set(tile, rows, kGroup * sizeof(float));
    shape.set(kQueries, rows, kNumbersAtOnce * sizeof(bf16));
    shape.set(kWeights, rows, kGroup * sizeof(bf16));
    shape.set(kKeys, kNumbersAtOnce / 2, 2 * kGroup * sizeof(bf16));
    shape.set(kValues, kGroup / 2, 2 * kGroup * sizeof(bf16));
    Unit::begin(shape);
    shaped_for = rows;
  }

  // Asks for a register's lines of a later group. As many are asked for as are read at a time, since the
  // processor waits where more are under way than it can keep.
  template <int Lines>
  [[gnu::always_inline]] static void fetch(const bf16* from, int64_t stride) {
#pragma GCC unroll 16
    for (int line = 0; line < Lines; ++line) prefetch(from + line * stride);
  }

  // The first values of a group, with zeros in the place of the others.
  static const bf16* copy_values(const bf16* from, int count, int head_dim, bf16* to) {
    const int whole = count / 2 * 2 * head_dim;
    std::memcpy(to, from, whole * sizeof(bf16));
    std::memset(to + whole, 0, (kGroup * head_dim - whole) * sizeof(bf16));
    if (count % 2 != 0)
      for (int i = whole; i < whole + 2 * head_dim; i += 2) to[i] = from[i];
    return to;
  }

  // The scores of up to four groups. Fetches their successors if need be.
  template <bool kFetches>
  static void multiply_keys_at_once(const Activation* q, int head_dim, const bf16* const* groups,
                                    int count, float* scores) {
    for_each_sum([]<int S>() __attribute__((always_inline)) { Unit::template clear<S>(); });
    for (int number = 0; number < head_dim; number += kNumbersAtOnce) {
      Unit::template load<kQueries>(q + number, head_dim * sizeof(bf16));
      for_each_sum([&]<int S>() __attribute__((always_inline)) {
        if (S >= count) return;
        Unit::template load<kKeys>(groups[S] + number * kGroup, 2 * kGroup * sizeof(bf16));
        if (kFetches) fetch<kNumbersAtOnce / 2>(groups[S + kAhead] + number * kGroup, 2 * kGroup);
        Unit::template multiply_bf16<S, kQueries, kKeys>();
      });
    }
    for_each_sum([&]<int S>() __attribute__((always_inline)) {
      if (S < count) Unit::template store<S>(scores + S * kGroup, kKeyBlock * sizeof(float));
    });
  }

  // Up to 64 numbers of the values, from `number` on.
  template <bool kFetches>
  static void multiply_values_at_once(const Activation* weights, const bf16* const* groups, int count,
                                      int number, int head_dim, bool continues, float* out) {
    const int64_t row_bytes = head_dim * sizeof(float);
    const int columns = std::min(kSums, (head_dim - number) / kGroup);
    for_each_sum([&]<int S>() __attribute__((always_inline)) {
      if (S >= columns) return;
      if (continues)
        Unit::template load<S>(out + S * kGroup, row_bytes);
      else
        Unit::template clear<S>();
    });
    for (int group = 0; group < count; ++group) {
      Unit::template load<kWeights>(weights + group * kGroup, kKeyBlock * sizeof(bf16));
      for_each_sum([&]<int S>() __attribute__((always_inline)) {
        if (S >= columns) return;
        Unit::template load<kValues>(groups[group] + 2 * (number + S * kGroup),
                                     2 * head_dim * sizeof(bf16));
        if (kFetches)
          fetch<kGroup / 2>(groups[group + kAhead] + 2 * (number + S * kGroup), 2 * head_dim);
        Unit::template multiply_bf16<S, kWeights, kValues>();
      });
    }
    for_each_sum([&]<int S>() __attribute__((always_inline)) {
      if (S < columns) Unit::template store<S>(out + S * kGroup, row_bytes);
    });
  }
};

constexpr MatrixAttention<AmxUnit> kAmx;
constexpr MatrixAttention<EmulatedUnit> kEmulated;

}  // namespace

const AttentionProducts &kAmxAttention = kAmx, &kEmulatedAmxAttention = kEmulated;

}  // namespace trioserve::TRIOSERVE_ISA

#endif
