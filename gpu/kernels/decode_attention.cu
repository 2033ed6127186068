// decode_attention - attention of one query token per sequence over its paged keys and values.
//
// JOB. A decode step has one new token for each row of the batch. A work item {row, begin, end,
// partial} asks for the attention of that row's query over positions begin .. end - 1 of its
// sequence; block (kv head, item) answers it for the `group` query heads that share the KV head.
// An item that covers its whole row (partial = -1) writes `out`; the items of a row that was split
// ("split-K", so that few long rows fill the GPU too) write partial results, which
// combine_partials.cu merges.
//
// LAYOUTS
//   q             [rows, num_heads, D], rows q_stride elements apart (the queries inside qkv)
//   k/v_cache     [num_pages, num_kv_heads, page_size, D], page_size 16, 32 or 64
//   k/v_scale     [num_pages, num_kv_heads, page_size] float32, for an e4m3 cache:
//                 value = e4m3 * scale of its token and head
//   block_tables  [num_slots, table_stride]: position t of row r is token t % page_size of page
//                 block_tables[slots[r]][t / page_size]
//   out           [rows, num_heads, D]
//   partial_out   [num_partials, num_heads, D] float32, each normalized on its own
//   partial_lse   [num_partials, num_heads] float32, log2 of the sum of 2^(score * scale * log2 e)
// Grid (num_kv_heads, up to max_items): heads go fastest, so that blocks that start together read
// neighboring memory, and items go in their order, the long ones first. A block with an index
// past *num_items returns at once; where the grid is smaller than *num_items, blocks take several.
//
// TILING. Q of the group fills the 16 rows of mma.m16n8k16 (rows past the group are zero, and
// wasted: there are far more tensor cores than bytes). The warps of a block take tiles of 16
// positions in turn, and each warp is on its own until the end:
//
//        positions      begin ............................................ end
//        tiles of 16    | w0 | w1 | w2 | w3 | w0 | w1 | w2 | w3 | w0 | w1 |
//
//        one warp       K tile --ldmatrix--> S = Q K^T --> online softmax --> P
//                       V tile --ldmatrix.trans--------------> O += P V
//
// A tile is aligned to 16 positions, so it lies in one page and is one run of 16 D elements; its
// page id comes out of a register that holds the next 32 of the warp, loaded 32 tiles ahead. Tiles
// arrive by cp.async in a ring of STAGES tiles that belongs to the warp, K and V waited for (and
// refilled) apart, so there is no barrier in the loop but __syncwarp. Rows of 16-byte chunks are
// stored with the chunk number XORed by a function of the row, so that ldmatrix has no bank
// conflict at any head size (see swizzled). At the end the warps merge through shared memory.
//
// Positions outside begin .. end - 1 of an edge tile are filled with zeros and masked: unwritten
// memory is never read.
//
// AN e4m3 CACHE is unpacked in registers, after ldmatrix: half the bytes in the ring mean twice the
// positions in flight, and shared memory is read once. Unpacking while staging would take a pass
// through registers and a second buffer. ldmatrix moves pairs of bytes as if they were 16-bit
// elements, so a lane gets four neighbors along D of a key where the mma wants two and two: the
// dot product doesn't care in which order it runs over D, so Q is loaded in the same order. For V
// the two bytes of a pair belong to neighboring columns, and one byte permutation sorts them to
// two output tiles. The tensor cores then run in fp16, whatever TYPE is, because the hardware
// converts e4m3 to fp16 in one instruction and e4m3 fits in it exactly; bf16 queries are moved into
// fp16's range by a power of two. The scale of a key multiplies its score. The scale of a value
// multiplies its weight, and the running maximum is taken over score + log2(value's scale), so that
// the weights that go to the tensor core are at most 1.
//
// ROOFLINE. Bytes: 2 D sizeof(CACHE) for each position and KV head, once (and 8 for the scales of
// e4m3); the rest is small: partial results, group * D * 4 bytes written and read for each item.
// Flops: 4 * 16 * D for each position and KV head, the idle rows included: 16 a byte, 32 with e4m3,
// a tenth or a fifth of what the tensor cores could do meanwhile. Bytes decide, and to keep them
// coming takes, on an H200 (132 multiprocessors, 4.3 TB/s, 0.8 us of latency under load):
//   in flight         3.4 MB = 26 KB on each multiprocessor; three blocks of 60 to 74 KB of ring,
//                     always full but for the tiles being computed, keep 150 KB and more
//   instructions      D = 128: 300 of a warp for a whole tile of 8 KB, every 440 clocks in which a
//                     multiprocessor can issue 1,760: 17%; 384 for the 4 KB of e4m3: 44%
//   shared memory     a tile written once and read once: 130 of those 440 clocks
//   before the rows   item and count -> slot -> page ids -> first tile: four latencies in a row
// Expected, with combine_partials and without the gap between two kernels, 32 heads, 8 KV heads,
// D = 128, bf16, to be held against a measurement:
//   rows x context    cache       at 4.3 TB/s    expected    items (each times 8 heads)
//    1 x  1,024         4 MB         1.0 us         6 us     16 of 64: latencies, not bytes
//    8 x  1,024        34 MB         7.8 us        13 us     48 of 176
//    8 x 16,384       537 MB         125 us       135 us     48 of 2,736
//   32 x  8,192     1,074 MB         250 us       268 us     32, not split
// With an e4m3 cache the last two take 0.53 times as long.
//
// READING ORDER. decode_tiles.cuh: a tile, and its way to shared memory. decode_products.cuh: the
// two products. decode_softmax.cuh: what is between them. Then here: the merge of the warps
// (write_result), the loop over the tiles (attend), and the items of a block.
//
// Method: flash-decoding (Dao et al. 2023, "Flash-Decoding for long-context inference"), online
// softmax (Milakov and Gimelshein 2018), paged KV (Kwon et al. 2023, PagedAttention).
#include "decode_softmax.cuh"

struct __align__(16) Item {
  int row, begin, end, partial;
};

struct Parameters {
  const TYPE* q;
  const u8* k_cache;
  const u8* v_cache;
  const float* k_scale;
  const float* v_scale;
  const int* block_tables;
  const int* slots;
  const Item* items;
  const int* num_items;
  TYPE* out;
  float* partial_out;
  float* partial_lse;
  i64 q_stride;
  int table_stride;
  int num_heads;
  int group;
  int page_shift;
  float scale_log2;  // softmax scale * log2 e
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

static_assert(RING_BYTES + QUERY_BYTES == SHARED_BYTES);
constexpr int BLOCKS_PER_MULTIPROCESSOR = 3;
// Rows of the merge buffer: the accumulators of a quarter or half warp fall into distinct banks.
constexpr int MERGE_STRIDE = D % 32 ? D + 8 : D + (QUANTIZED ? 16 : 8);
static_assert(RING_BYTES >= WARPS * 16 * MERGE_STRIDE * 4);

// Merge the results of the warps and write them.
DEVICE void write_result(const Parameters& p, const Item& item, Sums& sums, u8* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* outputs = reinterpret_cast<float*>(shared);  // [WARPS][16][MERGE_STRIDE]
  SHARED(float, tops, WARPS * 16);
  SHARED(float, weights, WARPS * 16);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sums.weight[h] += __shfl_xor_sync(ALL_LANES, sums.weight[h], 1);
    sums.weight[h] += __shfl_xor_sync(ALL_LANES, sums.weight[h], 2);
  }
  __syncthreads();  // the other warps have read their last tile
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = lane / 4 + 8 * h;
    if (row < p.group) {
      float* to = outputs + (warp * 16 + row) * MERGE_STRIDE;
#pragma unroll
      for (int c = 0; c < D / 16; c++) {
        const float(&even)[4] = sums.output[2 * c], (&odd)[4] = sums.output[2 * c + 1];
        if constexpr (QUANTIZED) {
          *reinterpret_cast<float4*>(to + 16 * c + lane % 4 * 4) =
              make_float4(even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]);
        } else {
          float2* pair = reinterpret_cast<float2*>(to + 16 * c + lane % 4 * 2);
          pair[0] = make_float2(even[2 * h], even[2 * h + 1]);
          pair[4] = make_float2(odd[2 * h], odd[2 * h + 1]);
        }
      }
      if (lane % 4 == 0) {
        tops[warp * 16 + row] = sums.top[h];
        weights[warp * 16 + row] = sums.weight[h];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.group * (D / 4); i += NUM_THREADS) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    float top = tops[row];
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w * 16 + row]);
    float weight = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {  // a warp without a tile has top = -inf: a factor of 0
      const float factor = exp2_approx(tops[w * 16 + row] - top);
      const float4 o =
          *reinterpret_cast<const float4*>(outputs + (w * 16 + row) * MERGE_STRIDE + column);
      weight += weights[w * 16 + row] * factor;
      sum.x += o.x * factor;
      sum.y += o.y * factor;
      sum.z += o.z * factor;
      sum.w += o.w * factor;
    }
    const float inverse = 1.f / weight;
    const int head = blockIdx.x * p.group + row;
    if (item.partial < 0) {
      const i64 at = (static_cast<i64>(item.row) * p.num_heads + head) * D + column;
      *reinterpret_cast<uint2*>(p.out + at) = uint2{pack<TYPE>(sum.x * inverse, sum.y * inverse),
                                                    pack<TYPE>(sum.z * inverse, sum.w * inverse)};
    } else {
      const i64 at = static_cast<i64>(item.partial) * p.num_heads + head;
      *reinterpret_cast<float4*>(p.partial_out + at * D + column) =
          make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
      if (column == 0) p.partial_lse[at] = top + log2_approx(weight);
    }
  }
}

DEVICE void attend(const Parameters& p, const Item& item, u8* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x;
  const int* table = p.block_tables + static_cast<i64>(p.slots[item.row]) * p.table_stride;
  const int begin = item.begin, end = item.end;
  // The warp's ring of stages (offsets in shared memory): K, V, and their scales.
  const u32 ring = warp * (STAGES * STAGE_BYTES), last_stage = ring + (STAGES - 1) * STAGE_BYTES;

  // This warp's tile j starts at position start + j * STEP.
  const int start = begin / TILE * TILE + warp * TILE;
  const int num_tiles = start < end ? (end - start + STEP - 1) / STEP : 0;
  auto load_page_ids = [&](int tile) {  // a lane's own of 32
    const int position = start + (tile + lane) * STEP;
    return position < end ? table[position >> p.page_shift] : 0;
  };
  u32 queries[D / 16][4];
  load_queries(queries, p.q + item.row * p.q_stride + head * p.group * D, p.group);
  int page_ids = load_page_ids(0), next_page_ids = load_page_ids(32);

  // The tile that is being copied; copy_keys, then copy_values, for one tile after the other.
  u32 location = 0;  // index of its first token, over all pages and KV heads (below 4 billion)
  u32 to_copy = 0;   // its valid rows
  auto copy_keys = [&](int tile, u32 stage) {
    if (tile < num_tiles) {
      if (tile && tile % 32 == 0) {
        page_ids = next_page_ids;
        next_page_ids = load_page_ids(tile + 32);
      }
      const u32 page = __shfl_sync(ALL_LANES, page_ids, tile % 32);
      const int position = start + tile * STEP;
      location = ((page * gridDim.x + head) << p.page_shift) +
                 (position & ((1 << p.page_shift) - 1));
      to_copy = valid_rows(position, begin, end);
      copy_tile(shared, stage, p.k_cache + static_cast<u64>(location) * (CHUNKS * 16), to_copy);
      if (QUANTIZED && lane < 8) {  // the scales of K, then those of V
        const float* from = (lane < 4 ? p.k_scale : p.v_scale) + location + lane % 4 * 4;
        copy_async16(shared + stage + 2 * TILE_BYTES + lane * 16, from, true);
      }
    }
    copy_async_commit();
  };
  auto copy_values = [&](int tile, u32 stage) {
    if (tile < num_tiles)
      copy_tile(shared, stage + TILE_BYTES, p.v_cache + static_cast<u64>(location) * (CHUNKS * 16),
                to_copy);
    copy_async_commit();
  };

#pragma unroll 1
  for (int tile = 0; tile < STAGES; tile++) {
    copy_keys(tile, ring + tile * STAGE_BYTES);
    copy_values(tile, ring + tile * STAGE_BYTES);
  }
  float scale_log2 = p.scale_log2;
  if constexpr (QUANTIZED && !IS_HALF<TYPE>) scale_log2 *= queries_to_half(queries);
  store_queries(shared, queries);
  // Scores are multiplied by it with the scales of an e4m3 cache, else as late as possible.
  const float unit = QUANTIZED ? 1.f : scale_log2;
  Sums sums = {{}, {-INFINITY_F, -INFINITY_F}, {0.f, 0.f}};

  // Before either wait, 2 STAGES groups are unfinished at most, and the oldest is what is needed.
  u32 stage = ring;
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; tile++) {
    float scores[2][4];
    u32 weights[4];
    Scales scales;
    copy_async_wait<2 * STAGES - 1>();
    __syncwarp();
    multiply_keys(scores, queries, shared, stage);
    if constexpr (QUANTIZED) {
      const float* from =
          reinterpret_cast<const float*>(shared + stage + 2 * TILE_BYTES) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float2 k = *reinterpret_cast<const float2*>(from + 8 * n);
        const float2 v = *reinterpret_cast<const float2*>(from + TILE + 8 * n);
        scales.keys[n][0] = k.x * scale_log2;
        scales.keys[n][1] = k.y * scale_log2;
        scales.values[n][0] = v.x;
        scales.values[n][1] = v.y;
      }
    }
    __syncwarp();  // every lane has read the keys: they may be overwritten
    copy_keys(tile + STAGES, stage);
    softmax(scores, weights, sums, unit, valid_rows(start + tile * STEP, begin, end), scales);

    copy_async_wait<2 * STAGES - 1>();
    __syncwarp();
    multiply_values(sums.output, weights, shared, stage + TILE_BYTES);
    __syncwarp();
    copy_values(tile + STAGES, stage);
    stage = stage == last_stage ? ring : stage + STAGE_BYTES;
  }
  copy_async_wait<0>();
  sums.top[0] *= unit;
  sums.top[1] *= unit;
  write_result(p, item, sums, shared);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_MULTIPROCESSOR)
decode_attention(const Parameters p) {
  DYNAMIC_SHARED(shared);
  // The grid is no larger than the array of items, so the first may be read before the count is
  // known. end > 0 holds for any item; asking for it keeps the compiler from reading the item only
  // after the comparison, which would put two latencies in a row.
  Item item = p.items[blockIdx.y];
  const int num_items = *p.num_items;
  if ((static_cast<int>(blockIdx.y) >= num_items) | (item.end <= 0)) return;
  for (int index = blockIdx.y;;) {
    attend(p, item, shared);
    index += gridDim.y;
    if (index >= num_items) return;
    item = p.items[index];
    __syncthreads();  // the merge has read what the next item's tiles overwrite
  }
}
