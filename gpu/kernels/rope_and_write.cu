// rope_and_write.cu - norm and rotate queries and keys, and write keys and values to the KV cache.
//
// qkv is [T, H + 2 K, D] of ELEMENT: the heads of a token's queries, then of its keys, then of its
// values. For each token, in one pass:
//   1. optionally (Qwen 3) each head of queries and keys is normed: x * weight / rms(x);
//   2. optionally queries and keys are rotated by the token's position (Su et al. 2021,
//      arXiv:2104.09864): elements i and i + D/2 by the angle of pair i; the table holds its cosine
//      and sine, with all scaling and YaRN's factor in them;
//   3. queries go back to where they were. Keys and values go to the cache, [num_pages, K,
//      page_size, D]; the key heads of qkv are left as they were, they are not read again.
// With CACHE = e4m3 (OCP FP8, arXiv:2209.05433) a head is divided by its largest size / 448, which
// is kept beside it as a float32.
//
// Tiling: D/16 lanes hold one head, each 8 elements of its first half and their 8 partners of its
// second half, so that both numbers of a pair are in one thread. For D = 80 and 96 lanes are left
// over: 8 neighboring lanes have 5 or 6 at work, and the sums over a head stay shuffles among a
// power of two. A block holds one token (x), or a share of its heads (y) where there are few tokens;
// a thread goes through its heads with the same cosines and sines, and loads the next head before
// it computes with this one.
//
// Bytes: (H + 2 K) D elements in and as many out, besides 4 D bytes of the table, which the heads of
// a token share through the caches. No arithmetic to speak of (a few flops per byte), so memory
// bounds it: 8192 tokens at H = 32, K = 8, D = 128 move 201 MB: 47 us on an H200 at 4.3 TB/s. For a
// decode batch it is latency: position, table, result; about 2 us.
#include "vectors.cuh"

struct Parameters {
  ELEMENT* qkv;                // [T, H + 2 K, D]; the queries are changed
  const float* cos_sin;        // [max_len, D]: D/2 cosines, then D/2 sines
  const int* positions;        // [T]; of a padding token any number below max_len
  const int* kv_locations;     // [T]: page * page_size + offset; -1: not to be written
  CACHE* k_cache;              // [num_pages, K, page_size, D]
  CACHE* v_cache;
  float* k_scale;              // [num_pages, K, page_size]; null unless CACHE is e4m3
  float* v_scale;
  const ELEMENT* norm_weight;  // [H + K, D]; null: no norm
  int num_heads, num_kv_heads;
  int page_size_log2;
  int rotate;
  float eps;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);

constexpr int HALF = HEAD_DIM / 2;
constexpr int BUSY_LANES = HALF / VECTOR;
constexpr int HEAD_LANES = BUSY_LANES <= 4 ? 4 : BUSY_LANES <= 8 ? 8 : 16;
constexpr int WARP_HEADS = 32 / HEAD_LANES;
constexpr int BLOCK_HEADS = NUM_THREADS / HEAD_LANES;
// At most 72 registers a thread; with 64, some variants spill. Up to 57 KB of loads are in flight on
// a multiprocessor; 16 KB hide 1 us of latency at the half of the bandwidth that reading gets.
constexpr int BLOCKS_PER_MULTIPROCESSOR = 7;
static_assert(HALF % VECTOR == 0 && BUSY_LANES <= HEAD_LANES && NUM_THREADS % 32 == 0);

// What one lane holds of a head: elements 8 lane ... and elements D/2 + 8 lane ...
struct Pairs {
  uint4 first, second;
};

DEVICE Pairs load_pairs(const ELEMENT* at) { return {load16(at), load16(at + HALF)}; }

template <class T> DEVICE void store_pairs(T* at, const float (&a)[VECTOR], const float (&b)[VECTOR]) {
  if constexpr (sizeof(T) == 1) {
    *reinterpret_cast<uint2*>(at) = uint2{pack_e4m3x4(a[0], a[1], a[2], a[3]),
                                          pack_e4m3x4(a[4], a[5], a[6], a[7])};
    *reinterpret_cast<uint2*>(at + HALF) = uint2{pack_e4m3x4(b[0], b[1], b[2], b[3]),
                                                 pack_e4m3x4(b[4], b[5], b[6], b[7])};
  } else {
    store16(at, pack8<T>(a));
    store16(at + HALF, pack8<T>(b));
  }
}

DEVICE void load_floats8(const float* from, float (&x)[VECTOR]) {
  const float4 lower = reinterpret_cast<const float4*>(from)[0];
  const float4 upper = reinterpret_cast<const float4*>(from)[1];
  x[0] = lower.x, x[1] = lower.y, x[2] = lower.z, x[3] = lower.w;
  x[4] = upper.x, x[5] = upper.y, x[6] = upper.z, x[7] = upper.w;
}

DEVICE void scale_by(float (&a)[VECTOR], float (&b)[VECTOR], const Pairs& weight, float scale) {
  float of_a[VECTOR], of_b[VECTOR];
  unpack8<ELEMENT>(weight.first, of_a);
  unpack8<ELEMENT>(weight.second, of_b);
  for (int i = 0; i < VECTOR; i++) {
    a[i] *= scale * of_a[i];
    b[i] *= scale * of_b[i];
  }
}

DEVICE void rotate(float (&a)[VECTOR], float (&b)[VECTOR], const float (&cos)[VECTOR],
                   const float (&sin)[VECTOR]) {
  for (int i = 0; i < VECTOR; i++) {
    const float x = a[i], y = b[i];
    a[i] = x * cos[i] - y * sin[i];
    b[i] = y * cos[i] + x * sin[i];
  }
}

// Divide a head so that its largest number becomes 448, and return by what. Every lane of the warp
// must call it. A head so small that the inverse would overflow counts as zeros, with scale 1.
DEVICE float quantize(float (&a)[VECTOR], float (&b)[VECTOR]) {
  constexpr float LARGEST = 448.f, NEARLY_ZERO = 1e-34f;
  const float size = max_over_lanes<HEAD_LANES>(fmaxf(largest_size(a), largest_size(b)));
  if (size < NEARLY_ZERO) return 1.f;
  const float inverse = LARGEST / size;
  for (int i = 0; i < VECTOR; i++) {
    a[i] *= inverse;
    b[i] *= inverse;
  }
  return size / LARGEST;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_MULTIPROCESSOR) rope_and_write(Parameters p) {
  const int token = blockIdx.x;
  const int lane = threadIdx.x % HEAD_LANES;
  const bool busy = lane < BUSY_LANES;
  const int all_heads = p.num_heads + 2 * p.num_kv_heads;
  ELEMENT* const row = p.qkv + static_cast<i64>(token) * all_heads * HEAD_DIM + lane * VECTOR;

  // The heads of a warp start at `first`, so that all its lanes make the same number of rounds.
  const int in_warp = threadIdx.x % 32 / HEAD_LANES;
  const int step = BLOCK_HEADS * gridDim.y;
  int first = BLOCK_HEADS * blockIdx.y + threadIdx.x / 32 * WARP_HEADS;

  Pairs next = {};
  if (busy && first + in_warp < all_heads) next = load_pairs(row + (first + in_warp) * HEAD_DIM);
  const int location = p.kv_locations[token];
  float cos[VECTOR] = {}, sin[VECTOR] = {};
  if (busy && p.rotate) {
    const i64 position = max(p.positions[token], 0);
    const float* const angles = p.cos_sin + position * HEAD_DIM + lane * VECTOR;
    load_floats8(angles, cos);
    load_floats8(angles + HALF, sin);
  }

  for (; first < all_heads; first += step) {
    const int head = first + in_warp, head_after = head + step;
    const Pairs pairs = next;
    if (busy && head_after < all_heads) next = load_pairs(row + head_after * HEAD_DIM);

    const bool at_work = busy && head < all_heads;
    const bool is_value = head >= p.num_heads + p.num_kv_heads;
    const bool normed = p.norm_weight && at_work && !is_value;
    Pairs weight = {};
    if (normed) weight = load_pairs(p.norm_weight + head * HEAD_DIM + lane * VECTOR);

    float a[VECTOR], b[VECTOR];
    unpack8<ELEMENT>(pairs.first, a);
    unpack8<ELEMENT>(pairs.second, b);
    if (p.norm_weight) {
      const float sum = sum_over_lanes<HEAD_LANES>(sum_of_squares(a) + sum_of_squares(b));
      if (normed) scale_by(a, b, weight, rsqrt_approx(sum * (1.f / HEAD_DIM) + p.eps));
    }
    if (p.rotate && !is_value) rotate(a, b, cos, sin);
    if (at_work && head < p.num_heads) store_pairs(row + head * HEAD_DIM, a, b);

    float scale = 1.f;
    if constexpr (sizeof(CACHE) == 1) scale = quantize(a, b);
    if (at_work && head >= p.num_heads && location >= 0) {
      const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
      const int page = location >> p.page_size_log2;
      const int offset = location - (page << p.page_size_log2);
      const i64 to = ((static_cast<i64>(page) * p.num_kv_heads + kv_head) << p.page_size_log2) + offset;
      store_pairs((is_value ? p.v_cache : p.k_cache) + to * HEAD_DIM + lane * VECTOR, a, b);
      if (sizeof(CACHE) == 1 && lane == 0) (is_value ? p.v_scale : p.k_scale)[to] = scale;
    }
  }
}
