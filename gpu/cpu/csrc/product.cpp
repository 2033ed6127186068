#include "product.h"

#include "product_strips.h"

namespace trioserve {
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

// Activations as some kinds of weights want them besides bf16.
struct Prepared {
  float* sums = nullptr;            // [rows][inputs / 32]
  RoundedBlock* rounded = nullptr;  // [rows][inputs / 32]

  static size_t bytes(const Product& product, int64_t rows) {
    const size_t blocks = static_cast<size_t>(rows * (product.inputs / kBlock));
    return (has(product, Kind::kQ4_1) ? aligned(blocks * sizeof(float)) : 0) +
           (has(product, Kind::kW8A8) ? aligned(blocks * sizeof(RoundedBlock)) : 0);
  }

  Prepared(const Product& product, int64_t rows, uint8_t* memory) {
    const size_t blocks = static_cast<size_t>(rows * (product.inputs / kBlock));
    if (has(product, Kind::kQ4_1)) {
      sums = reinterpret_cast<float*>(memory);
      memory += aligned(blocks * sizeof(float));
    }
    if (has(product, Kind::kW8A8)) rounded = reinterpret_cast<RoundedBlock*>(memory);
  }

  void fill(const Product& product, const bf16* x, Share rows) const;
};

// The sum of 32 numbers.
float block_sum(const bf16* x) {
  return sum_of(_mm512_add_ps(load(x), load(x + 16)));
}

// To 8 bits: the largest magnitude is 127. NaN and infinity make the scale what they are.
RoundedBlock round_block(const bf16* x) {
  const __m512i both = _mm512_loadu_si512(x);
  const __m512i magnitudes = _mm512_and_si512(both, _mm512_set1_epi16(0x7fff));
  // The magnitudes of bfloat16 have the order of whole numbers, and NaN is the largest.
  const __m512i halves = _mm512_max_epu16(_mm512_srli_epi32(magnitudes, 16),
                                          _mm512_and_si512(magnitudes, _mm512_set1_epi32(0xffff)));
  const float largest = to_float(static_cast<bf16>(_mm512_reduce_max_epu32(halves)));
  RoundedBlock block;
  block.scale = largest / 127;
  // Smaller than this has no inverse, and is nothing beside any other number.
  const __m512 inverse = _mm512_set1_ps(block.scale > 1e-37f ? 1 / block.scale : 0);
  const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(load(x), inverse));
  const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + 16), inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block.numbers), _mm512_cvtsepi32_epi8(low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block.numbers + 16), _mm512_cvtsepi32_epi8(high));
  block.offset = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
  return block;
}

void Prepared::fill(const Product& product, const bf16* x, Share rows) const {
  const int64_t blocks = product.inputs / kBlock;
  for (int64_t i = rows.first * blocks; i < rows.last * blocks; ++i) {
    if (sums != nullptr) sums[i] = block_sum(x + i * kBlock);
    if (rounded != nullptr) rounded[i] = round_block(x + i * kBlock);
  }
}

// What each thread has for itself.
size_t thread_bytes(const Product& product, int64_t max_rows) {
  return Prepared::bytes(product, kOwnRows) + aligned(totals_bytes(product, max_rows)) +
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

void multiply_any(const Team& team, const Product& product, const bf16* x, int64_t rows, void* y,
                  bool to_float, void* scratch) {
  if (rows == 0) return;
  uint8_t* shared = static_cast<uint8_t*>(scratch);
  uint8_t* own = shared + Prepared::bytes(product, rows) +
                 thread_bytes(product, rows) * static_cast<size_t>(team.rank());
  const bool alone = rows <= kOwnRows;
  const Prepared prepared(product, rows, alone ? own : shared);
  prepared.fill(product, x, alone ? Share{0, rows} : team.share(rows));
  if (!alone && (prepared.sums != nullptr || prepared.rounded != nullptr)) team.barrier();

  own += Prepared::bytes(product, kOwnRows);
  float* totals = reinterpret_cast<float*>(own);
  uint8_t* panel = own + aligned(totals_bytes(product, rows));
  for (int64_t i = 0; i < product.num_segments; ++i) {
    const Segment& segment = product.segments[i];
    const bool rounds = segment.kind == Kind::kW8A8;
    const Work work = {product,
                       rounds ? static_cast<const void*>(prepared.rounded) : x,
                       rounds ? product.inputs / kBlock : product.inputs,
                       prepared.sums,
                       rows,
                       y,
                       to_float,
                       totals,
                       panel};
    multiply_strips(work, segment, share_of(team, segment), after_segment(team, product, i));
  }
}

}  // namespace

size_t multiply_scratch_bytes(const Product& product, int64_t max_rows, int threads) {
  return Prepared::bytes(product, max_rows) +
         thread_bytes(product, max_rows) * static_cast<size_t>(threads);
}

void multiply(const Team& team, const Product& product, const bf16* x, int64_t rows, bf16* y,
              void* scratch) {
  multiply_any(team, product, x, rows, y, false, scratch);
}

void multiply_float(const Team& team, const Product& product, const bf16* x, int64_t rows, float* y,
                    void* scratch) {
  multiply_any(team, product, x, rows, y, true, scratch);
}

}  // namespace trioserve
