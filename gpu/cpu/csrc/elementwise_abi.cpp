// What gpu/cpu/elementwise.py calls: the small operations by themselves.
#include <exception>

#include "elementwise.h"

using namespace trioserve::TRIOSERVE_ISA;

extern "C" {

// Null if there is no memory for it.
Pool* TRIOSERVE_EXPORT(elementwise_pool)(int32_t threads) {
  try {
    return new Pool(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void TRIOSERVE_EXPORT(elementwise_free)(Pool* pool) { delete pool; }

void TRIOSERVE_EXPORT(elementwise_rms_norm)(Pool* pool, const bf16* x, const bf16* weight, float eps, int64_t rows,
                          int64_t width, bf16* y) {
  pool->run([&](const Team& team) { rms_norm(team, x, weight, eps, rows, width, y); });
}

void TRIOSERVE_EXPORT(elementwise_add_rms_norm)(Pool* pool, const bf16* x, bf16* residual, const bf16* weight,
                              float eps, int64_t rows, int64_t width, bf16* y) {
  pool->run(
      [&](const Team& team) { add_rms_norm(team, x, residual, weight, eps, rows, width, y); });
}

void TRIOSERVE_EXPORT(elementwise_silu_mul)(Pool* pool, const bf16* gate_up, int64_t rows, int64_t width, bf16* y) {
  pool->run([&](const Team& team) { silu_mul(team, gate_up, rows, width, y); });
}

void TRIOSERVE_EXPORT(elementwise_gather_rows)(Pool* pool, const bf16* table, const int32_t* ids, int64_t rows,
                             int64_t width, bf16* y) {
  pool->run([&](const Team& team) { gather_rows(team, table, ids, rows, width, y); });
}

void TRIOSERVE_EXPORT(elementwise_argmax_rows)(Pool* pool, const float* x, int64_t rows, int64_t width,
                             int32_t* best) {
  pool->run([&](const Team& team) { argmax_rows(team, x, rows, width, best); });
}

}  // extern "C"
