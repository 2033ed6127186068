// Attention's products by vectors.
//
// The rows of a tile are multiplied with 16 keys at a time, and their weights with 16 numbers of two
// values at a time. A sum is added up from the first pair to the last. So many are computed side by side
// that they fill the registers, for an addition waits for the one before it, and others fill the time.
#include <algorithm>
#include <array>
#include <utility>

#include "attention_products.h"
#include "extension.h"
#include "processor.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Rows and columns of sums that are computed at once. Columns of values come by two where registers are
// many, as head_dim is a multiple of 32.
inline constexpr int kRowsAtOnce = 6;
inline constexpr int kColumnsAtOnce = 4;
inline constexpr int kValueColumns = kRegisters >= 32 ? 2 : 1;
// Groups that are read with all rows before the next ones are.
inline constexpr int kGroupsAtOnce = 4;

// The columns that are computed at once with so many rows: registers hold the sums, a number of each
// column, and one of a row.
constexpr int columns_for(int rows) { return std::min(kColumnsAtOnce, (kRegisters - 1) / (rows + 1)); }

// The same columns are computed with the rows of a tile in several turns, and in each turn some of the
// columns are fetched ahead, so that memory is always at work. This is the first one; they are
// kColumns / kTurns, rounded up, and where that makes more than there are, some are fetched again.
template <int kColumns, int kTurns>
struct Ahead {
  static constexpr int count = (kColumns + kTurns - 1) / kTurns;
  static int first(int turn) { return std::min(turn * count, kColumns - count); }
};

// scores[r][g * 16 + j] = q[r] * key j of group g. A row of q is head_dim numbers, one of scores
// kKeyBlock.
template <int kRows, int kColumns, int kTurns>
void multiply_keys(const Activation* q, int head_dim, const bf16* const* groups, int turn,
                   float* scores) {
  using Fetched = Ahead<kColumns, kTurns>;
  const bf16* const* ahead = groups + kAhead + Fetched::first(turn);
  Floats sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g) sums[r][g] = zeros();
  for (int i = 0; i < head_dim / 2; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < Fetched::count; ++g) prefetch(ahead[g] + 2 * kGroup * i);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Operand keys[kColumns];
#pragma GCC unroll 8
      for (int g = 0; g < kColumns; ++g) keys[g] = weight_part(groups[g] + 2 * kGroup * i, part);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Operand number = activation_part(q + r * head_dim + 2 * i, part);
#pragma GCC unroll 8
        for (int g = 0; g < kColumns; ++g) sums[r][g] = add_products(sums[r][g], number, keys[g]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int g = 0; g < kColumns; ++g)
      store(scores + r * kKeyBlock + g * kGroup, sums[r][g]);
}

// out[r] = weights[r][k] * value k, summed over so many keys, for 16 * kColumns numbers; or if it
// `continues`, out[r] += that. A row of weights is kKeyBlock numbers, one of `out` head_dim.
template <int kRows, int kColumns, int kTurns>
void multiply_values(const Activation* weights, const bf16* const* groups, int num_keys,
                     int head_dim, bool continues, int turn, float* out) {
  using Fetched = Ahead<kColumns, kTurns>;
  const int first_ahead = Fetched::first(turn) * 2 * kLanes;
  const Lanes before = first_lanes(continues ? kLanes : 0);
  Floats sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      sums[r][c] = load(out + r * head_dim + c * kLanes, before);
  // The last value may have no other to make a pair with: what stands there isn't a number of ours.
  const auto add = [&]<bool kPair>(const bf16* values, const bf16* later, int key) {
#pragma GCC unroll 8
    for (int c = 0; c < Fetched::count; ++c) prefetch(later + first_ahead + 2 * kLanes * c);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Operand pairs[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const bf16* at = values + 2 * kLanes * c;
        pairs[c] = kPair ? weight_part(at, part) : first_weight_part(at, part);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Operand number = activation_part(weights + r * kKeyBlock + key, part);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sums[r][c] = add_products(sums[r][c], number, pairs[c]);
      }
    }
  };
  const int whole = num_keys & ~1;
  for (int key = 0; key < whole;) {
    const bf16 *values = groups[key / kGroup], *later = groups[key / kGroup + kAhead];
    const int stop = std::min(key + kGroup, whole);
    for (; key < stop; key += 2, values += 2 * head_dim, later += 2 * head_dim)
      add.template operator()<true>(values, later, key);
  }
  if (whole < num_keys) {
    const int64_t offset = int64_t{whole % kGroup} * head_dim;
    const int group = whole / kGroup;
    add.template operator()<false>(groups[group] + offset, groups[group + kAhead] + offset, whole);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      store(out + r * head_dim + c * kLanes, sums[r][c]);
}

using KeysKernel = void (*)(const Activation*, int, const bf16* const*, int, float*);
using ValuesKernel = void (*)(const Activation*, const bf16* const*, int, int, bool, int, float*);

// Null where there are no registers for so many sums.
template <int kRows, int kColumns, int kTurns>
constexpr KeysKernel keys_kernel() {
  if constexpr (kColumns <= columns_for(kRows)) return multiply_keys<kRows, kColumns, kTurns>;
  return nullptr;
}

// Null, too, where columns don't come like this.
template <int kRows, int kColumns, int kTurns>
constexpr ValuesKernel values_kernel() {
  if constexpr (kColumns <= columns_for(kRows) && kColumns % kValueColumns == 0)
    return multiply_values<kRows, kColumns, kTurns>;
  return nullptr;
}

template <int kTurns, int... kIndex>
constexpr auto keys_kernels(std::integer_sequence<int, kIndex...>) {
  return std::array<KeysKernel, sizeof...(kIndex)>{
      keys_kernel<kIndex / kColumnsAtOnce + 1, kIndex % kColumnsAtOnce + 1, kTurns>()...};
}

template <int kTurns, int... kIndex>
constexpr auto values_kernels(std::integer_sequence<int, kIndex...>) {
  return std::array<ValuesKernel, sizeof...(kIndex)>{
      values_kernel<kIndex / kColumnsAtOnce + 1, kIndex % kColumnsAtOnce + 1, kTurns>()...};
}

constexpr auto kIndexes = std::make_integer_sequence<int, kRowsAtOnce * kColumnsAtOnce>{};
// [1 turn, 2 or 3, 4 or 5][rows - 1, columns - 1]
constexpr std::array kKeysKernels{keys_kernels<1>(kIndexes), keys_kernels<2>(kIndexes),
                                  keys_kernels<4>(kIndexes)};
constexpr std::array kValuesKernels{values_kernels<1>(kIndexes), values_kernels<2>(kIndexes),
                                    values_kernels<4>(kIndexes)};

template <class Kernel, size_t kCount>
Kernel kernel_of(const std::array<std::array<Kernel, kCount>, 3>& kernels, int turns, int rows,
                 int columns) {
  return kernels[turns / 2][(rows - 1) * kColumnsAtOnce + columns - 1];
}

static_assert(kVectorRows <= 5 * kRowsAtOnce);

// What a kernel computes at a time: about equally many rows each time, with some groups.
struct Piece {
  int row, num_rows;
  int group, num_groups;
  int turn, turns;
};

// Calls `each` with every piece of so many rows and groups: some groups with all rows, before the next.
template <typename Each>
void for_pieces(int rows, int num_groups, Each each) {
  Piece piece;
  piece.turns = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int at_once = piece.turns == 1 ? kGroups : kGroupsAtOnce;
  for (piece.group = 0; piece.group < num_groups; piece.group += at_once) {
    piece.num_groups = std::min(at_once, num_groups - piece.group);
    for (piece.turn = 0; piece.turn < piece.turns; ++piece.turn) {
      piece.row = rows * piece.turn / piece.turns;
      piece.num_rows = rows * (piece.turn + 1) / piece.turns - piece.row;
      each(piece);
    }
  }
}

class VectorAttention final : public AttentionProducts {
 public:
  void multiply_keys(const Activation* q, int rows, int head_dim, const bf16* const* groups,
                     int num_groups, float* scores) const override {
    for_pieces(rows, num_groups, [&](const Piece& piece) {
      for (int group = piece.group; group < piece.group + piece.num_groups;) {
        const int left = piece.group + piece.num_groups - group;
        const int columns = std::min(columns_for(piece.num_rows), left);
        kernel_of(kKeysKernels, piece.turns, piece.num_rows, columns)(
            q + piece.row * head_dim, head_dim, groups + group, piece.turn,
            scores + piece.row * kKeyBlock + group * kGroup);
        group += columns;
      }
    });
  }

  void multiply_values(const Activation* weights, int rows, int head_dim, const bf16* const* groups,
                       int num_keys, bool continues, float* out) const override {
    for_pieces(rows, (num_keys + kGroup - 1) / kGroup, [&](const Piece& piece) {
      const int first_key = piece.group * kGroup;
      for (int number = 0; number < head_dim;) {
        const int left = (head_dim - number) / kLanes;
        const int columns = std::min(columns_for(piece.num_rows), left);
        const bf16* at[kGroups + kAhead];
        for (int group = 0; group < piece.num_groups + kAhead; ++group)
          at[group] = groups[piece.group + group] + 2 * number;
        kernel_of(kValuesKernels, piece.turns, piece.num_rows, columns)(
            weights + piece.row * kKeyBlock + first_key, at,
            std::min(piece.num_groups * kGroup, num_keys - first_key), head_dim,
            continues || piece.group > 0, piece.turn, out + piece.row * head_dim + number);
        number += columns * kLanes;
      }
    });
  }
};

constexpr VectorAttention kProducts;

}  // namespace

const AttentionProducts& kVectorAttention = kProducts;

int tile_rows() { return attention_products().tile_rows(); }

const AttentionProducts& attention_products() {
#ifdef __AVX512BF16__
  return of_extension(kVectorAttention, kAmxAttention, kEmulatedAmxAttention);
#else
  return kVectorAttention;
#endif
}

}  // namespace trioserve::TRIOSERVE_ISA
