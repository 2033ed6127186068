"""Steps of the compiled kernels, the same one again and again, to be timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpu.cpu import compiled_loading
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.library import load_library
from gpu.models.rope import cos_sin_table
from gpu.slots import SlotTable
from trioserve.model_files import open_model
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

PAGE_SIZE = 16


def load_compiled(
    path: Path, *, quantization: str, threads: int, num_pages: int, max_rank: int = 0
) -> CompiledModel:
    """Return the model at ``path``; each of ``num_pages`` of its KV cache holds some tokens."""
    files = open_model(path)
    model = CompiledModel(load_library(), files.config, quantization, threads, max_rank=max_rank)
    compiled_loading.load_compiled(model, files, lambda stage, done, total: None)
    table = cos_sin_table(files.config, 2048, 2048)
    model.finish(table, page_size=PAGE_SIZE, num_pages=num_pages, max_tokens=256)
    # Until a page is written, it takes no memory and is read from a cache.
    CompiledSteps(model, rows=1, context=0, count=PAGE_SIZE).run()
    model.copy_pages(np.array([(0, page) for page in range(1, num_pages)], dtype=np.int32))
    return model


def num_pages_of(rows: int, context: int, count: int = 1) -> int:
    """Return the pages of a step of ``rows`` rows with ``count`` new tokens behind ``context``."""
    return rows * -(-(context + count) // PAGE_SIZE)


class CompiledSteps:
    """A step of ``rows`` rows, each of random tokens, ``count`` of them new behind ``context``.

    Its pages are those from ``first_page`` on; ``adapters`` are the rows' in turn.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        rows: int,
        context: int,
        count: int = 1,
        adapters: Sequence[int] = (0,),
        first_page: int = 0,
    ) -> None:
        self._model = model
        limits = {"max_model_len": 2048, "vocab_size": 1 << 20}
        self._slots = SlotTable(num_pages=1 << 20, page_size=PAGE_SIZE, **limits)
        self._slots.adapters = range(1, 1000)
        draw = np.random.default_rng(rows)
        each = num_pages_of(1, context, count)
        opened = [
            OpenSlot(
                slot=row,
                generation=1,
                tokens=from_ints(draw.integers(3, model.config.vocab_size, context + count)),
                prompt_length=context + count,
                computed=context,
                pages=from_ints(range(first_page + row * each, first_page + (row + 1) * each)),
                sampler=SamplerParams(temperature=0.0),
                adapter=adapters[row % len(adapters)],
            )
            for row in range(rows)
        ]
        counts = from_ints([count] * rows)
        plan = Plan(number=1, opened=opened, row_slots=from_ints(range(rows)), row_counts=counts)
        self._rows = self._slots.apply(plan)

    def run(self) -> None:
        """Compute the step: layers and the most probable tokens."""
        hidden, ends = self._model.forward(self._rows, self._slots)
        self._model.most_probable(hidden, ends)


def timed_in_turns(
    ways: Mapping[str, Callable[[], None]],
    *,
    rounds: int = 2,
    seconds: float = 0.0,
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Return the seconds that each way takes: the mean of its quickest quarter.

    They take turns, for ``seconds`` and at least ``rounds`` times. ``prepare`` isn't timed.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while min(map(len, taken.values())) < rounds or time.perf_counter() < end:
        for name, run in ways.items():
            prepare(name)
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
    return {
        name: statistics.fmean(sorted(times)[: max(len(times) // 4, 1)])
        for name, times in taken.items()
    }
