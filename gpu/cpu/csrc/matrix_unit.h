// The matrix unit of Intel's processors (AMX): eight registers, each a tile of up to 16 rows of 64 bytes.
//
// One instruction multiplies 16 rows of 32 activations by 32 rows of weights, 16 outputs each, and adds
// the products to a tile of sums. In bfloat16 a sum's even and odd inputs are added up apart, each in
// float32 and in order, and then both to the sum; numbers below the normal ones count as 0 (Intel,
// Architecture Instruction Set Extensions, TDPBF16PS). Sums of products of bytes are exact (TDPBSUD).
// EmulatedUnit computes the same bits: those of bfloat16 in a thread that takes such numbers for 0.
#pragma once

#include <cstdint>
#include <cstring>

#include "dots.h"
#include "operands.h"

namespace trioserve::TRIOSERVE_ISA {

inline constexpr int kUnitRows = 16, kUnitTiles = 8;

// How many rows each register has, and how many bytes a row has.
struct alignas(64) UnitShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t row_count, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(row_count);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// Registers are named by constants. Assembly in place of the compiler's own functions: those need options
// that would let the compiler use these instructions in every function of the file.
struct AmxUnit {
  static void begin(const UnitShape& shape) {
    asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
  }
  static void end() { asm volatile("tilerelease" ::: "memory"); }

  template <int Tile>
  static void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  template <int Tile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  // Sums += x · weights, in bfloat16.
  template <int Sums, int X, int Weights>
  static void multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weights));
  }
  // The same of bytes, signed and unsigned ones, with sums of 32 bits.
  template <int Sums, int X, int Weights>
  static void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weights));
  }
};

inline void add_to(float* sums, Floats x) { store(sums, load(sums) + x); }

struct EmulatedUnit {
  static void begin(const UnitShape& shape) {
    state.shape = shape;
    std::memset(state.tiles, 0, sizeof state.tiles);
  }
  static void end() { state.shape = {}; }

  template <int Tile>
  static void clear() {
    std::memset(state.tiles[Tile], 0, sizeof state.tiles[Tile]);
  }
  template <int Tile>
  static void load(const void* from, int64_t stride) {
    clear<Tile>();
    for (int row = 0; row < state.shape.rows[Tile]; ++row)
      std::memcpy(state.tiles[Tile][row], static_cast<const char*>(from) + row * stride,
                  state.shape.row_bytes[Tile]);
  }
  template <int Tile>
  static void store(void* to, int64_t stride) {
    for (int row = 0; row < state.shape.rows[Tile]; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, state.tiles[Tile][row],
                  state.shape.row_bytes[Tile]);
  }
  template <int Sums, int X, int Weights>
  static void multiply_bf16() {
    check_shapes(Sums, X, Weights);
    for (int row = 0; row < state.shape.rows[Sums]; ++row) {
      Floats even = zeros(), odd = zeros();
      for (int pair = 0; pair < state.shape.rows[Weights]; ++pair) {
        const Operand x = activation_part(reinterpret_cast<const bf16*>(state.tiles[X][row] + pair * 4), 0);
        const Operand weights = load_operand(state.tiles[Weights][pair]);
        even = fma(first_of_pairs(x), first_of_pairs(weights), even);
        odd = fma(second_of_pairs(x), second_of_pairs(weights), odd);
      }
      add_to(reinterpret_cast<float*>(state.tiles[Sums][row]), even + odd);
    }
  }
  template <int Sums, int X, int Weights>
  static void multiply_bytes() {
    check_shapes(Sums, X, Weights);
    for (int row = 0; row < state.shape.rows[Sums]; ++row) {
      const auto& x = reinterpret_cast<const RoundedNumbers&>(state.tiles[X][row]);
      Ints sums = load_ints(state.tiles[Sums][row]);
      for (int quad = 0; quad < state.shape.rows[Weights]; ++quad)
        sums = WideDots::add(sums, WideDots::weights(state.tiles[Weights][quad], 0), WideDots::activations(x, quad, 0));
      std::memcpy(state.tiles[Sums][row], &sums, sizeof sums);
    }
  }

 private:
  // The unit faults at registers whose shapes don't fit, or that have none.
  static void check_shapes(int sums, int x, int weights) {
    const UnitShape& shape = state.shape;
    if (shape.rows[sums] == 0 || shape.rows[sums] != shape.rows[x] ||
        shape.row_bytes[x] != shape.rows[weights] * 4 || shape.row_bytes[sums] != shape.row_bytes[weights])
      __builtin_trap();
  }

  struct State {
    alignas(64) uint8_t tiles[kUnitTiles][kUnitRows][64];
    UnitShape shape;
  };
  static inline thread_local State state;
};

}  // namespace trioserve::TRIOSERVE_ISA
