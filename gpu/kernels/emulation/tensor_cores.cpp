// tensor_cores.cpp - ldmatrix and mma.m16n8k16, with the fragment layouts of the PTX ISA
// ("Warp-level matrix load instruction: ldmatrix", "Matrix Fragments for mma.m16n8k16").
#include <cmath>
#include <cstring>

#include "machine.h"

namespace emu {
namespace {

constexpr unsigned ALL_LANES = ~0u;

float from_bf16(unsigned bits) { return from_word<float>(static_cast<uint64_t>(bits) << 16); }

float from_fp16(unsigned bits) {
  const uint64_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_word<float>(sign | 0x7f800000u | (magnitude & 1023) << 13);
  // The exponents of both formats differ by 112; the product is exact, for subnormal numbers too.
  return from_word<float>(sign | magnitude << 13) * 0x1p112f;
}

// x without the bits below `unit`, a power of two.
double truncated(double x, double unit) { return std::trunc(x / unit) * unit; }

// c plus BLOCK products, as an A100's tensor cores sum them: all terms are aligned to the largest,
// of which they keep 24 bits and EXTRA_BITS more; the rest is cut off, and so are the bits of the
// sum that float32 lacks. Later tensor cores keep more bits and sum more at once. Fasi, Higham,
// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Comput. Sci. 7, 2021.
constexpr int BLOCK = 8, EXTRA_BITS = 1;
float truncated_sum(float c, const double (&products)[BLOCK]) {
  double largest = std::fabs(c), exact = c;
  for (const double product : products) {
    largest = std::fmax(largest, std::fabs(product));
    exact += product;
  }
  if (largest == 0 || !std::isfinite(exact)) return static_cast<float>(exact);
  const double unit = std::ldexp(1., std::ilogb(largest) - 23 - EXTRA_BITS);
  double sum = truncated(c, unit);
  for (const double product : products) sum += truncated(product, unit);
  const auto rounded = static_cast<float>(sum);
  if (std::fabs(rounded) <= std::fabs(sum)) return rounded;
  return std::nextafterf(rounded, 0.f);
}

}  // namespace

void load_matrices(Meeting& meeting) {
  if (meeting.mask != ALL_LANES) fail("ldmatrix needs all lanes, not %08x", meeting.mask);
  auto lane_of = [&](int lane) -> LoadMatrices& {
    return *static_cast<LoadMatrices*>(meeting.operands[lane]);
  };
  // Lane l gives row l % 8 of matrix l / 8: eight rows of 16 bytes in one pass over the 32 banks of
  // 4 bytes, unless two of them lie in the same four banks.
  uint16_t matrices[4][8][8];
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned banks = 0;
    for (int row = 0; row < 8; row++) {
      const LoadMatrices& lane = lane_of(matrix * 8 + row);
      const uintptr_t address = reinterpret_cast<uintptr_t>(lane.address);
      if (address % 16) fail("ldmatrix: an address is no multiple of 16");
      banks |= 1u << address / 16 % 8;
      std::memcpy(matrices[matrix][row], &lane.row, 16);
    }
    here->bank_conflicts += 8 - __builtin_popcount(banks);
  }
  for (int l = 0; l < WARP_SIZE; l++) {
    LoadMatrices& lane = lane_of(l);
    const int row = l / 4, column = l % 4 * 2;
    for (int matrix = 0; matrix < 4; matrix++) {
      const auto& m = matrices[matrix];
      lane.out[matrix] = lane.transposed
                             ? m[column][row] | static_cast<unsigned>(m[column + 1][row]) << 16
                             : m[row][column] | static_cast<unsigned>(m[row][column + 1]) << 16;
    }
  }
}

void multiply(Meeting& meeting, bool half) {
  if (meeting.mask != ALL_LANES) fail("mma needs all lanes, not %08x", meeting.mask);
  float a[16][16], b[16][8], c[16][8];
  auto element = [&](unsigned pair, int upper) {
    const unsigned bits = pair >> 16 * upper & 0xffff;
    return half ? from_fp16(bits) : from_bf16(bits);
  };
  for (int l = 0; l < WARP_SIZE; l++) {
    const Multiply& lane = *static_cast<Multiply*>(meeting.operands[l]);
    const int group = l / 4, pair = l % 4 * 2;
    for (int upper = 0; upper < 2; upper++) {
      for (int r = 0; r < 4; r++)
        a[group + r % 2 * 8][pair + upper + r / 2 * 8] = element(lane.a[r], upper);
      for (int r = 0; r < 2; r++) b[pair + upper + r * 8][group] = element(lane.b[r], upper);
    }
    for (int i = 0; i < 4; i++) c[group + i / 2 * 8][pair + i % 2] = lane.c[i];
  }
  auto store = [&] {
    for (int l = 0; l < WARP_SIZE; l++) {
      Multiply& lane = *static_cast<Multiply*>(meeting.operands[l]);
      for (int i = 0; i < 4; i++) lane.c[i] = c[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
    }
  };
  // Products of two 16-bit elements are exact in float32.
  if (here->launch->rough) {
    for (int row = 0; row < 16; row++)
      for (int column = 0; column < 8; column++)
        for (int first = 0; first < 16; first += BLOCK) {
          double products[BLOCK];
          for (int k = 0; k < BLOCK; k++)
            products[k] = static_cast<double>(a[row][first + k]) * b[first + k][column];
          c[row][column] = truncated_sum(c[row][column], products);
        }
    return store();
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
  store();
}

}  // namespace emu
