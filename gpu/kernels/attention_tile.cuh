// attention_tile.cuh - one block: TILE packed queries of one kv head attend to a range of keys.
//
// FlashAttention-2 (Dao, 2023) with mma.m16n8k16 over a paged cache. The M index of the tile packs
// tokens and the query heads that share a kv head: m = token * group + head of the group, so few
// tokens fill a tile and each key is read once for all heads of its group.
//
//     for each tile of KEYS keys:     S = Q K^T       [TILE, KEYS]     tensor cores, float32
//                                     P = softmax     in registers     online, base 2, 16 keys at
//                                                                      a time, between the mma
//                                     O += P V        [TILE, HEAD_DIM] tensor cores, float32
//
// A warp owns M_TILES x 16 queries and all keys of the tile: no data passes between warps but the
// tiles of keys and values. S in C-fragment layout is P in A-fragment layout, without a shuffle.
// With M_TILES = 2 a fragment of K or V read from shared memory feeds four mma, not two: on an SM
// with four tensor cores that each finish an m16n8k16 in 6.5 cycles, ldmatrix.x4 (4 cycles of the
// shared memory) would else be the bottleneck.
//
// Shared memory, in this order:
//   Q             TILE x HEAD_DIM of TYPE, if it is read again for every tile
//   K, V          STAGES x 2 x KEYS x HEAD_DIM of TYPE; e4m3: one stage, widened from the raw copy
//   raw           e4m3 only: the raw copies of the next tile and of its scales
//   scales        e4m3 only: 2 x KEYS float32
//   range         one KeyRange
// Where the fragments of Q stay in registers, Q passes through the last stage. The output passes
// through the front, so that it leaves in stores of 16 bytes.
//
// One barrier a tile: after it tile i is complete and every warp has left tile i - 1; the stage of
// that one is refilled while tile i is computed. With e4m3 a second one stands after the widening.
//
// Compile-time choices: those of paged_tiles.cuh, TILE, MIN_BLOCKS (per multiprocessor; bounds the
// registers), SHARED_BYTES (what the launch provides).
#pragma once
#include "online_softmax.cuh"
#include "paged_tiles.cuh"

constexpr int M_TILES = TILE / (16 * WARPS);
constexpr int K_STEPS = HEAD_DIM / 16;  // of the first product
constexpr int N_TILES = KEYS / 8;       // of the first product
constexpr int O_TILES = HEAD_DIM / 8;   // N tiles of the second product
constexpr bool Q_IN_REGISTERS = M_TILES * K_STEPS * 4 <= Q_REGISTERS;
constexpr int KEY_RANGE_BYTES = 64;
constexpr int STAGES = QUANTIZED ? 1 : 2;
constexpr int Q_BYTES = Q_IN_REGISTERS ? 0 : TILE * HEAD_DIM * 2;
static_assert(M_TILES * 16 * WARPS == TILE);
constexpr int TILE_BYTES = Q_BYTES + STAGES * STAGE_BYTES + RAW_BYTES + 2 * SCALE_BYTES;
static_assert(TILE_BYTES + KEY_RANGE_BYTES == SHARED_BYTES);
static_assert(sizeof(KeyRange) <= KEY_RANGE_BYTES);
static_assert(!Q_IN_REGISTERS || TILE <= 2 * KEYS);
static_assert(TILE * HEAD_DIM * 2 <= Q_BYTES + STAGES * STAGE_BYTES);

struct AttentionTile {
  unsigned char* shared;
  float scale_log2;
  BlockAddresses<HEAD_DIM> q_blocks;
  float output[M_TILES][O_TILES][4];
  SoftmaxState softmax[M_TILES];
  u32 q[Q_IN_REGISTERS ? M_TILES : 1][Q_IN_REGISTERS ? K_STEPS : 1][4];

  DEVICE AttentionTile(unsigned char* shared, float scale_log2)
      : shared(shared), scale_log2(scale_log2),
        q_blocks(q_blocks.down_first(q_tile() + first_query() * HEAD_DIM)) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int d = 0; d < O_TILES; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) output[m][d][i] = 0.f;
  }

  DEVICE static int lane() { return threadIdx.x % 32; }
  DEVICE static int first_query() { return static_cast<int>(threadIdx.x) / 32 * M_TILES * 16; }
  // The first of the two columns of this lane in every C fragment.
  DEVICE static int lane_column() { return reread_thread_index() % 4 * 2; }
  // The packed query of row 0 of this lane's first fragment; row h of fragment m is 16 m + 8 h on.
  DEVICE static int lane_query() {
    const int thread = reread_thread_index();
    return thread / 32 * M_TILES * 16 + thread % 32 / 4;
  }

  DEVICE TYPE* k_stage(int stage) const {
    return reinterpret_cast<TYPE*>(shared + Q_BYTES + stage * STAGE_BYTES);
  }
  DEVICE TYPE* v_stage(int stage) const { return k_stage(stage) + TILE_ELEMENTS; }
  DEVICE unsigned char* raw() const { return shared + Q_BYTES + STAGES * STAGE_BYTES; }
  DEVICE float* scales() const {
    return reinterpret_cast<float*>(raw() + RAW_BYTES + SCALE_BYTES);
  }
  DEVICE TYPE* q_tile() const {
    return Q_IN_REGISTERS ? k_stage(STAGES - 1) : reinterpret_cast<TYPE*>(shared);
  }

  // source(m): the HEAD_DIM elements of packed query m < num_queries; the others become zeros.
  template <class Source> DEVICE void load_queries(int num_queries, const Source& source) {
    constexpr int CHUNKS = HEAD_DIM / 8, ALL = TILE * CHUNKS;
    static_assert(ALL % NUM_THREADS == 0);
#pragma unroll
    for (int i = 0; i < ALL / NUM_THREADS; i++) {
      const int chunk = threadIdx.x + i * NUM_THREADS, m = chunk / CHUNKS;
      const TYPE* from = source(min(m, num_queries - 1)) + chunk % CHUNKS * 8;
      copy_async16(q_tile() + swizzled<HEAD_DIM>(m, chunk % CHUNKS), from, m < num_queries);
    }
    copy_async_commit();
  }

  // A fragment of 16 queries and 16 dimensions.
  DEVICE void q_fragment(u32 (&a)[4], int m, int k) const {
    ldmatrix(a, q_blocks.at(2 * m, k));
  }

  DEVICE void keep_queries() {
    if constexpr (Q_IN_REGISTERS) {
      copy_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) q_fragment(q[m][k], m, k);
    }
  }

  // S = Q K^T.
  DEVICE void score(float (&s)[M_TILES][N_TILES][4],
                    const BlockAddresses<HEAD_DIM>& k_blocks) const {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      u32 a[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        if constexpr (Q_IN_REGISTERS) {
#pragma unroll
          for (int i = 0; i < 4; i++) a[m][i] = q[m][k][i];
        } else {
          q_fragment(a[m], m, k);
        }
      }
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        u32 b[4];  // 16 keys
        ldmatrix(b, k_blocks.at(n, k));
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            if (k == 0) mma_first<TYPE>(s[m][n + half], a[m], b[2 * half], b[2 * half + 1]);
            else mma<TYPE>(s[m][n + half], a[m], b[2 * half], b[2 * half + 1]);
          }
      }
    }
  }

  // Multiply every column of s by the factor of its key.
  DEVICE static void scale_columns(float (&s)[N_TILES][4], const float* factors) {
    factors += lane_column();
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
      const float2 f = *reinterpret_cast<const float2*>(factors + n * 8);
      s[n][0] *= f.x; s[n][1] *= f.y; s[n][2] *= f.x; s[n][3] *= f.y;
    }
  }

  // Scores of keys that a query does not see become -infinity.
  template <class Spans>
  DEVICE static void mask(float (&s)[M_TILES][N_TILES][4], int tile, const KeyRange& keys,
                          const Spans& span) {
    const int column = tile * KEYS + lane_column(), first = lane_query();
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Span seen = span(keys, first + m * 16 + h * 8);
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int key = column + n * 8 + i;
            if (key < seen.first || key > seen.last) s[m][n][2 * h + i] = -INFINITY_F;
          }
      }
  }

  // O += P V. The weights P of 16 keys are made from their scores just before they are used: the
  // exponentials of one step overlap the mma of the one before.
  DEVICE void weigh(const float (&s)[M_TILES][N_TILES][4],
                    const BlockAddresses<HEAD_DIM>& v_blocks) {
    const float* factors = QUANTIZED ? scales() + KEYS + lane_column() : nullptr;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      u32 p[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
        weights<TYPE>(p[m], s[m][2 * k], s[m][2 * k + 1], softmax[m], scale_log2,
                      QUANTIZED ? factors + 16 * k : nullptr);
#pragma unroll
      for (int d = 0; d < O_TILES; d += 2) {
        u32 b[4];
        ldmatrix_transposed(b, v_blocks.at(2 * k, d / 2));
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
          mma<TYPE>(output[m][d], p[m], b[0], b[1]);
          mma<TYPE>(output[m][d + 1], p[m], b[2], b[3]);
        }
      }
    }
  }

  // Attend to the keys of the cache; load_queries has been called. span(keys, m): what packed
  // query m sees.
  template <class Spans>
  DEVICE void attend(const PagedCache& cache, const KeyRange& keys, const Spans& span) {
    int tile = keys.begin / KEYS;
    KeyRange& kept = *reinterpret_cast<KeyRange*>(shared + TILE_BYTES);
    if (threadIdx.x == 0) kept = keys;
    void* copied = QUANTIZED ? static_cast<void*>(raw()) : k_stage(0);
    TileLoader loader(cache, keys, copied);
    loader.load(keys, tile);
    keep_queries();
    auto k_blocks = BlockAddresses<HEAD_DIM>::right_first(k_stage(0));
    auto v_blocks = BlockAddresses<HEAD_DIM>::down_first(v_stage(0));
    int to_next_stage = (STAGES - 1) * STAGE_BYTES;
    // Without keys, one tile of zeros and masks passes through: weights of 0, a sum of 0.
    for (bool more = true; more; tile++) {
      copy_async_wait<0>();
      __syncthreads();
      more = (tile + 1) * KEYS < kept.end;
      if constexpr (QUANTIZED) loader.widen(kept, tile, k_stage(0), v_stage(0), scales(), raw());
      if (more) loader.load(kept, tile + 1);
      if constexpr (QUANTIZED) __syncthreads();

      float s[M_TILES][N_TILES][4];
      score(s, k_blocks);
      if constexpr (QUANTIZED) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) scale_columns(s[m], scales());
      }
      if (tile * KEYS < kept.inner.first || tile * KEYS + KEYS - 1 > kept.inner.last)
        mask(s, tile, kept, span);
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
        raise_reference(s[m], softmax[m], output[m], scale_log2);
      weigh(s, v_blocks);
      k_blocks.move(to_next_stage);
      v_blocks.move(to_next_stage);
      to_next_stage = -to_next_stage;
    }
  }

  // What is left to divide by at the end; 0 for a query that saw no key.
  DEVICE static float normalizer(float sum) {
    return sum > 0.f ? (QUANTIZED ? 1.f / VALUE_FACTOR : 1.f) / sum : 0.f;
  }

  // The normalized output, rounded to TYPE. destination(m): HEAD_DIM elements.
  template <class Destination> DEVICE void store(int num_queries, const Destination& destination) {
    __syncthreads();  // the tiles make room for the output
    TYPE* staged = reinterpret_cast<TYPE*>(shared);
    const int first = lane_query(), column = lane_column();
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float factor = normalizer(softmax_sum(softmax[m], h));
#pragma unroll
        for (int d = 0; d < O_TILES; d++) {
          TYPE* to = staged + swizzled<HEAD_DIM>(first + m * 16 + h * 8, d) + column;
          const float* o = &output[m][d][2 * h];
          *reinterpret_cast<u32*>(to) = pack<TYPE>(o[0] * factor, o[1] * factor);
        }
      }
    __syncwarp();  // a warp reads back only what it wrote
    constexpr int CHUNKS = HEAD_DIM / 8;
#pragma unroll 4
    for (int i = lane(); i < M_TILES * 16 * CHUNKS; i += 32) {
      const int row = first_query() + i / CHUNKS, chunk = i % CHUNKS;
      if (row >= num_queries) break;
      const TYPE* from = staged + swizzled<HEAD_DIM>(row, chunk);
      *reinterpret_cast<uint4*>(destination(row) + chunk * 8) =
          *reinterpret_cast<const uint4*>(from);
    }
  }

  // The normalized output in float32 and its log-sum-exp, to be merged with the results over other
  // keys. destination(m): index of a row of HEAD_DIM floats of partial_out, which is also that of
  // its one float of partial_lse. A query that saw no key gets zeros and -infinity.
  template <class Destination>
  DEVICE void store_partial(int num_queries, float* partial_out, float* partial_lse,
                            const Destination& destination) const {
    const int first = lane_query(), column = lane_column();
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float sum = softmax_sum(softmax[m], h), factor = normalizer(sum);
        const int query = first + m * 16 + h * 8;
        if (query >= num_queries) continue;
        const i64 index = destination(query);
        float* to = partial_out + index * HEAD_DIM + column;
#pragma unroll
        for (int d = 0; d < O_TILES; d++)
          *reinterpret_cast<float2*>(to + d * 8) =
              make_float2(output[m][d][2 * h] * factor, output[m][d][2 * h + 1] * factor);
        if (column == 0) partial_lse[index] = softmax_lse(softmax[m], h, sum, scale_log2);
      }
  }
};
