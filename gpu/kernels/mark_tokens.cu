// mark_tokens.cu - note for each token of the vocabulary what steps 2 to 4 of the sampler do to it.
//
// A row's marks (see sampling.cuh) are zero before. For each token of the history that a penalty
// looks at, the count of the output goes up or the flag of the prompt is set; tokens with a bias
// and masked stop ids get their flags. scan_logits.cu takes the marks away again.
//
// Tiling: grid (chunks, rows); the blocks of a row stride over its history. Rows without a bias, a
// penalty or a mask leave at once. All updates are integer atomics: the order doesn't matter.
//
// Bytes: 4 per token of the history, plus an atomic on a sector of 32 bytes in L2. 256 rows of 1000
// tokens are 256,000 atomics, a few us on an H200. Latency bounds smaller ones: 2 us, or 1.5 us
// where no row has anything to do.
#include "sampling.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) mark_tokens(const Parameters p) {
  const int row = blockIdx.y, slot = p.slots[row];
  if (slot < 0) return;
  const SlotRecord& record = p.records[slot];
  const Adjustments todo(record, p.lengths[row]);
  if (!todo.any()) return;
  u32* marks = p.marks + row * p.marks_stride;
  const int prompt_length = record.prompt_length;
  for_each_touched(p, record, todo, slot, blockIdx.x, gridDim.x, [&](int token, int position) {
    if (position >= prompt_length) {
      atomicAdd(marks + token, 1u);
    } else {
      atomicOr(marks + token, position >= 0    ? OCCURS_IN_PROMPT
                              : position == -1 ? HAS_BIAS
                                               : IS_MASKED);
    }
  });
}
