"""The goals on a GPU, and how a peer is chosen among the back ends of a library."""

from __future__ import annotations

import pytest

from bench.kernels import targets
from bench.kernels.__main__ import all_cases
from bench.kernels.case import Case
from bench.kernels.targets import OURS, Target

PEERS = {"flashinfer fa2": 3.0, "flashinfer xqa": 2.0, "torch flash": 1.0}


def reached(of: str, peers: dict[str, float]) -> float | None:
    return Target(kind="peer", value=1.0, of=of).reached(1.0, {OURS: 2.0, **peers}, {})


def named(title: str) -> Case:
    [case] = [case for case in all_cases(tiny=False) if case.title == title]
    return case


def test_a_library_counts_with_its_fastest_back_end() -> None:
    assert reached("flashinfer", PEERS) == 1.0
    assert reached("flashinfer fa2", PEERS) == 1.5
    assert reached("", PEERS) == 0.5
    assert reached("flashinfer", {"torch flash": 1.0}) is None


def test_the_goals() -> None:
    assert (targets.DECODE_STEP, targets.IDLE_SHARE) == (1.10, 0.02)
    assert Target(kind="floor", value=0.95) in named("decode_attention b32x8k").targets
    assert Target(kind="floor", value=0.85) in named("prefill_attention 8k").targets


@pytest.mark.parametrize("shape", ["b32x1k", "b8x16k", "b256x1k", "b32x8k D64"])
def test_decode_attention_is_held_to_flashinfer(shape: str) -> None:
    of_flashinfer = Target(kind="peer", value=1.0, of="flashinfer")
    assert of_flashinfer in named(f"decode_attention {shape}").targets
    assert of_flashinfer.text == "≥ 1 times the best of flashinfer"
