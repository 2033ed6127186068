"""Every case there is."""

from __future__ import annotations

from bench.kernel_cases import Case, attention, fused, sampling

__all__ = ["all_cases"]


def all_cases(*, tiny: bool) -> list[Case]:
    """The cases in the order in which they run; ``tiny`` ones are for the emulation."""
    return [*attention.cases(tiny=tiny), *fused.cases(tiny=tiny), *sampling.cases(tiny=tiny)]
