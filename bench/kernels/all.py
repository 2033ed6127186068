"""Every case there is."""

from __future__ import annotations

from bench.kernels import attention, fused, lora, sampling
from bench.kernels.case import Case


def all_cases(*, tiny: bool) -> list[Case]:
    """Return the cases in the order in which they run; ``tiny`` ones are for the emulation."""
    modules = (attention, fused, lora, sampling)
    return [case for module in modules for case in module.cases(tiny=tiny)]
