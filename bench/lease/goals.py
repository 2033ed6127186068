"""The table of docs/kernels.md: each goal on a GPU beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from bench.kernels.report import markdown_table
from bench.kernels.targets import DECODE_ATTENTION, DECODE_STEP, IDLE_SHARE, PREFILL_ATTENTION

UNMEASURED = "not yet measured on a GPU"

_GOALS = f"""
decode_attention | ≥ {DECODE_ATTENTION:g} of the floor | \
decode attention from 0.5 GB of keys and values | ≥ {DECODE_ATTENTION:g} of the copy rate
decode_attention | ≥ 1 times the best of flashinfer | \
decode attention, 16-bit, from 32 rows or 16k tokens | \
≥ 1 times the best of FlashInfer (fa2, fa3, xqa)
decode_attention | ≥ 1 times the best peer | the same | \
≥ 1 times the best of all peers: torch's flash, cuDNN and flex attention, too
decode_attention | ≤ 11 µs | decode attention, 1 row of 1,024
decode_attention | ≤ 17 µs | decode attention, 8 rows of 1,024
decode_attention | ≥ 1.6 times decode_attention b32x8k | \
decode attention with an e4m3 cache | ≥ 1.6 times as fast as with 16 bits
prefill_attention | ≥ 1 times flashinfer fa2 | prefill attention | ≥ 1 times FlashInfer's fa2
prefill_attention | ≥ {PREFILL_ATTENTION:g} of the floor | \
prefill attention, 8,192 tokens | ≥ {PREFILL_ATTENTION:g} of the matrix rate
shared_prefix | ≥ 0.9 of the floor | decode over a shared prefix | \
≥ 0.9 of the floor with the prefix read once
shared_prefix | ≥ 1 times the best peer | the same | ≥ 1 times the best of all peers
rope_and_write | ≥ 0.8 of the floor | rope_and_write, 8,192 tokens
rope_and_write | ≤ 3 µs | rope_and_write, a decode batch
rms_norm | ≥ 0.85 of the floor | rms_norm, 8,192 tokens
silu_mul | ≥ 0.9 of the floor | silu_mul, 8,192 tokens
sampling | ≤ 15 µs | sampling, 1 row
sampling | ≤ 100 µs | sampling, 256 rows
gather_tokens | ≤ 3 µs | gather_tokens
lora | ≤ 8 µs | adapters of rank 16 from 4,096 to 4,096: 1 token
lora | ≤ 10 µs | the same, 32 tokens with 8 adapters
lora | ≥ 0.5 of the floor | the same, 8,192 tokens with 4 adapters
"""
KERNEL_GOALS: dict[tuple[str, str], tuple[str, str]] = {}
"""A kernel's name and a target's text, and the table's words for both."""
for _line in _GOALS.strip().splitlines():
    _kernel, _target, _what, *_words = _line.split(" | ")
    KERNEL_GOALS[_kernel, _target] = (_what, *(_words or [_target]))


@attrs.frozen
class _Reached:
    """The figure of one case; ``excess`` grows with the distance from its goal."""

    title: str
    figure: str
    met: bool
    excess: float


def goals_page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all goals, with the worst case of each in ``results``."""
    rows = []
    for (kernel, text), words in KERNEL_GOALS.items():
        found = [one for result in results for one in _of_kernel(result, kernel, text)]
        rows.append([*words, _worst(found)])
    step = _worst([one for result in results for one in _steps(result, _floors)])
    idle = _worst([one for result in results for one in _steps(result, _idle)])
    engine = _worst([one for result in results for one in _engine(result)])
    bound = f"< {IDLE_SHARE * 100:g} %"
    rows += [
        ["a decode step of Llama-3.1-8B's shape", f"≤ {DECODE_STEP:.2f} floors", step],
        ["the GPU's idle time between steps, at the runner", bound, idle],
        ["the same behind 256 streaming HTTP clients", bound, engine],
    ]
    return markdown_table(["what", "target", "measured"], rows)


def _worst(found: Sequence[_Reached]) -> str:
    if not found:
        return UNMEASURED
    worst = max(found, key=lambda one: (not one.met, one.excess))
    return f"{worst.figure} ({worst.title}): {'met' if worst.met else '**missed**'}"


def _of_kernel(result: Mapping[str, Any], kernel: str, text: str) -> list[_Reached]:
    found = []
    for case in result.get("cases", ()):
        for target in case["targets"]:
            if (case["kernel"], target["target"]) != (kernel, text) or target["reached"] is None:
                continue
            reached = target["reached"]
            excess = reached if text.startswith("≤") else -reached
            found.append(_Reached(case["shape"], f"{reached:.2f}", target["met"], excess))
    return found


def _steps(
    result: Mapping[str, Any], judge: Callable[[str, Mapping[str, Any]], _Reached]
) -> list[_Reached]:
    """Judge the steps in the mode of a server: graphs, and two plans in flight."""
    return [
        judge(f"{step['scenario']['rows']}x{step['scenario']['context']}", step)
        for step in result.get("steps", ())
        if step["graphs"] and step["in_flight"] == 2 and step["times"]
    ]


def _floors(title: str, step: Mapping[str, Any]) -> _Reached:
    floors = step["times"]["step"] / step["floor_seconds"]
    return _Reached(title, f"{floors:.2f} floors", floors <= DECODE_STEP, floors)


def _idle(title: str, step: Mapping[str, Any]) -> _Reached:
    share = step["idle_share"]
    return _Reached(title, f"{share:.1%}", share < IDLE_SHARE, share)


def _engine(result: Mapping[str, Any]) -> list[_Reached]:
    steady = result.get("steady")
    if not steady:
        return []
    share = steady["idle_share"]
    return [_Reached(f"{result['streams']} streams", f"{share:.1%}", share < IDLE_SHARE, share)]
