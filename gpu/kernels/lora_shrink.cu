// lora_shrink - A x of every token that has an adapter, in parts over the inputs.
//
// JOB. For each tile of up to 16 tokens with one adapter (see lora.cuh), all of A that the adapter
// has for this product, its parts one behind the other, times the tokens' rows of x. Sums are
// float32. lora_expand adds the splits up.
//
// TILING. Grid (tiles, blocks of 16 ranks, splits of SPLIT inputs). The four warps of a block have a
// quarter of its inputs each, and their sums meet in shared memory, in the order of the warps. A lane
// loads 16 bytes of two rows of x and of two rows of A; 8 neighbors along the inputs stand in for
// the fragments' scattered ones, in x and A alike, so that no shared memory comes in between. A warp
// has all loads of UNROLL * 32 inputs under way at once. The grid is an upper bound: blocks behind
// the last tile or the adapter's last rank leave after one or two loads.
//
// ROOFLINE. A once for each tile: 2 * rank * inputs bytes. Adapters of rank 16 over 4096 inputs are
// 131 KB, from L2 from the second tile on; what counts in a decode step is latency, 2 us.
//
// Method: SGMV of Punica (Chen et al. 2023, arXiv:2310.18547), its segments cut into tiles.
#include "lora.cuh"

constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int OF_WARP = SPLIT / NUM_WARPS;
constexpr int STEP = 32;  // inputs: 8 for each of 4 lanes
constexpr int UNROLL = 4;
static_assert(OF_WARP % (STEP * UNROLL) == 0 && NUM_THREADS * 2 == TILE * BLOCK);

extern "C" __global__ void __launch_bounds__(NUM_THREADS) lora_shrink(const Parameters p) {
  const Tile tile = p.tiles[blockIdx.x];
  if (tile.count == 0) return;
  const Entry entry = p.entries[static_cast<i64>(tile.place) * p.place_entries];
  const int first_rank = blockIdx.y * BLOCK;
  if (first_rank >= entry.ranks[0] + entry.ranks[1] + entry.ranks[2]) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = lane / 4, chunk = lane % 4;
  const ELEMENT* x[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = row + 8 * half;
    there[half] = at < tile.count;
    const i64 token = there[half] ? p.tokens[tile.first + at] : 0;
    x[half] = p.x + token * p.inputs;
  }
  const ELEMENT* const a = p.places + static_cast<i64>(tile.place) * p.place_size + entry.a +
                           static_cast<i64>(first_rank + row) * p.inputs;
  const i64 eight_rows = static_cast<i64>(8) * p.inputs;

  float sums[2][4] = {};
  const int begin = blockIdx.z * SPLIT + warp * OF_WARP;
  const int end = min(begin + OF_WARP, p.inputs);
#pragma unroll 1
  for (int start = begin; start < end; start += STEP * UNROLL) {
    uint4 of_x[UNROLL][2], of_a[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int at = start + u * STEP + chunk * VECTOR;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        of_x[u][half] = of_a[u][half] = make_uint4(0, 0, 0, 0);
        if (at < end) {
          of_a[u][half] = load16(a + half * eight_rows + at);
          if (there[half]) of_x[u][half] = load16(x[half] + at);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 first[4] = {of_x[u][0].x, of_x[u][1].x, of_x[u][0].y, of_x[u][1].y};
      const u32 second[4] = {of_x[u][0].z, of_x[u][1].z, of_x[u][0].w, of_x[u][1].w};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        mma<ELEMENT>(sums[half], first, of_a[u][half].x, of_a[u][half].y);
        mma<ELEMENT>(sums[half], second, of_a[u][half].z, of_a[u][half].w);
      }
    }
  }

  SHARED(float, of_warps, NUM_WARPS * TILE * BLOCK);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float* const to = of_warps + (warp * TILE + row) * BLOCK + half * 8 + chunk * 2;
    to[0] = sums[half][0], to[1] = sums[half][1];
    to[8 * BLOCK] = sums[half][2], to[8 * BLOCK + 1] = sums[half][3];
  }
  __syncthreads();
  const int own = threadIdx.x * 2 / BLOCK, rank = threadIdx.x * 2 % BLOCK;
  if (own >= tile.count) return;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int w = 0; w < NUM_WARPS; w++) {
    sum.x += of_warps[(w * TILE + own) * BLOCK + rank];
    sum.y += of_warps[(w * TILE + own) * BLOCK + rank + 1];
  }
  const i64 place = static_cast<i64>(blockIdx.z) * p.max_tokens + tile.first + own;
  *reinterpret_cast<float2*>(p.partial + place * p.rank_stride + first_rank + rank) = sum;
}
