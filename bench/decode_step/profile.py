"""Where a decode step's time goes: each kernel's share, by torch's profiler.

Kernels are seen one by one only where they are launched one by one, so this looks at steps without
CUDA graphs. Profiling costs the host time, not the device: the gaps between kernels are not those
of a step that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from bench.kernels.report import markdown_table

_LONGEST_NAME = 60


@attrs.frozen(kw_only=True)
class KernelShare:
    """One kernel in one step: how often it is launched, and its seconds on the device."""

    name: str
    launches: float
    seconds: float


def profile_steps(run: Callable[[], object], num_steps: int) -> list[KernelShare]:
    """Run ``run``, which computes ``num_steps`` steps, and tell what the device did for each."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    return shares(profiler.key_averages(), num_steps)


def shares(events: Iterable[Any], num_steps: int) -> list[KernelShare]:
    """The profiler's averages as kernels of a step, the longest first."""
    found = [
        KernelShare(
            name=event.key,
            launches=event.count / num_steps,
            seconds=event.self_device_time_total / num_steps / 1e6,
        )
        for event in events
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda share: -share.seconds)


def shares_table(found: list[KernelShare], most: int = 12) -> str:
    """The ``most`` longest, and all others in one line."""
    total = sum(share.seconds for share in found)
    rest = KernelShare(
        name="all others",
        launches=sum(share.launches for share in found[most:]),
        seconds=sum(share.seconds for share in found[most:]),
    )
    rows = [
        [
            share.name[:_LONGEST_NAME],
            f"{share.launches:.0f}",
            f"{share.seconds * 1e6:.0f}",
            f"{share.seconds / total:.1%}",
        ]
        for share in [*found[:most], rest]
        if share.launches
    ]
    return markdown_table(["kernel", "launches", "µs a step", "share"], rows)
