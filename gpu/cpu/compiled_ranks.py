"""The compiled model on several ranks: rank 0, which the executor calls, and the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.cpu.adapters import CompiledAdapter
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.model import Floats
from gpu.cpu.step_arrays import CompiledStep
from gpu.executor import Content, Copies
from gpu.models.parallel.adapter_parts import SentAdapters, adapter_of
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.steps import (
    ComputeRowLogits,
    ComputeRows,
    CopyPages,
    LoadOnRanks,
    UnloadOnRanks,
    decode_step,
    encode_step,
)
from gpu.slots import Row, SlotTable
from gpu.weights.blocks import Numbers


class LeadingCompiledModel:
    """:class:`gpu.cpu.model.CpuModel` of rank 0, whose ``model`` is its part of the whole."""

    def __init__(self, model: CompiledModel, link: RankLink) -> None:
        self._model = model
        self._link = link

    @property
    def adapters(self) -> SentAdapters[CompiledAdapter]:
        """See :attr:`gpu.cpu.model.CpuModel.adapters`."""
        adapters = self._model.adapters
        assert isinstance(adapters, SentAdapters)
        return adapters

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""
        with self._link.in_step():
            self._link.send(encode_step(CopyPages(copies.tobytes())))
            self._model.copy_pages(copies)

    def read_page(self, number: int) -> Content:
        """Refuse: a page's content is on all ranks."""
        raise AssertionError("pages of several ranks don't leave them")

    def write_page(self, number: int, content: Content) -> None:
        """Refuse, as :meth:`read_page`."""
        raise AssertionError("pages of several ranks don't leave them")

    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[Numbers, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`."""
        step = self._model.arrange(rows, slots)
        with self._link.in_step():
            for message in self.adapters.take():
                self._link.send(encode_step(message))
            self._link.send(encode_step(compute_rows(step)))
            return self._model.compute(step), step.last_tokens(rows)

    def floats(self, hidden: Numbers) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        return self._model.floats(hidden)

    def logits(self, hidden: Numbers, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`."""
        with self._link.in_step():
            self._send_rows(hidden, rows)
            return self._model.logits(hidden, rows)

    def most_probable(
        self, hidden: Numbers, rows: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32] | None:
        """See :meth:`gpu.cpu.model.CpuModel.most_probable`."""
        with self._link.in_step():
            self._send_rows(hidden, rows)
            return self._model.most_probable(hidden, rows)

    def _send_rows(self, hidden: Numbers, rows: npt.NDArray[np.integer] | None) -> None:
        places = self._model.places(hidden, rows)
        self._link.send(encode_step(ComputeRowLogits(places.tobytes())))


def follow_compiled(link: RankLink, model: CompiledModel) -> None:
    """Do on another rank what rank 0 does, step by step."""
    while True:
        match decode_step(link.receive()):
            case ComputeRows() as step:
                model.compute(step_of_rows(step))
            case ComputeRowLogits(rows=rows):
                model.take_part_in_logits(np.frombuffer(rows, dtype=np.int32))
            case LoadOnRanks() as step:
                model.adapters.put(step.number, adapter_of(step))
            case UnloadOnRanks(number=number):
                model.adapters.unload(number)
            case CopyPages(copies=pairs):
                model.copy_pages(np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2))


def compute_rows(step: CompiledStep) -> ComputeRows:
    """Return the message for a step."""
    return ComputeRows(
        tokens=step.tokens.tobytes(),
        query_start=step.query_start.tobytes(),
        context_lens=step.context_lens.tobytes(),
        block_tables=step.block_tables.tobytes(),
        adapted={number: own.tobytes() for number, own in step.adapted.items()},
    )


def step_of_rows(message: ComputeRows) -> CompiledStep:
    """Return the step that :func:`compute_rows` got."""
    context_lens = np.frombuffer(message.context_lens, dtype=np.int64)
    tables = np.frombuffer(message.block_tables, dtype=np.int32)
    return CompiledStep(
        tokens=np.frombuffer(message.tokens, dtype=np.int32),
        query_start=np.frombuffer(message.query_start, dtype=np.int64),
        context_lens=context_lens,
        block_tables=tables.reshape(len(context_lens), -1),
        adapted={
            number: np.frombuffer(own, dtype=np.int32) for number, own in message.adapted.items()
        },
    )
