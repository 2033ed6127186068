"""The times of steps, by which drafts are chosen."""

from __future__ import annotations

import time

from gpu.executor import Executor
from gpu.loading.loaded_model import warm_up
from gpu.sampling.drafting.step_times import SIZES, StepTimes
from gpu.slots import SlotTable

_MEASUREMENTS = 3


def measure_steps(executor: Executor, slots: SlotTable, page_size: int, max_rows: int) -> StepTimes:
    """Return the times of the executor's steps of up to ``max_rows`` rows; ``slots`` are empty.

    The time of each size is that of the quickest of a few steps.
    """
    most = min(slots.num_pages, max_rows)
    measured: dict[int, float] = {}
    for size in [size for size in SIZES if size <= most]:
        times: list[float] = []
        for _ in range(_MEASUREMENTS):
            began = time.perf_counter()
            warm_up(executor, slots, [1] * size, page_size)
            times.append(time.perf_counter() - began)
        measured[size] = min(times)
    return StepTimes(measured)
