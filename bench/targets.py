"""What a kernel is to reach, as ratios within one run, and whether it did."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["Judged", "Result", "Target", "judge"]


@attrs.frozen(kw_only=True)
class Target:
    """One thing that a case is to reach.

    ``kind`` says what ``value`` is:

    - ``floor``: the least share of the floor's rate, floor / measured;
    - ``microseconds``: the longest time;
    - ``peer``: the least ratio of the time of ``of`` (a peer's name; "" is the fastest) to ours;
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
    """Whether ``result`` reaches ``target``; ``others`` are all cases of the run by title."""
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
    chosen = [s for name, s in result.peers.items() if target.of in ("", name)]
    return min(chosen) / result.seconds if chosen else None
