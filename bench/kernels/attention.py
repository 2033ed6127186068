"""Cases of attention: decode, prefill, and decode over a shared prefix.

A launch is all that one layer of the product runs: the attention kernel and, where rows were split,
the kernel that merges their partial results. Rows, lengths and heads are those of common models;
Llama-3.1-8B has 32 query heads over 8 of keys and values, of 128 numbers each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.kernels.attention_data import DTYPE, AttentionData, AttentionSpec, make_data, reference
from bench.kernels.case import Case, Contestant, Contestants, Setting
from bench.kernels.flashinfer_attention import attention_peers
from bench.kernels.targets import OURS, Target
from bench.kernels.torch_attention import torch_peers
from gpu.attention import StepLayout
from gpu.cuda.attention import CudaAttention
from gpu.cuda.attention_limits import AttentionLimits
from gpu.cuda.step_buffer import StepBuffer

# One rounding of the weights and one of the result, each to bfloat16.
_TOLERANCE = 6e-3
# A cache of this size is large enough for the rate to be the memory's.
_MANY_BYTES = 0.5e9
_K = 1024

Rows = Sequence[tuple[int, int]]


def cases(*, tiny: bool) -> list[Case]:
    """Return every case of attention."""
    return _tiny_cases() if tiny else [*_decodes(), *_prefills(), *_shared()]


def _decodes() -> list[Case]:
    of_peers = [Target("peer", 1.0, "flashinfer"), Target("peer", 1.0)]
    wide = Target("case", 1.6, "decode_attention b32x8k")
    one = partial(_case, "decode_attention")
    fast = partial(one, targets=of_peers)
    short, many = _decode(32, _K), _decode(32, 8 * _K)
    return [
        one("b1x1k", _decode(1, _K), [Target("microseconds", 11.0)], first=True),
        one("b8x1k", _decode(8, _K), [Target("microseconds", 17.0)]),
        fast("b32x1k", short, flex=True, first=True),
        fast("b8x16k", _decode(8, 16 * _K)),
        fast("b32x8k", many, first=True),
        fast("b256x1k", _decode(256, _K)),
        fast("b32x8k pages of 64", many, page_size=64),
        fast("b32x8k D64", many, head_dim=64),
        fast("b32x4k group 1", _decode(32, 4 * _K), num_kv_heads=32),
        fast("b32x8k group 8", many, num_heads=64),
        fast("b32x8k window 1k", many, window=_K, first=True),
        fast("b31 of 256 to 15k", [(1, 256 + 500 * row) for row in range(31)]),
        one("b32x8k fp8", many, [wide], fp8=True, first=True),
        one("b32x1k fp8", short, fp8=True),
    ]


def _decode(batch: int, context: int) -> Rows:
    return [(1, context)] * batch


def _prefills() -> list[Case]:
    fa2 = Target("peer", 1.0, "flashinfer fa2")
    # Its tiles are full and their operations many: nothing but the matrix rate bounds it.
    whole = Target("floor", 0.85)
    prefill = partial(_case, "prefill_attention", targets=[fa2])
    long = 8 * _K
    prompt, chunk = [(long, long)], [(512, long + 512)]
    return [
        prefill("8k", prompt, targets=[whole, fa2], flex=True, first=True),
        prefill("4x2k", [(2 * _K, 2 * _K)] * 4),
        prefill("512 on 8k", chunk, first=True),
        prefill("64 on 8k", [(64, long + 64)]),
        prefill("8k D64", prompt, head_dim=64),
        prefill("8k window 1k", prompt, window=_K),
        prefill("512 on 8k fp8", chunk, fp8=True),
    ]


def _shared() -> list[Case]:
    targets = [Target("floor", 0.9), Target("peer", 1.0)]
    rows, shared = _decode(32, 8 * _K + 256), 8 * _K
    return [_case("shared_prefix", "b32 sharing 8k", rows, targets, shared=shared, first=True)]


def _tiny_cases() -> list[Case]:
    """Return every path once: splits or none, a window, e4m3, both kinds of rows, a prefix."""
    case = partial(_case, num_heads=4, num_kv_heads=2, head_dim=64)
    # Sharing less than this would not pay.
    sharing = {"num_heads": 8, "num_kv_heads": 8, "shared": 48 * 16}
    return [
        case("decode_attention", "tiny", [(1, 37), (1, 300), (1, 1)]),
        case("decode_attention", "tiny window", [(1, 90), (1, 20)], window=33),
        case("decode_attention", "tiny fp8", [(1, 50), (1, 17)], fp8=True),
        case("prefill_attention", "tiny", [(20, 20), (7, 40)]),
        case("prefill_attention", "tiny window", [(30, 45)], window=16),
        case("shared_prefix", "tiny", [(1, 48 * 16 + own) for own in range(1, 17)], **sharing),
    ]


def _case(
    kernel: str,
    shape: str,
    rows: Rows,
    targets: Sequence[Target] = (),
    *,
    flex: bool = False,
    first: bool = False,
    **sizes: Any,
) -> Case:
    """Return a case; ``sizes`` are those of :class:`AttentionSpec`."""
    spec = AttentionSpec(rows=rows, **sizes)
    if kernel == "decode_attention" and spec.work.bytes >= _MANY_BYTES:
        targets = [Target("floor", 0.95), *targets]
    make = partial(_contestants, spec, flex)
    return Case(kernel=kernel, shape=shape, work=spec.work, make=make, targets=targets, first=first)


def _contestants(spec: AttentionSpec, flex: bool, setting: Setting) -> Contestants:
    data = make_data(spec, setting)

    def ours() -> Contestant:
        return Contestant.over(
            [(layer, buffers.q, spec.window) for layer, buffers in enumerate(data.sets)],
            _prepared(data, setting).attend,
            lambda: reference(data),
            found=lambda out: out,
            tolerance=_TOLERANCE,
        )

    return {OURS: ours, **attention_peers(data), **torch_peers(data, flex=flex)}


def _prepared(data: AttentionData, setting: Setting) -> CudaAttention:
    """Return the attention of the product, ready for the layers of a step over ``data``."""
    spec = data.spec
    rows, counts, contexts = len(spec.rows), np.array(spec.counts), np.array(spec.contexts)
    limits = AttentionLimits(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        windows=(spec.window,),
        max_rows=rows,
        max_tokens=int(counts.sum()),
        max_model_len=int(contexts.max()),
        num_multiprocessors=setting.loader.num_multiprocessors,
    )
    buffer = StepBuffer(setting.device, limits.regions())
    attention = CudaAttention(
        setting.loader,
        buffer=buffer,
        block_tables=data.block_tables,
        cache=data.cache,
        limits=limits,
        dtype=DTYPE,
        cos_sin=torch.zeros(limits.max_model_len, spec.head_dim, device=setting.device),
    )
    layout = StepLayout(
        positions=np.concatenate([np.arange(end - n, end) for n, end in spec.rows]),
        query_start=np.concatenate([[0], counts.cumsum()]),
        context_lens=contexts,
        slots=np.arange(rows),
        block_tables=data.block_tables.cpu().numpy(),
        num_decode_rows=rows if spec.decodes else 0,
    )
    if spec.shared and attention.find_shared(layout, rows) is None:
        raise ValueError("the rows share pages, but no group of them was made")
    attention.begin(layout)
    buffer.upload()
    return attention
