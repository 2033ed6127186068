"""Targets of kernels, as ratios within one run, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

DECODE_STEP = 1.10
"""The longest decode step, in floors."""
DECODE_ATTENTION = 0.95
"""The least share of the copy rate that decode attention reaches on large caches."""
PREFILL_ATTENTION = 0.85
"""The least share of the matrix rate that attention over a long prompt reaches."""
IDLE_SHARE = 0.02
"""The share of its time below which the GPU waits between steps."""


@attrs.frozen(kw_only=True)
class Target:
    """One target of a case.

    ``kind`` says what ``value`` is:

    - ``floor``: the least share of the floor's rate, floor / measured;
    - ``microseconds``: the longest time;
    - ``peer``: the least ratio of the time of ``of`` to ours. ``of`` is a peer's name, or the first
      word of several, of which the fastest counts; "" is the fastest of all;
    - ``case``: the least ratio of the time of the case titled ``of`` to ours.
    """

    kind: str
    value: float
    of: str = ""

    @property
    def text(self) -> str:
        """The target in a table's cell."""
        if self.kind == "floor":
            return f"≥ {self.value:g} of the floor"
        if self.kind == "microseconds":
            return f"≤ {self.value:g} µs"
        other = self.of or "the best peer"
        if self.kind == "peer" and self.of and " " not in self.of:
            other = f"the best of {self.of}"
        return f"≥ {self.value:g} times {other}"


@attrs.frozen(kw_only=True)
class Result:
    """The seconds of one case: the floor, ours, and each peer that ran."""

    title: str
    floor: float
    seconds: float
    peers: Mapping[str, float]


@attrs.frozen(kw_only=True)
class Judged:
    """A target beside what was reached; ``met`` is None where there was nothing to compare with."""

    target: Target
    reached: float | None
    met: bool | None

    @property
    def text(self) -> str:
        """The verdict in a table's cell."""
        if self.reached is None:
            return f"{self.target.text}: nothing to compare with"
        verdict = "met" if self.met else "MISSED"
        return f"{self.target.text}: {verdict} ({self.reached:.2f})"


def judge(target: Target, result: Result, others: Mapping[str, Result]) -> Judged:
    """Return whether ``result`` reaches ``target``; ``others`` are all cases by title."""
    reached = _reached(target, result, others)
    met = None
    if reached is not None:
        met = reached <= target.value if target.kind == "microseconds" else reached >= target.value
    return Judged(target=target, reached=reached, met=met)


def _reached(target: Target, result: Result, others: Mapping[str, Result]) -> float | None:
    if target.kind == "floor":
        return result.floor / result.seconds
    if target.kind == "microseconds":
        return result.seconds * 1e6
    if target.kind == "case":
        other = others.get(target.of)
        return other.seconds / result.seconds if other else None
    assert target.kind == "peer", target
    chosen = [s for name, s in result.peers.items() if _is_of(name, target.of)]
    return min(chosen) / result.seconds if chosen else None


def _is_of(name: str, of: str) -> bool:
    """Return whether ``of`` is empty, ``name`` or its first word."""
    return of in ("", name) or name.partition(" ")[0] == of
