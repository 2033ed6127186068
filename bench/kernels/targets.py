"""Targets of kernels, as ratios within one run."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

DECODE_STEP = 1.10
"""The longest decode step, in floors."""
IDLE_SHARE = 0.02
"""The share of its time below which the GPU waits between steps."""
OURS = "ours"
"""The contestant of a case that isn't a peer."""


@attrs.frozen
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

    def reached(
        self, floor: float, seconds: Mapping[str, float], others: Mapping[str, float]
    ) -> float | None:
        """Return the case's figure, None where there is nothing to compare with.

        ``seconds`` are those of the case's contestants; ``others`` ours of all cases by title.
        """
        if self.kind == "floor":
            return floor / seconds[OURS]
        if self.kind == "microseconds":
            return seconds[OURS] * 1e6
        if self.kind == "case":
            return others[self.of] / seconds[OURS] if self.of in others else None
        assert self.kind == "peer", self
        # The target is one peer, all of a library, or all there are.
        peers = {name: s for name, s in seconds.items() if name != OURS}
        chosen = [s for name, s in peers.items() if self.of in ("", name, name.split()[0])]
        return min(chosen) / seconds[OURS] if chosen else None

    def met(self, reached: float | None) -> bool | None:
        """Return whether the figure reaches the target, None if there is none."""
        if reached is None:
            return None
        return reached <= self.value if self.kind == "microseconds" else reached >= self.value

    def verdict(self, reached: float | None) -> str:
        """Return the verdict in a table's cell."""
        if reached is None:
            return f"{self.text}: nothing to compare with"
        return f"{self.text}: {'met' if self.met(reached) else 'MISSED'} ({reached:.2f})"
