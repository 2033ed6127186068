"""Defects to plant in the kernels, one at a time, for :mod:`tests.kernels.mutations`.

Each is a replacement of text in one source, the tests that should notice, and the cheapest mode
known to: random orders (with guard pages and NaN poison), or a sanitizer. A replacement that no
longer applies is an error, so the table follows the sources.
"""

from __future__ import annotations

import attrs

__all__ = ["DEFECTS", "Defect"]


@attrs.frozen
class Defect:
    """One change of one source."""

    what: str
    file: str
    """File name in ``gpu/kernels``."""
    before: str
    """Stands exactly once in the file."""
    after: str
    tests: str
    """A file of this folder, and perhaps `` -k `` and an expression."""
    sanitizer: str = ""
    """The mode to try first."""


def _decode() -> list[Defect]:
    file, all_tests = "decode_attention.cu", "test_decode_attention.py"
    tiles, products, softmax = "decode_tiles.cuh", "decode_products.cuh", "decode_softmax.cuh"
    bf16, e4m3 = f"{all_tests} -k test_ragged_rows", f"{all_tests} -k test_e4m3_cache"
    return [
        Defect(
            "no barrier before warps overwrite the ring",
            file,
            "  __syncthreads();  // the other warps have read their last tile\n",
            "",
            bf16,
        ),
        Defect(
            "no barrier before the merge of the warps",
            file,
            "  __syncthreads();\n  for (int i = threadIdx.x; i < p.group * (D / 4)",
            "  for (int i = threadIdx.x; i < p.group * (D / 4)",
            bf16,
        ),
        Defect(
            "no barrier between two items of a block",
            file,
            "    __syncthreads();  // the merge has read what the next item's tiles overwrite\n",
            "",
            f"{all_tests} -k test_fewer_blocks_than_items",
        ),
        Defect(
            "keys are waited for one group too late",
            file,
            "copy_async_wait<2 * STAGES - 1>();\n    __syncwarp();\n    multiply_keys",
            "copy_async_wait<2 * STAGES>();\n    __syncwarp();\n    multiply_keys",
            bf16,
        ),
        Defect(
            "values are waited for one group too late",
            file,
            "copy_async_wait<2 * STAGES - 1>();\n    __syncwarp();\n    multiply_values",
            "copy_async_wait<2 * STAGES>();\n    __syncwarp();\n    multiply_values",
            bf16,
        ),
        Defect(
            "other lanes' copies are read without a __syncwarp",
            file,
            "    __syncwarp();\n    multiply_keys",
            "    multiply_keys",
            bf16,
        ),
        Defect(
            "racing refill: keys are overwritten while lanes may read them",
            file,
            "    __syncwarp();  // every lane has read the keys: they may be overwritten\n",
            "",
            f"{all_tests} -k test_ring_is_refilled",
            "thread",
        ),
        Defect(
            "racing refill: values are overwritten while lanes may read them",
            file,
            "    __syncwarp();\n    copy_values(tile",
            "    copy_values(tile",
            f"{all_tests} -k test_ring_is_refilled",
            "thread",
        ),
        Defect(
            "one position past the end",
            tiles,
            "max(position + TILE - end, 0)",
            "max(position + TILE - end - 1, 0)",
            bf16,
        ),
        Defect(
            "one position before the window",
            tiles,
            "max(begin - position, 0)",
            "max(begin - position - 1, 0)",
            f"{all_tests} -k test_sliding_window",
        ),
        Defect(
            "rows past the end are not zero-filled",
            tiles,
            "WHOLE || valid >> row & 1u << i * ROWS",
            "true",
            bf16,
        ),
        Defect(
            "values are read at another place than they are written to",
            products,
            "ldmatrix_transposed(v, fragment(shared, values, row, half, f))",
            "ldmatrix_transposed(v, fragment(shared, values, row ^ 1, half, f))",
            bf16,
        ),
        Defect(
            "lost swizzle",
            tiles,
            "(row * CHUNKS + (chunk ^ (row / (8 / WAYS) & (WAYS - 1)))) * 16",
            "(row * CHUNKS + chunk) * 16",
            bf16,
        ),
        Defect(
            "the merge forgets how much a warp's maximum differs",
            file,
            "weight += weights[w * 16 + row] * factor",
            "weight += weights[w * 16 + row]",
            bf16,
        ),
        Defect(
            "the weight of a split has the wrong sign",
            file,
            "top + log2_approx(weight)",
            "top - log2_approx(weight)",
            all_tests,
        ),
        Defect(
            "sums are not brought to a new maximum",
            softmax,
            "sums.weight[h] *= factor;",
            "",
            bf16,
        ),
        Defect(
            "only the first eight query heads make a new maximum",
            softmax,
            "top[0] != sums.top[0] || top[1] != sums.top[1]",
            "top[0] != sums.top[0]",
            f"{all_tests} -k 'test_ragged_rows and -16-'",
        ),
        Defect(
            "the page ids of the first 32 tiles are used on and on",
            file,
            "page_ids = next_page_ids;",
            "",
            all_tests,
        ),
        Defect(
            "scores have the scale of values",
            softmax,
            "scores[n][2 * h + j] *= scales.keys[n][j]",
            "scores[n][2 * h + j] *= scales.values[n][j]",
            e4m3,
        ),
        Defect(
            "values have the scale of keys",
            softmax,
            "w[j] *= scales.values[n][j]",
            "w[j] *= scales.keys[n][j]",
            e4m3,
        ),
        Defect(
            "scales past the end are used as they were found",
            softmax,
            "          scales.values[n][j] = 0.f;\n",
            "",
            e4m3,
        ),
        Defect(
            "every KV head reads the first one's pages",
            file,
            "((page * gridDim.x + head) << p.page_shift)",
            "((page * gridDim.x) << p.page_shift)",
            bf16,
        ),
        Defect(
            "one item too many",
            file,
            "if ((static_cast<int>(blockIdx.y) >= num_items)",
            "if ((static_cast<int>(blockIdx.y) > num_items)",
            f"{all_tests} -k test_padded_rows",
        ),
    ]


def _combine() -> list[Defect]:
    file, tests = "combine_partials.cu", "test_combine_partials.py"
    return [
        Defect(
            "the sum of weights is not brought to a new maximum",
            file,
            "    total *= factor;\n",
            "",
            tests,
        ),
        Defect(
            "the first batch of partials is read again",
            file,
            "    from += BATCH * vectors;\n",
            "",
            tests,
        ),
        Defect(
            "one partial too many",
            file,
            "static_cast<int>(i) < left",
            "static_cast<int>(i) <= left",
            tests,
        ),
        Defect("a partial is added unweighted", file, "weight * parts[i].y", "parts[i].y", tests),
        Defect(
            "a row without partials is overwritten",
            file,
            "  if (start == end) return;\n",
            "",
            tests,
        ),
        Defect(
            "partials without keys give NaN",
            file,
            "top == -INFINITY_F ? 0.f : top",
            "top",
            tests,
        ),
    ]


def _prefill() -> list[Defect]:
    tile, pages, online = "attention_tile.cuh", "paged_tiles.cuh", "online_softmax.cuh"
    tiled = "tiled_attention.cu"
    prefill_tests, prefix_tests = "test_prefill_attention.py", "test_prefix_attention.py"
    sizes, e4m3 = f"{prefill_tests} -k test_head_sizes", f"{prefill_tests} -k test_e4m3_cache"
    return [
        Defect(
            "tiles are read without a barrier",
            tile,
            "      copy_async_wait<0>();\n      __syncthreads();\n      more =",
            "      copy_async_wait<0>();\n      more =",
            sizes,
        ),
        Defect(
            "tiles are not waited for",
            tile,
            "      copy_async_wait<0>();\n      __syncthreads();\n      more =",
            "      __syncthreads();\n      more =",
            sizes,
        ),
        Defect(
            "racing refill: a stage is copied to before all warps have read it",
            tile,
            "      __syncthreads();\n      more = (tile + 1) * KEYS < kept.end;\n"
            "      if constexpr (QUANTIZED) "
            "loader.widen(kept, tile, k_stage(0), v_stage(0), scales(), raw());\n"
            "      if (more) loader.load(kept, tile + 1);\n",
            "      more = (tile + 1) * KEYS < keys.end;\n"
            "      if (more && !QUANTIZED) loader.load(keys, tile + 1);\n      __syncthreads();\n"
            "      if constexpr (QUANTIZED) "
            "loader.widen(kept, tile, k_stage(0), v_stage(0), scales(), raw());\n"
            "      if (more && QUANTIZED) loader.load(kept, tile + 1);\n",
            prefill_tests,
        ),
        Defect(
            "widened tiles are read without a barrier",
            tile,
            "      if constexpr (QUANTIZED) __syncthreads();\n",
            "",
            e4m3,
        ),
        Defect(
            "other threads' queries are read without a barrier",
            tile,
            "      copy_async_wait<0>();\n      __syncthreads();\n#pragma unroll\n",
            "      copy_async_wait<0>();\n#pragma unroll\n",
            sizes,
        ),
        Defect(
            "the output overwrites tiles that warps still read",
            tile,
            "    __syncthreads();  // the tiles make room for the output\n",
            "",
            prefill_tests,
        ),
        Defect(
            "the staged output is read without a __syncwarp",
            tile,
            "    __syncwarp();  // a warp reads back only what it wrote\n",
            "",
            sizes,
        ),
        Defect(
            "a query sees the token after it",
            tiled,
            "min(keys.end - 1, own)};",
            "min(keys.end - 1, own + 1)};",
            sizes,
        ),
        Defect(
            "the tile on the diagonal is not masked",
            tiled,
            "min(keys.end - 1, position)};",
            "min(keys.end - 1, last_position)};",
            sizes,
        ),
        Defect(
            "the window is one position too wide",
            tiled,
            "return {own - p.window + 1",
            "return {own - p.window",
            f"{prefill_tests} -k test_windows",
        ),
        Defect(
            "the position in the context ignores the cached part",
            tiled,
            "p.context_lens[row] - row_tokens + item[1]",
            "item[1]",
            f"{prefill_tests} -k test_chunks",
        ),
        Defect(
            "all splits are written to the first one's place",
            tiled,
            "p.partial_start[item.token(p, m)] + item.split",
            "p.partial_start[item.token(p, m)]",
            f"{prefill_tests} -k test_splits",
        ),
        Defect(
            "rows past the end are not zero-filled",
            pages,
            "const bool valid = chunk < num_valid;",
            "const bool valid = true;",
            sizes,
        ),
        Defect(
            "one row past the end",
            pages,
            "(keys.end - position) * CHUNKS_PER_ROW",
            "(keys.end + 1 - position) * CHUNKS_PER_ROW",
            sizes,
        ),
        Defect(
            "the loader writes where the reader doesn't look",
            "swizzle.cuh",
            "first(shared_address(tile) + 2 * swizzled<COLUMNS>(row, half))",
            "first(shared_address(tile) + 2 * (row * COLUMNS + half * 8))",
            sizes,
        ),
        Defect(
            "rows share banks",
            "swizzle.cuh",
            "CHUNKS % 8 == 0 ? row & 7",
            "CHUNKS % 8 == 0 ? 0",
            sizes,
        ),
        Defect(
            "values lack the factor that is divided by at the end",
            pages,
            "all[i] * (value ? VALUE_FACTOR : 1.f)",
            "all[i]",
            e4m3,
        ),
        Defect(
            "scales past the end are used as they were found",
            pages,
            "tile * KEYS + row + i < keys.end ? all[i] * (value ? VALUE_FACTOR : 1.f) : 0.f",
            "all[i] * (value ? VALUE_FACTOR : 1.f)",
            e4m3,
        ),
        Defect(
            "the reference lags where weights times values are packed to fp16",
            online,
            "FACTORS_IN_HALF ? 0.f : 8.f",
            "8.f",
            f"{prefill_tests} -k test_e4m3_of_the_largest_values",
        ),
        Defect(
            "the same over a shared prefix",
            online,
            "FACTORS_IN_HALF ? 0.f : 8.f",
            "8.f",
            f"{prefix_tests} -k test_e4m3_of_the_largest_values",
        ),
        Defect(
            "no room for a weight that is rounded to more than 1",
            pages,
            "VALUE_FACTOR = 224.f",
            "VALUE_FACTOR = 448.f",
            f"{prefill_tests} -k test_e4m3_of_the_largest_values",
        ),
        Defect(
            "sums are not brought to a new maximum",
            online,
            "state.sum[h] *= factor;",
            "",
            f"{prefill_tests} -k test_small_and_large",
        ),
        Defect(
            "the sum of weights lacks half of the columns",
            online,
            "  sum += __shfl_xor_sync(ALL_LANES, sum, 2);\n",
            "",
            sizes,
        ),
        Defect(
            "a split's weight ignores the scale of scores",
            online,
            "+ state.reference[h] * scale_log2",
            "+ state.reference[h]",
            f"{prefill_tests} -k test_splits",
        ),
        Defect(
            "a query that has seen no key gives NaN",
            online,
            "state.reference[h] == -INFINITY_F ? 0.f : state.reference[h]",
            "state.reference[h]",
            prefill_tests,
        ),
        Defect(
            "one item too many",
            tiled,
            ">= *p.num_items",
            "> *p.num_items",
            prefix_tests,
        ),
        Defect(
            "the token after the prefix counts",
            tiled,
            "keys.inner = {0, end - 1};",
            "keys.inner = {0, end};",
            prefix_tests,
        ),
        Defect(
            "the prefix is looked up in the first row's table",
            tiled,
            "p.slots[members[0]]",
            "p.slots[0]",
            prefix_tests,
        ),
        Defect(
            "all splits are written to the first one's place",
            tiled,
            "p.partial_start[item.token(p, m)] + item.split",
            "p.partial_start[item.token(p, m)]",
            f"{prefix_tests} -k test_splits",
        ),
    ]


def _small_kernels() -> list[Defect]:
    norm, norm_tests = "rms_norm.cu", "test_rms_norm.py -k 'test_norm or test_add'"
    rope, rope_tests = "rope_and_write.cu", "test_rope_and_write.py"
    silu, silu_tests = "silu_mul.cu", "test_silu_mul.py"
    movement = "test_token_movement.py"
    return [
        Defect(
            "warps' sums are read without a barrier", norm, "  __syncthreads();\n", "", norm_tests
        ),
        Defect(
            "no epsilon", norm, "* p.inverse_size + p.eps", "* p.inverse_size", "test_rms_norm.py"
        ),
        Defect(
            "one vector past the row",
            norm,
            "if (at < p.num_vectors) store16(p.y",
            "if (at <= p.num_vectors) store16(p.y",
            norm_tests,
        ),
        Defect(
            "the norm is of the sum before it was rounded",
            norm,
            "      unpack8<ELEMENT>(kept[v], x);  // rounded, as the residual is kept\n",
            "",
            norm_tests,
        ),
        Defect(
            "the other half is turned the wrong way",
            rope,
            "b[i] = y * cos[i] + x * sin[i];",
            "b[i] = y * cos[i] - x * sin[i];",
            rope_tests,
        ),
        Defect(
            "keys of a token that isn't written go to the page before the first",
            rope,
            "location >= 0",
            "location >= -1",
            f"{rope_tests} -k test_a_skipped",
        ),
        Defect(
            "values are written after the last KV head",
            rope,
            "(is_value ? p.num_kv_heads : 0)",
            "0",
            rope_tests,
        ),
        Defect(
            "a negative position is followed",
            rope,
            "max(p.positions[token], 0)",
            "p.positions[token]",
            f"{rope_tests} -k negative",
        ),
        Defect(
            "scales are 2% off", rope, "return size / LARGEST", "return size / 440.f", rope_tests
        ),
        Defect(
            "heads of all zeros are divided by 0",
            rope,
            "size < NEARLY_ZERO",
            "size < 0.f",
            f"{rope_tests} -k test_e4m3",
        ),
        Defect(
            "values are rotated",
            rope,
            "if (p.rotate && !is_value) rotate",
            "if (p.rotate) rotate",
            rope_tests,
        ),
        Defect(
            "idle lanes load past their head",
            rope,
            "const bool busy = lane < BUSY_LANES",
            "const bool busy = true",
            rope_tests,
        ),
        Defect(
            "only the scales of keys are written",
            rope,
            "sizeof(CACHE) == 1 && lane == 0",
            "sizeof(CACHE) == 1 && lane == 0 && !is_value",
            rope_tests,
        ),
        Defect(
            "one vector past the row",
            silu,
            "if (at >= p.num_vectors) continue;",
            "if (at > p.num_vectors) continue;",
            silu_tests,
        ),
        Defect("the exponent is a little off", silu, "-LOG2_E * x", "-1.44f * x", silu_tests),
        Defect(
            "a failed draw becomes token -1", "gather_tokens.cu", "max(token, 0)", "token", movement
        ),
        Defect(
            "one token too many",
            "gather_tokens.cu",
            "if (i >= p.num_tokens) return;",
            "if (i > p.num_tokens) return;",
            movement,
        ),
        Defect(
            "one update too many",
            "scatter_updates.cu",
            "i < count; i +=",
            "i <= count; i +=",
            movement,
        ),
    ]


def _adapters() -> list[Defect]:
    shrink, expand, tests = "lora_shrink.cu", "lora_expand.cu", "test_lora.py"
    mixed = f"{tests} -k test_several"
    return [
        Defect(
            "the warps' sums are read without a barrier",
            shrink,
            "  __syncthreads();\n",
            "",
            mixed,
        ),
        Defect(
            "A is read past the inputs",
            shrink,
            "min(begin + OF_WARP, p.inputs)",
            "min(begin + OF_WARP, p.inputs + 8)",
            f"{tests} -k test_inputs",
        ),
        Defect(
            "x of the tile's upper tokens is that of the lower ones",
            shrink,
            "const int at = row + 8 * half;",
            "const int at = row;",
            mixed,
        ),
        Defect(
            "rows of the tile that are nobody's are written",
            shrink,
            "if (own >= tile.count) return;",
            "",
            mixed,
        ),
        Defect(
            "every split is written to the first one's place",
            shrink,
            "static_cast<i64>(blockIdx.z) * p.max_tokens + tile.first",
            "tile.first",
            f"{tests} -k test_inputs",
        ),
        Defect(
            "a part's t is the first part's",
            expand,
            "        first_rank += entry.ranks[part];\n",
            "",
            mixed,
        ),
        Defect(
            "a part's B begins where the first one's does",
            expand,
            "        b += static_cast<i64>(p.outputs[part]) * entry.ranks[part];\n",
            "",
            mixed,
        ),
        Defect(
            "only the first split counts",
            expand,
            "split < splits; split++",
            "split < 1; split++",
            f"{tests} -k test_inputs",
        ),
        Defect(
            "the lower bits of t are left out",
            expand,
            "        mma<ELEMENT>(sums[g][j], lower, of_b[g][j].x, of_b[g][j].y);\n",
            "",
            tests,
        ),
        Defect(
            "columns past the part are written",
            expand,
            "if (!there[half] || column + g * GROUP + chunk * VECTOR >= part.outputs) continue;",
            "if (!there[half]) continue;",
            f"{tests} -k 'test_several or test_outputs'",
        ),
        Defect(
            "B is read in another order than y is written",
            expand,
            "row / 2 * VECTOR + row % 2",
            "row",
            mixed,
        ),
    ]


def _sampling() -> list[Defect]:
    tests = "test_sampling.py"
    each = f"{tests} -k test_each_parameter"
    return [
        Defect(
            "tokens are counted without an atomic operation",
            "mark_tokens.cu",
            "atomicAdd(marks + token, 1u);",
            "marks[token] += 1u;",
            f"{tests} -k test_counts",
            "thread",
        ),
        Defect(
            "the prompt's last token counts as output",
            "mark_tokens.cu",
            "position >= prompt_length",
            "position >= prompt_length - 1",
            tests,
        ),
        Defect(
            "a mark is left where the raw logit is not wanted",
            "scan_logits.cu",
            "raw_wanted ? keep_raw(x[i]) : 0;",
            "raw_wanted ? keep_raw(x[i]) : mark[i];",
            f"{tests} -k test_each_parameter",
        ),
        Defect(
            "the adjusted logit is kept as the raw one",
            "scan_logits.cu",
            """    marks[i] = raw_wanted ? keep_raw(x[i]) : 0;
    x[i] = adjust(x[i], first + i, mark[i], record, todo);
""",
            """    x[i] = adjust(x[i], first + i, mark[i], record, todo);
    marks[i] = raw_wanted ? keep_raw(x[i]) : 0;
""",
            f"{tests} -k test_counts",
        ),
        Defect(
            "adjusted logits are not written back",
            "scan_logits.cu",
            "    p.logits[row * p.logits_stride + first + i] = x[i];\n",
            "",
            tests,
        ),
        Defect(
            "negative logits are divided by the repetition penalty",
            "scan_logits.cu",
            "x > 0.f ? record.inverse_repetition_penalty",
            "x < 0.f ? record.inverse_repetition_penalty",
            each,
        ),
        Defect(
            "a bias is looked up one place too low",
            "scan_logits.cu",
            "if (ids[low + half] <= token)",
            "if (ids[low + half] < token)",
            tests,
        ),
        Defect(
            "an earlier number is overwritten before all have read it",
            "block.cuh",
            "  __syncthreads();  // another warp may still read what was there\n",
            "",
            tests,
        ),
        Defect(
            "a reduction reads other warps' numbers without a barrier",
            "block.cuh",
            "scratch[threadIdx.x / 32] = x;\n  __syncthreads();\n",
            "scratch[threadIdx.x / 32] = x;\n",
            each,
        ),
        Defect(
            "the sort crosses warps without a barrier",
            "block.cuh",
            "distance > 32 || last_distance > 32",
            "distance > 32",
            tests,
        ),
        Defect(
            "the sort reads other lanes' numbers without a __syncwarp",
            "block.cuh",
            "        __syncwarp();\n",
            "        ;\n",
            tests,
        ),
        Defect(
            "a running sum lacks the warps before",
            "block.cuh",
            "  before -= sum;\n  __syncthreads();\n",
            "  before -= sum;\n",
            tests,
        ),
        Defect(
            "the list overflows into what lies behind it",
            "candidates.cuh",
            " && at < LIST_CAPACITY) list[at]",
            ") list[at]",
            tests,
        ),
        Defect(
            "the guess at top_p's end is taken for certain",
            "candidates.cuh",
            "if (guess == end) return end - 1;",
            "return guess - 1;",
            tests,
        ),
        Defect(
            "what lies before an interval still counts towards its target",
            "candidates.cuh",
            "if (i > 0) target -= smaller(target, amounts[i - 1]);",
            "",
            tests,
        ),
        Defect(
            "sums of blocks are added up twice",
            "candidates.cuh",
            "if (list_begin == 0) {",
            "if (false) {",
            tests,
        ),
        Defect(
            "a sum's carry is lost",
            "candidates.cuh",
            " + (old + low < old)",
            "",
            tests,
        ),
        Defect(
            "the second race forgets what was cut",
            "draw_tokens.cu",
            "rank < end ? weight_of(rank) : 0.f",
            "weight_of(rank)",
            tests,
        ),
        Defect(
            "min_p is forgotten where top_k and top_p are on",
            "draw_tokens.cu",
            "if (step == 10) end = end_of_10;",
            "",
            tests,
        ),
        Defect(
            "top_k drops ties",
            "draw_tokens.cu",
            "end = step == 8 ? end_after(size_of(last)) : last + 1;",
            "end = last + 1;",
            tests,
        ),
        Defect(
            "top_p keeps ties",
            "draw_tokens.cu",
            "end = step == 8 ? end_after(size_of(last)) : last + 1;",
            "end = end_after(size_of(last));",
            tests,
        ),
        Defect(
            "a block that isn't there gets a summary",
            "scan_logits.cu",
            "if (first_block + i >= p.num_blocks) return;",
            "if (first_block + i > p.num_blocks) return;",
            tests,
        ),
        Defect(
            "nine rounds of Philox",
            "philox.cuh",
            "round < 10",
            "round < 9",
            "test_random_numbers.py",
        ),
        Defect(
            "the lowest bits of a random number are lost",
            "philox.cuh",
            "<< 26 | c1 >> 6",
            "<< 26",
            "test_random_numbers.py",
        ),
        Defect(
            "a bitmask's bits are one off",
            "sampling.cuh",
            "if (!(allowed >> i & 1)) x[i]",
            "if (!(allowed >> (i + 1) & 1)) x[i]",
            tests,
        ),
        Defect(
            "min_tokens is one too many",
            "sampling.cuh",
            "length - record.prompt_length < record.min_tokens",
            "length - record.prompt_length <= record.min_tokens",
            f"{tests} -k test_stop_ids",
        ),
        Defect(
            "the vocabulary's last tokens are read past the end",
            "sampling.cuh",
            "if (aligned && first + 4 <= vocab_size)",
            "if (aligned && first < vocab_size)",
            tests,
        ),
        Defect(
            "marks are left behind for the next step",
            "top_logprobs.cu",
            "atomicExch(marks + token, 0u);",
            "",
            tests,
        ),
    ]


DEFECTS = [*_decode(), *_combine(), *_prefill(), *_small_kernels(), *_adapters(), *_sampling()]
