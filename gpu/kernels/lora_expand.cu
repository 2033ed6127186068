// lora_expand - y += B t for every token that has an adapter, t = A x as lora_shrink left it.
//
// JOB. For each tile of up to 16 tokens with one adapter (see lora.cuh) and each part of the product
// that the adapter has matrices for: the tokens' t, their splits added up, times B, onto y. Sums are
// float32, and y is rounded once. For the tensor cores t is cut into two ELEMENTs, one for its upper
// bits and one for what they leave, so next to nothing of it is lost.
//
// TILING. Grid (blocks of COLUMNS outputs, part after part; tiles). Each warp has 64 columns of its
// own and nothing to do with the others. Columns are dealt to the fragments such that a lane has 8
// neighbors of y, 16 bytes; a lane loads 8 bytes of a row of B, so 8 rows of rank 16 are 256
// successive bytes. y is asked for before anything else. The grid is an upper bound: blocks behind
// the last tile, and those of parts without an update, leave after one or two loads.
//
// ROOFLINE. y once in and out, 4 bytes for each token and output; B once for each tile, from L2 from
// the second tile on: 8192 tokens and 4096 outputs are 134 MB, 31 us on an H200 at 4.3 TB/s. What
// counts in a decode step is latency, 2 us.
#include "lora.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int GROUP = 32;  // columns: 8 for each of 4 lanes
constexpr int GROUPS = 2;  // of a warp
constexpr int TILES = GROUP / 8;  // of 8 columns, in a group
static_assert(COLUMNS == NUM_WARPS * GROUP * GROUPS);

// The part of the product that a block computes.
struct Part {
  int block;             // of the part
  int outputs = 0, rank = 0;
  int first_column = 0;  // of the part, in y
  int first_rank = 0;    // of the part, in t
  i64 b;

  DEVICE Part(const Parameters& p, const Entry& entry, int of_grid) : block(of_grid), b(entry.b) {
    bool found = false;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const int blocks = (p.outputs[part] + COLUMNS - 1) / COLUMNS;
      if (!found && block < blocks) {
        found = true;
        outputs = p.outputs[part], rank = entry.ranks[part];
      } else if (!found) {
        block -= blocks;
        first_column += p.outputs[part];
        first_rank += entry.ranks[part];
        b += static_cast<i64>(p.outputs[part]) * entry.ranks[part];
      }
    }
  }
};

// t for a row and four ranks: its splits, added up in their order.
DEVICE float4 sum_splits(const float* from, i64 stride, int splits) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int split = 0; split < splits; split++) {
    const float4 part = *reinterpret_cast<const float4*>(from + split * stride);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  return sum;
}

// Two neighbors of t: the nearest ELEMENTs, and those nearest to what is left.
DEVICE void cut(float x, float y, u32& upper, u32& lower) {
  upper = pack<ELEMENT>(x, y);
  lower = pack<ELEMENT>(x - low<ELEMENT>(upper), y - high<ELEMENT>(upper));
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) lora_expand(const Parameters p) {
  const Tile tile = p.tiles[blockIdx.y];
  if (tile.count == 0) return;
  const Entry entry = p.entries[static_cast<i64>(tile.place) * p.place_entries];
  const Part part(p, entry, blockIdx.x);
  if (part.rank == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = lane / 4, chunk = lane % 4;
  const int column = part.block * COLUMNS + warp * (GROUP * GROUPS);
  if (column >= part.outputs) return;

  const i64 all_outputs = p.outputs[0] + p.outputs[1] + p.outputs[2];
  ELEMENT* y[2];
  bool there[2];
  uint4 before[2][GROUPS];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = row + 8 * half;
    there[half] = at < tile.count;
    const i64 token = there[half] ? p.tokens[tile.first + at] : 0;
    y[half] = p.y + token * all_outputs + part.first_column + column + chunk * VECTOR;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const bool in_part = column + g * GROUP + chunk * VECTOR < part.outputs;
      before[half][g] = make_uint4(0, 0, 0, 0);
      if (there[half] && in_part) before[half][g] = load16(y[half] + g * GROUP);
    }
  }

  // Fragment column n of the group's tile j is the group's column 8 (n / 2) + 2 j + n % 2.
  const int vector = row / 2 * VECTOR + row % 2;
  const ELEMENT* const b = p.places + static_cast<i64>(tile.place) * p.place_size + part.b +
                           static_cast<i64>(column + vector) * part.rank + chunk * 4;
  const int splits = (p.inputs + SPLIT - 1) / SPLIT;
  const i64 stride = static_cast<i64>(p.max_tokens) * p.rank_stride;
  const float* const t = p.partial + static_cast<i64>(tile.first + row) * p.rank_stride +
                         part.first_rank + chunk * 4;
  float sums[GROUPS][TILES][4] = {};
#pragma unroll 1
  for (int k = 0; k < part.rank; k += BLOCK) {
    uint2 of_b[GROUPS][TILES];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const bool in_part = column + g * GROUP + row / 2 * VECTOR < part.outputs;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        of_b[g][j] = make_uint2(0, 0);
        const i64 skipped = static_cast<i64>(g * GROUP + 2 * j) * part.rank;
        if (in_part) of_b[g][j] = *reinterpret_cast<const uint2*>(b + skipped + k);
      }
    }
    u32 upper[4], lower[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float4 own = make_float4(0.f, 0.f, 0.f, 0.f);
      if (there[half]) own = sum_splits(t + half * 8 * p.rank_stride + k, stride, splits);
      cut(own.x, own.y, upper[half], lower[half]);
      cut(own.z, own.w, upper[2 + half], lower[2 + half]);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        mma<ELEMENT>(sums[g][j], upper, of_b[g][j].x, of_b[g][j].y);
        mma<ELEMENT>(sums[g][j], lower, of_b[g][j].x, of_b[g][j].y);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      if (!there[half] || column + g * GROUP + chunk * VECTOR >= part.outputs) continue;
      float after[VECTOR];
      unpack8<ELEMENT>(before[half][g], after);
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        after[2 * j] += sums[g][j][2 * half];
        after[2 * j + 1] += sums[g][j][2 * half + 1];
      }
      store16(y[half] + g * GROUP, pack8<ELEMENT>(after));
    }
  }
}
