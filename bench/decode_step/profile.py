"""Shares of the kernels in a decode step's time, by torch's profiler.

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


@attrs.frozen(kw_only=True)
class KernelShare:
    """One kernel in one step: its launches, and its seconds on the device."""

    name: str
    launches: float
    seconds: float


def profile_steps(run: Callable[[], object], num_steps: int) -> list[KernelShare]:
    """Run ``run``, which computes ``num_steps`` steps, and return what the device did for each."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return shares(profiler.key_averages(), num_steps)


def shares(events: Iterable[Any], num_steps: int) -> list[KernelShare]:
    """Return the profiler's averages as kernels of a step, the longest first."""
    found = []
    for event in events:
        if event.self_device_time_total > 0:
            seconds = event.self_device_time_total / num_steps / 1e6
            launches = event.count / num_steps
            found.append(KernelShare(name=event.key, launches=launches, seconds=seconds))
    return sorted(found, key=lambda share: -share.seconds)


def shares_table(found: list[KernelShare], most: int = 12) -> str:
    """Return the ``most`` longest, and all others in one line."""
    total, left = sum(share.seconds for share in found), found[most:]
    launches, seconds = sum(one.launches for one in left), sum(one.seconds for one in left)
    rest = KernelShare(name="all others", launches=launches, seconds=seconds)
    rows = []
    for one in [*found[:most], rest]:
        if one.launches:
            cells = [one.name[:60], f"{one.launches:.0f}", f"{one.seconds * 1e6:.0f}"]
            rows.append([*cells, f"{one.seconds / total:.1%}"])
    return markdown_table(["kernel", "launches", "µs a step", "share"], rows)
