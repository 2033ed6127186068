#include "product.h"

#include "product_strips.h"

namespace trioserve::TRIOSERVE_ISA {
namespace {

// Up to so many rows every thread prepares the activations for itself: that is sooner done than the
// others are waited for.
constexpr int64_t kOwnRows = 2;

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool has(const Product& product, Kind kind) {
  for (int64_t i = 0; i < product.num_segments; ++i)
    if (product.segments[i].kind == kind) return true;
  return false;
}

// Activations as weights of some kinds want them, one behind the other; null where none does.
struct Prepared {
  Activation* widened = nullptr;    // [rows][inputs], where that isn't bf16
  float* sums = nullptr;            // [rows][inputs / 32]
  RoundedBlock* rounded = nullptr;  // [rows][inputs / 32]
  size_t bytes = 0;                 // of all

  Prepared(const Product& product, int64_t rows, uint8_t* memory) {
    const int64_t blocks = rows * (product.inputs / kBlock);
    const auto take = [&]<class T>(bool wanted, int64_t count, T*& taken) {
      if (!wanted) return;
      taken = reinterpret_cast<T*>(memory + bytes);
      bytes += aligned(static_cast<size_t>(count) * sizeof(T));
    };
    const bool rounds = has(product, Kind::kW8A8);
    take(!kMultipliesPairs && !(rounds && product.num_segments == 1), blocks * kBlock, widened);
    take(has(product, Kind::kQ4_1), blocks, sums);
    take(rounds, blocks, rounded);
  }

  static size_t bytes_for(const Product& product, int64_t rows) {
    return Prepared(product, rows, nullptr).bytes;
  }

  // Rows of x as weights of a kind read them.
  const void* rows_for(Kind kind, const bf16* x) const {
    if (kind == Kind::kW8A8) return rounded;
    if constexpr (kMultipliesPairs) return x;
    return widened;
  }

  void fill(const Product& product, const bf16* x, Share rows) const;
};

// The sum of 32 numbers.
float block_sum(const bf16* x) { return sum_of(load(x) + load(x + 16)); }

// To 8 bits: the largest magnitude is 127. NaN and infinity make the scale what they are.
RoundedBlock round_block(const bf16* x) {
  const Floats low = load(x), high = load(x + 16);
  // The magnitudes of numbers have the order of whole numbers, and NaN is the largest.
  const Ints magnitude = broadcast(0x7fffffff);
  const Ints magnitudes = max(and_of(bits_of(low), magnitude), and_of(bits_of(high), magnitude));
  const float largest = first_of(of_bits(broadcast(largest_of(magnitudes))));
  RoundedBlock block;
  block.scale = largest / 127;
  // Smaller than this has no inverse, and is nothing beside any other number.
  const Floats inverse = broadcast(block.scale > 1e-37f ? 1 / block.scale : 0);
  const Ints low_numbers = nearest_ints(low * inverse), high_numbers = nearest_ints(high * inverse);
  block.numbers.set(low_numbers, high_numbers);
  block.offset = -kExcess * sum_of(add(low_numbers, high_numbers));
  return block;
}

void Prepared::fill(const Product& product, const bf16* x, Share rows) const {
  const int64_t blocks = product.inputs / kBlock;
  for (int64_t i = rows.first * blocks; i < rows.last * blocks; ++i) {
    if (widened != nullptr) to_activations(x + i * kBlock, kBlock, widened + i * kBlock);
    if (sums != nullptr) sums[i] = block_sum(x + i * kBlock);
    if (rounded != nullptr) rounded[i] = round_block(x + i * kBlock);
  }
}

// What each thread has for itself.
size_t thread_bytes(const Product& product, int64_t max_rows) {
  return Prepared::bytes_for(product, kOwnRows) + aligned(totals_bytes(product, max_rows)) +
         aligned(panel_bytes(product));
}

Share share_of(const Team& team, const Segment& segment) {
  return team.share((segment.outputs + kStrip - 1) / kStrip);
}

// What this thread reads after segment `i` of a product.
Region after_segment(const Team& team, const Product& product, int64_t i) {
  const bool in_next = i + 1 == product.num_segments;
  const Product* of = in_next ? product.next : &product;
  if (of == nullptr || of->num_segments == 0) return {};
  const Segment& segment = of->segments[in_next ? 0 : i + 1];
  return first_region(segment, of->inputs, share_of(team, segment));
}

// Results of slice i of the inputs, if there are several, begin i * stride floats behind those of slice 0.
void multiply_any(const Team& team, const Product& product, const bf16* x, int64_t rows, void* y,
                  Results results, void* scratch, int64_t slices = 1, int64_t stride = 0) {
  if (rows == 0) return;
  uint8_t* shared = static_cast<uint8_t*>(scratch);
  uint8_t* own = shared + Prepared::bytes_for(product, rows) +
                 thread_bytes(product, rows) * static_cast<size_t>(team.rank());
  const bool alone = rows <= kOwnRows;
  const Prepared prepared(product, rows, alone ? own : shared);
  prepared.fill(product, x, alone ? Share{0, rows} : team.share(rows));
  if (!alone && prepared.bytes > 0) team.barrier();

  own += Prepared::bytes_for(product, kOwnRows);
  float* totals = reinterpret_cast<float*>(own);
  uint8_t* panel = own + aligned(totals_bytes(product, rows));
  const int64_t segments = results == Results::kGated ? 1 : product.num_segments;
  const int64_t blocks = product.inputs / kBlock;
  for (int64_t i = 0; i < segments; ++i) {
    const Segment& segment = product.segments[i];
    const bool rounds = segment.kind == Kind::kW8A8;
    const Work work = {product,
                       prepared.rows_for(segment.kind, x),
                       rounds ? blocks : product.inputs,
                       prepared.sums,
                       rows,
                       blocks / slices,
                       stride,
                       y,
                       results,
                       totals,
                       panel};
    const Region upcoming =
        after_segment(team, product, i + 1 == segments ? product.num_segments - 1 : i);
    multiply_strips(work, segment, share_of(team, segment), upcoming);
  }
}

}  // namespace

size_t multiply_scratch_bytes(const Product& product, int64_t max_rows, int threads) {
  if (product.num_segments == 0) return 0;  // another rank or stage has it
  return Prepared::bytes_for(product, max_rows) +
         thread_bytes(product, max_rows) * static_cast<size_t>(threads);
}

void multiply(const Team& team, const Product& product, const bf16* x, int64_t rows, bf16* y,
              void* scratch) {
  multiply_any(team, product, x, rows, y, Results::kRounded, scratch);
}

void multiply_float(const Team& team, const Product& product, const bf16* x, int64_t rows, float* y,
                    void* scratch) {
  multiply_any(team, product, x, rows, y, Results::kFloat, scratch);
}

void multiply_slices(const Team& team, const Product& product, const bf16* x, int64_t rows,
                     int64_t slices, float* y, int64_t stride, void* scratch) {
  multiply_any(team, product, x, rows, y, Results::kSlices, scratch, slices, stride);
}

bool is_gated(const Product& product, int64_t rows) {
  const Segment &gate = product.segments[0], &up = product.segments[1];
  return product.num_segments == 2 && product.bias == nullptr && gate.outputs == up.outputs &&
         gate.outputs % kStrip == 0 && gate.kind == Kind::kBf16 && up.kind == Kind::kBf16 &&
         tile_kernels().takes_two_weights(rows);
}

void multiply_gated(const Team& team, const Product& product, const bf16* x, int64_t rows, bf16* y,
                    void* scratch) {
  multiply_any(team, product, x, rows, y, Results::kGated, scratch);
}

}  // namespace trioserve::TRIOSERVE_ISA
