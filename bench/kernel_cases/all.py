"""Every case there is."""

from __future__ import annotations

from bench.kernel_cases import Case, attention, fused, lora, sampling


def all_cases(*, tiny: bool) -> list[Case]:
    """The cases in the order in which they run; ``tiny`` ones are for the emulation."""
    modules = (attention, fused, lora, sampling)
    return [case for module in modules for case in module.cases(tiny=tiny)]
