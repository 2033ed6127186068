"""The result of loading a model, and helpers that all ways of loading share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from gpu.constraints.adjuster import Constraints
from gpu.executor import Executor
from gpu.loading.weight_swap import ModelWeights, ReadWeights
from gpu.lora.store import AdapterStore
from gpu.runner import Runner
from gpu.slots import SlotTable
from trioserve.protocol.machine import Machine
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, Ready, from_ints

MOST_THREADS = 1024
"""The most threads that ``--num-threads`` may ask for."""

OnProgress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""


def of_weights(on_progress: OnProgress) -> Callable[[int, int], None]:
    """``on_progress`` for the stage in which weights are read."""
    return lambda done, total: on_progress("weights", done, total)


def unseen(stage: str, done: int, total: int) -> None:
    """Ignore the progress: an :data:`OnProgress` for loading without a report."""


@attrs.frozen(kw_only=True)
class Loaded:
    """A model on a device, with its KV cache."""

    executor: Executor
    slots: SlotTable
    num_pages: int
    device_name: str
    computing: str
    """The kernels and the formats of weights in use, in a few words for the log."""
    read_weights: ReadWeights
    warning: str = ""
    """Field of :class:`~trioserve.protocol.wire.Ready`."""
    adapters: AdapterStore[Any] | None = None
    """The adapters that sequences may have; None where none can be served."""
    num_host_pages: int = 0
    """Pages of the KV cache in the host's memory."""
    free_memory: int = 0
    """Bytes of the GPU's memory that were free before."""


@attrs.frozen(kw_only=True)
class Serving:
    """A loaded model that is ready for plans, and what the engine is told of it."""

    runner: Runner
    weights: ModelWeights[Any] | None
    """The weights, for a weight swap; None where they can't be swapped."""
    constraints: Constraints | None
    """Constraints on draws; None where nothing is drawn."""
    ready: Ready
    adapters: AdapterStore[Any] | None = None
    """The adapters; None where none can be served."""
    calls: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    """The model's own calls, by name: functions of the arguments."""


def choose_num_threads(asked: int) -> int:
    """Return the number of threads to compute with; 0 stands for OMP_NUM_THREADS or all cores."""
    # That variable may be a list, of which the first is for the outermost level.
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked == 0 and told.isdecimal():
        asked = min(int(told), MOST_THREADS)
    return asked or max(int(Machine().cores()), 1)


def warm_up(
    executor: Executor, slots: SlotTable, prompt_lengths: Sequence[int], page_size: int
) -> None:
    """Prefill and sample prompts in one step, so that libraries load and allocate beforehand.

    ``slots`` is left empty.
    """
    opened = []
    first_page = 0
    for slot, length in enumerate(prompt_lengths):
        num_pages = -(-length // page_size)
        opened.append(
            OpenSlot(
                slot=slot,
                generation=0,
                tokens=from_ints([0] * length),
                prompt_length=length,
                computed=0,
                pages=from_ints(range(first_page, first_page + num_pages)),
                sampler=SamplerParams(temperature=0.0),
            )
        )
        first_page += num_pages
    plan = Plan(
        number=1,
        opened=opened,
        row_slots=from_ints(range(len(opened))),
        row_counts=from_ints(prompt_lengths),
    )
    Runner(executor, slots, max_num_batched_tokens=sum(prompt_lengths)).step(plan)
    slots.clear()
    for each in opened:
        executor.close(each.slot)
