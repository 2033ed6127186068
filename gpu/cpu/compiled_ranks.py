"""The compiled model on several ranks: rank 0, which the executor calls, and the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from gpu.cpu.adapters import CompiledAdapter
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import read_other
from gpu.cpu.model import Floats
from gpu.cpu.step_arrays import CompiledStep
from gpu.executor import Content, Copies
from gpu.models.parallel.adapter_parts import SentAdapters, adapter_of
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.pages import LeadingPages
from gpu.models.parallel.steps import (
    ComputeRowLogits,
    ComputeRows,
    CopyPages,
    LoadOnRanks,
    SentEmbeddings,
    Step,
    UnloadOnRanks,
    encode_step,
    received_positions,
    sent_positions,
)
from gpu.slots import Row, SlotTable
from gpu.weights.blocks import Numbers
from trioserve.model_files import ModelFiles


class LeadingCompiledModel:
    """:class:`gpu.cpu.model.CpuModel` of rank 0, whose ``model`` is its part of the whole.

    ``parts`` are those of all ranks. With several stages ``model`` is the first one, which has
    neither the hidden states nor their logits.
    """

    def __init__(self, model: CompiledModel, link: RankLink, parts: Sequence[ModelPart]) -> None:
        self._model = model
        self._link = link
        self._pages = LeadingPages(link, parts)
        self._hidden: Numbers = np.empty((0, 0))
        """Hidden states of the last step."""

    def read_weights(self, files: ModelFiles) -> Callable[[], None]:
        """Read other weights; see :data:`gpu.loading.weight_swap.ReadWeights`."""
        other = read_other(self._model, files)

        def swap() -> None:
            self._model = other

        return swap

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

    def begin_transfer(self) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.begin_transfer`."""
        self._pages.begin()

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.cpu.model.CpuModel.read_page`."""
        return self._pages.read(number, self._model)

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.write_page`."""
        self._pages.write(number, content, self._model)

    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[Numbers, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`."""
        step = self._model.arrange(rows, slots)
        with self._link.in_step():
            for message in self.adapters.take():
                self._link.send(encode_step(message))
            self._link.send(encode_step(compute_rows(step)))
            self._hidden = self._model.compute(step)
            if self._link.stages is not None:
                self._link.stages.send(self._hidden)
        return self._hidden, step.last_tokens(rows)

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
        first, rest = divmod(hidden.ctypes.data - self._hidden.ctypes.data, self._hidden.strides[0])
        assert rest == 0
        assert 0 <= first <= len(self._hidden) - len(hidden)
        places = np.arange(len(hidden)) if rows is None else rows
        self._link.send(encode_step(ComputeRowLogits((places + first).astype(np.int32).tobytes())))


@attrs.define(eq=False)
class FollowingCompiledModel:
    """:class:`gpu.cpu.following_steps.FollowingModel` of another rank, whose part is ``model``."""

    model: CompiledModel

    def read_weights(self, files: ModelFiles) -> Callable[[], None]:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.read_weights`."""
        other = read_other(self.model, files)

        def swap() -> None:
            self.model = other

        return swap

    def load(self, step: LoadOnRanks) -> None:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.load`."""
        self.model.adapters.put(step.number, adapter_of(step))

    def unload(self, step: UnloadOnRanks) -> None:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.unload`."""
        self.model.adapters.unload(step.number)

    def states_before(self, step: Step) -> Numbers:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.states_before`."""
        assert isinstance(step, ComputeRows)
        return self.model.states(len(step.tokens) // np.dtype(np.int32).itemsize)

    def compute(self, step: Step) -> Numbers:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.compute`."""
        assert isinstance(step, ComputeRows)
        return self.model.compute(step_of_rows(step))

    def compute_logits(self, step: Step, hidden: Numbers) -> None:
        """See :meth:`gpu.cpu.following_steps.FollowingModel.compute_logits`."""
        assert isinstance(step, ComputeRowLogits)
        self.model.logits(hidden, np.frombuffer(step.rows, dtype=np.int32))


def compute_rows(step: CompiledStep) -> ComputeRows:
    """Return the message for a step."""
    return ComputeRows(
        tokens=step.tokens.tobytes(),
        query_start=step.query_start.tobytes(),
        context_lens=step.context_lens.tobytes(),
        block_tables=step.block_tables.tobytes(),
        rotary_positions=sent_positions(step.rotary_positions),
        adapted={number: own.tobytes() for number, own in step.adapted.items()},
        embedded=SentEmbeddings.of(step.embedded),
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
        rotary_positions=received_positions(message.rotary_positions),
        adapted={
            number: np.frombuffer(own, dtype=np.int32) for number, own in message.adapted.items()
        },
        embedded=None if message.embedded is None else message.embedded.received(),
    )
