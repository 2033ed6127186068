"""The result of loading a model, and helpers shared by all loaders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from gpu.constraints.adjuster import Constraints
from gpu.executor import Executor, PagedExecutor
from gpu.loading.page_transfers import PageTransfers
from gpu.loading.weight_swap import ModelWeights, ReadWeights
from gpu.lora.store import AdapterStore
from gpu.runner import Runner
from gpu.slots import SlotTable
from trioserve.protocol.machine import Machine
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, Ready, Start, StepResult, from_ints

MOST_THREADS = 1024
"""Upper limit of ``--num-threads``."""

OnProgress = Callable[[str, int, int], None]
"""Reports progress; called with a stage, the amount done and the total."""


def of_weights(on_progress: OnProgress) -> Callable[[int, int], None]:
    """Return a function of (bytes done, bytes in total) that reports the stage ``weights``."""
    return lambda done, total: on_progress("weights", done, total)


def unseen(stage: str, done: int, total: int) -> None:
    """Do nothing: an :data:`OnProgress` for loading without a report."""


def option_that_moves_pages(start: Start) -> str:
    """Return the option for which pages have to leave the worker; empty if none is given."""
    if start.kv_offloading_dir:
        return "--kv-offloading-dir"
    return "--disaggregation" if start.hands_over else ""


@attrs.frozen(kw_only=True)
class Loaded:
    """A model on a device, with its KV cache."""

    executor: PagedExecutor
    slots: SlotTable
    num_pages: int
    device_name: str
    computing: str
    """The kernels and weight formats in use, in a few words for the log."""
    arithmetic: str = attrs.Factory(lambda self: self.computing, takes_self=True)
    """Words for all that decides the bits of keys and values besides weights, number formats and
    tokens. It doesn't tell processes apart that give the same bits.
    """
    lends_pages: bool = True
    """True if pages may be transferred to files and to other workers."""
    read_weights: ReadWeights
    make_weights: Callable[[Callable[[Path], Any], ReadWeights], ModelWeights[Any]] = ModelWeights
    """Makes what exchanges the weights, of what opens other files and of ``read_weights``."""
    warning: str = ""
    """See :class:`~trioserve.protocol.wire.Ready`."""
    adapters: AdapterStore[Any] | None = None
    """The loaded adapters; None if the model can't serve any."""
    num_host_pages: int = 0
    """Number of KV pages in host memory."""
    max_row_tokens: int = 1
    """See :class:`~trioserve.protocol.wire.Ready`."""
    num_stages: int = 1
    """See :class:`~trioserve.protocol.wire.Ready`."""
    free_memory: int = 0
    """Bytes of GPU memory that were free before loading."""
    calls_beside: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    """Calls that only this model answers, as :attr:`Serving.calls_beside`."""


@attrs.frozen(kw_only=True)
class Serving:
    """A loaded model that is ready for plans, and the message that tells the engine so."""

    runner: Runner
    weights: ModelWeights[Any] | None
    """The weights, for a weight swap; None if they can't be swapped."""
    constraints: Constraints | None
    """Constraints on sampled tokens; None if the model doesn't sample."""
    ready: Ready
    adapters: AdapterStore[Any] | None = None
    """The loaded adapters; None if the model can't serve any."""
    transfers: PageTransfers | None = None
    """Transfers of pages to files and other workers; None if pages don't leave this one."""
    calls_beside: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    """Calls that a thread answers beside the steps, one after the other."""
    calls: Mapping[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    """Calls that only this model answers, by name: functions of the call's arguments."""


def choose_num_threads(asked: int) -> int:
    """Return the number of compute threads; 0 asks for OMP_NUM_THREADS or else all cores."""
    # OMP_NUM_THREADS may be a list; its first number is for the outermost level.
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked == 0 and told.isdecimal():
        asked = min(int(told), MOST_THREADS)
    return asked or max(int(Machine().cores()), 1)


def warm_up(
    executor: Executor, slots: SlotTable, prompt_lengths: Sequence[int], page_size: int
) -> StepResult:
    """Prefill prompts and sample in one step, so that libraries are loaded and memory allocated.

    ``slots`` is empty afterwards.
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
    result = Runner(executor, slots, max_num_batched_tokens=sum(prompt_lengths)).step(plan)
    slots.clear()
    for each in opened:
        executor.close(each.slot)
    return result
