"""Cases of attention: decode, prefill, and decode over a shared prefix.

A launch is all that one layer runs: the attention kernel and, where rows were split, the kernel
that merges their partial results. Rows, lengths and heads are those of common models; Llama-3.1-8B
has 32 query heads over 8 of keys and values, of 128 numbers each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from bench.kernels.attention_data import AttentionData, AttentionSpec, make_data, reference
from bench.kernels.attention_launches import decode_launches, prefill_launches, shared_launches
from bench.kernels.case import Case, Contestant, Peer, Setting, Trial, poison, relative_error
from bench.kernels.flashinfer_attention import attention_peers, cascade_peers
from bench.kernels.roofline import decode_attention, prefill_attention, shared_prefix_attention
from bench.kernels.targets import DECODE_ATTENTION, PREFILL_ATTENTION, Target
from bench.kernels.timing import Launch
from bench.kernels.torch_attention import torch_peers

_E4M3 = torch.float8_e4m3fn
# One rounding of the weights and one of the result, each to bfloat16.
_TOLERANCE = 6e-3
# A cache of this size is large enough for the rate to be the memory's.
_MANY_BYTES = 0.5e9
_K = 1024


def cases(*, tiny: bool) -> list[Case]:
    """Return every case of attention."""
    return _tiny_cases() if tiny else [*_decodes(), *_prefills(), *_shared()]


def _decodes() -> list[Case]:
    def rows(batch: int, context: int) -> tuple[tuple[int, int], ...]:
        return ((1, context),) * batch

    fastest = [
        Target(kind="peer", value=1.0, of="flashinfer"),
        Target(kind="peer", value=1.0),
    ]
    at_most = partial(Target, kind="microseconds")
    found = [
        _decode("b1x1k", AttentionSpec(rows=rows(1, _K)), at_most(value=11.0), quick=True),
        _decode("b8x1k", AttentionSpec(rows=rows(8, _K)), at_most(value=17.0)),
        _decode("b32x1k", AttentionSpec(rows=rows(32, _K)), *fastest, flex=True, quick=True),
        _decode("b8x16k", AttentionSpec(rows=rows(8, 16 * _K)), *fastest),
        _decode("b32x8k", AttentionSpec(rows=rows(32, 8 * _K)), *fastest, quick=True),
        _decode("b256x1k", AttentionSpec(rows=rows(256, _K)), *fastest),
        _decode("b32x8k pages of 64", AttentionSpec(rows=rows(32, 8 * _K), page_size=64), *fastest),
        _decode("b32x8k D64", AttentionSpec(rows=rows(32, 8 * _K), head_dim=64), *fastest),
        _decode("b32x4k group 1", AttentionSpec(rows=rows(32, 4 * _K), num_kv_heads=32), *fastest),
        _decode("b32x8k group 8", AttentionSpec(rows=rows(32, 8 * _K), num_heads=64), *fastest),
        _decode(
            "b32x8k window 1k",
            AttentionSpec(rows=rows(32, 8 * _K), window=_K),
            *fastest,
            quick=True,
        ),
        _decode(
            "b31 of 256 to 15k",
            AttentionSpec(rows=tuple((1, 256 + 500 * row) for row in range(31))),
            *fastest,
        ),
    ]
    wide = Target(kind="case", value=1.6, of="decode_attention b32x8k")
    found += [
        _decode("b32x8k fp8", _fp8(rows(32, 8 * _K)), wide, quick=True),
        _decode("b32x1k fp8", _fp8(rows(32, _K))),
    ]
    return found


def _fp8(rows: tuple[tuple[int, int], ...]) -> AttentionSpec:
    return AttentionSpec(rows=rows, cache_dtype=_E4M3)


def _prefills() -> list[Case]:
    no_slower = Target(kind="peer", value=1.0, of="flashinfer fa2")
    # Its tiles are full and their operations many: nothing but the matrix rate bounds it.
    whole = Target(kind="floor", value=PREFILL_ATTENTION)
    long = 8 * _K
    prompt = AttentionSpec(rows=((long, long),))
    return [
        _prefill("8k", prompt, whole, no_slower, flex=True, quick=True),
        _prefill("4x2k", AttentionSpec(rows=((2 * _K, 2 * _K),) * 4), no_slower),
        _prefill("512 on 8k", AttentionSpec(rows=((512, long + 512),)), no_slower, quick=True),
        _prefill("64 on 8k", AttentionSpec(rows=((64, long + 64),)), no_slower),
        _prefill("8k D64", AttentionSpec(rows=((long, long),), head_dim=64), no_slower),
        _prefill("8k window 1k", AttentionSpec(rows=((long, long),), window=_K), no_slower),
        _prefill("512 on 8k fp8", _fp8(((512, long + 512),)), no_slower),
    ]


def _shared() -> list[Case]:
    spec = AttentionSpec(rows=((1, 8 * _K + 256),) * 32, shared=8 * _K)
    targets = [Target(kind="floor", value=0.9), Target(kind="peer", value=1.0)]
    return [_shared_prefix("b32 sharing 8k", spec, *targets, quick=True)]


def _tiny_cases() -> list[Case]:
    """Return every path once: splits or none, a window, e4m3, both kinds of rows, a prefix."""
    small = attrs.evolve(
        AttentionSpec(rows=((1, 5),)), num_heads=4, num_kv_heads=2, head_dim=64, page_size=16
    )
    evolve = attrs.evolve
    return [
        _decode("tiny", evolve(small, rows=((1, 37), (1, 300), (1, 1)))),
        _decode("tiny window", evolve(small, rows=((1, 90), (1, 20)), window=33)),
        _decode("tiny fp8", evolve(small, rows=((1, 50), (1, 17)), cache_dtype=_E4M3)),
        _prefill("tiny", evolve(small, rows=((20, 20), (7, 40)))),
        _prefill("tiny window", evolve(small, rows=((30, 45),), window=16)),
        _shared_prefix("tiny", evolve(small, rows=((1, 70), (1, 85), (1, 66)), shared=64)),
    ]


def _decode(
    name: str, spec: AttentionSpec, *targets: Target, flex: bool = False, quick: bool = False
) -> Case:
    work = decode_attention(spec.work_shape, spec.contexts, spec.window)
    wanted = list(targets)
    if work.bytes >= _MANY_BYTES:
        wanted.insert(0, Target(kind="floor", value=DECODE_ATTENTION))
    return Case(
        kernel="decode_attention",
        shape=name,
        work=work,
        make=partial(_trial, spec, decode_launches, flex),
        targets=wanted,
        quick=quick,
    )


def _prefill(
    name: str, spec: AttentionSpec, *targets: Target, flex: bool = False, quick: bool = False
) -> Case:
    return Case(
        kernel="prefill_attention",
        shape=name,
        work=prefill_attention(spec.work_shape, spec.rows, spec.window),
        make=partial(_trial, spec, prefill_launches, flex),
        targets=targets,
        quick=quick,
    )


def _shared_prefix(name: str, spec: AttentionSpec, *targets: Target, quick: bool = False) -> Case:
    suffixes = [context - spec.shared for context in spec.contexts]
    return Case(
        kernel="shared_prefix",
        shape=name,
        work=shared_prefix_attention(spec.work_shape, spec.shared, suffixes),
        make=partial(_trial, spec, shared_launches, False),
        targets=targets,
        quick=quick,
    )


def _trial(
    spec: AttentionSpec,
    make_launches: Callable[[AttentionData, Setting], Sequence[Launch]],
    flex: bool,
    setting: Setting,
) -> Trial:
    data = make_data(spec, setting)
    launches = make_launches(data, setting)

    def error() -> float:
        poison(data.sets[0].out)
        launches[0]()
        return relative_error(data.sets[0].out, reference(data))

    peers: list[Peer] = attention_peers(data)
    if spec.shared:
        peers = [*cascade_peers(data), *peers]
    peers += torch_peers(data, flex=flex)
    ours = Contestant(launches=launches, error=error, tolerance=_TOLERANCE)
    return Trial(ours=ours, peers=peers)
