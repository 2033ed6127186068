"""The times of steps, by which drafts are chosen."""

from __future__ import annotations

import time

from gpu.executor import Executor
from gpu.loading.loaded_model import warm_up
from gpu.sampling.drafting.step_times import SIZES, StepTimes
from gpu.slots import SlotTable

_MEASUREMENTS = 3


def measure_steps(
    executor: Executor, slots: SlotTable, page_size: int, max_rows: int, *, reported: bool = False
) -> StepTimes:
    """Return the times of the executor's steps of up to ``max_rows`` rows; ``slots`` are empty.

    The time of each size is that of the quickest of a few steps: the one that passes, or the one
    that is ``reported`` by the step, which with several stages is that of the slowest.
    """
    most = min(slots.num_pages, max_rows)
    measured: dict[int, float] = {}
    for size in [size for size in SIZES if size <= most]:
        times: list[float] = []
        for _ in range(_MEASUREMENTS):
            began = time.perf_counter()
            result = warm_up(executor, slots, [1] * size, page_size)
            passed = time.perf_counter() - began
            times.append(result.step_us / 1e6 if reported else passed)
        measured[size] = min(times)
    return StepTimes(measured)
