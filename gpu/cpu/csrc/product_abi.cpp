// Products for callers that aren't C++: gpu/cpu/products.py.

#include "extension.h"
#include "pack.h"

using namespace trioserve::TRIOSERVE_ISA;

extern "C" {

// Extensions by the numbers of extension.h. Returns whether this process can compute with that one.
int32_t TRIOSERVE_EXPORT(extension_choose)(int32_t extension) {
  return choose_extension(static_cast<Extension>(extension));
}

int32_t TRIOSERVE_EXPORT(extension_current)() { return static_cast<int32_t>(current_extension()); }

void* TRIOSERVE_EXPORT(product_pool_open)(int32_t threads) { return new Pool(threads); }

void TRIOSERVE_EXPORT(product_pool_close)(void* pool) { delete static_cast<Pool*>(pool); }

uint64_t TRIOSERVE_EXPORT(product_packed_bytes)(int32_t kind, int64_t outputs, int64_t inputs) {
  return packed_bytes(static_cast<Kind>(kind), outputs, inputs);
}

// `form`: 0 for bf16, 1 for float, 2 for ggml's blocks.
void TRIOSERVE_EXPORT(product_pack)(void* pool, int32_t form, int32_t kind, int64_t outputs, int64_t inputs,
                  const void* weight, void* packed) {
  const Kind as = static_cast<Kind>(kind);
  static_cast<Pool*>(pool)->run([=](const Team& team) {
    if (form == 0)
      pack_bf16(team, as, outputs, inputs, static_cast<const bf16*>(weight), packed);
    else if (form == 1)
      pack_float(team, as, outputs, inputs, static_cast<const float*>(weight), packed);
    else
      pack_blocks(team, as, outputs, inputs, static_cast<const uint8_t*>(weight), packed);
  });
}

uint64_t TRIOSERVE_EXPORT(product_scratch_bytes)(const Product* product, int64_t max_rows, int32_t threads) {
  return multiply_scratch_bytes(*product, max_rows, threads);
}

void TRIOSERVE_EXPORT(product_multiply)(void* pool, const Product* product, const bf16* x, int64_t rows, void* y,
                      int32_t to_float, void* scratch) {
  static_cast<Pool*>(pool)->run([=](const Team& team) {
    if (to_float)
      multiply_float(team, *product, x, rows, static_cast<float*>(y), scratch);
    else
      multiply(team, *product, x, rows, static_cast<bf16*>(y), scratch);
  });
}

// Returns whether it was computed: not where the product or the extension isn't one for it.
int32_t TRIOSERVE_EXPORT(product_multiply_gated)(void* pool, const Product* product, const bf16* x, int64_t rows,
                      bf16* y, void* scratch) {
  if (!is_gated(*product, rows)) return 0;
  static_cast<Pool*>(pool)->run(
      [=](const Team& team) { multiply_gated(team, *product, x, rows, y, scratch); });
  return 1;
}

void TRIOSERVE_EXPORT(product_gather)(void* pool, const Product* product, const int32_t* ids, int64_t rows, bf16* y) {
  static_cast<Pool*>(pool)->run(
      [=](const Team& team) { gather_rows(team, *product, ids, rows, y); });
}

}  // extern "C"
