"""The first stage of a model on GPUs: it packs the steps that all stages launch.

Tokens are drawn on the host, from the logits that the last stage sends back. So all tokens of a
step are known when it is packed, and nothing is gathered that another GPU has drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from gpu.attention.layout import ends_of, in_layout_order, step_layout
from gpu.cpu.pipelined import PipelinedExecutor
from gpu.cuda.forward import pack_tokens
from gpu.cuda.ranks import CudaRank
from gpu.cuda.stage_forward import StageForward
from gpu.cuda.step import PackedStep
from gpu.executor import Content, Copies
from gpu.lora.store import AdapterStore
from gpu.slots import Row, Slot, SlotTable


class LeadingCudaStage:
    """:class:`gpu.cpu.model.CpuModel` of the first stage, on rank 0.

    ``adapters`` are those that rows may have; None if none are served.
    """

    def __init__(
        self, forward: StageForward, rank: CudaRank, adapters: AdapterStore[Any] | None
    ) -> None:
        assert rank.link.stages is not None
        self._forward = forward
        self._rank = rank
        self._stages = rank.link.stages
        self.adapters = adapters

    def open(self, slot: Slot) -> None:
        """Take over the tokens of a slot just opened.

        Raises:
            PlanError: There are fewer slots.
        """
        self._forward.state.open(slot)

    @torch.inference_mode()
    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""
        with self._rank.in_step():
            self._rank.copy_pages(copies)
            self._forward.attention.copy_pages(copies)

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[torch.Tensor, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`; the states are those that are sent on."""
        forward, ordered = self._forward, in_layout_order(rows)
        layout = step_layout(ordered, slots)
        num_tokens = len(layout.positions)
        adapted = any(row.slot.adapter for row in ordered)
        replay = forward.pack_attention(layout, True, adapted)
        padded_to = 0 if replay is None else replay.size
        pack_tokens(forward.buffer, layout, padded_to=padded_to)
        # What was drawn isn't on the device; it comes in rows of one token.
        forward.state.pack(ordered, slots, [row for row in ordered if row.count == 1])
        if forward.adapters is not None and adapted:
            forward.adapters.pack(ordered, padded_to=padded_to)
        step = PackedStep(replay=replay, num_tokens=num_tokens, adapted=adapted)
        with self._rank.in_step():
            self._rank.launch(forward, step)
            forward.buffer.upload()
            forward.state.copy_large()
            if replay is None:
                forward.run(num_tokens, adapted=adapted)
            else:
                forward.replay(replay.kind, replay.size)
            self._stages.send(forward.sent_states(num_tokens))
        return forward.states(num_tokens), ends_of(rows, ordered, layout)

    def begin_transfer(self) -> None:
        """Refuse: a page's content is on all ranks."""
        _refuse_pages()

    def read_page(self, number: int) -> Content:
        """Refuse, as :meth:`begin_transfer`."""
        _refuse_pages()

    def write_page(self, number: int, content: Content) -> None:
        """Refuse, as :meth:`begin_transfer`."""
        _refuse_pages()

    def floats(self, hidden: torch.Tensor) -> NoReturn:
        """Refuse: the last stage has the states behind the layers."""
        raise AssertionError("the last stage returns states and logits")

    def logits(self, hidden: torch.Tensor, rows: object = None) -> NoReturn:
        """Refuse, as :meth:`floats`."""
        self.floats(hidden)

    def most_probable(self, hidden: torch.Tensor, rows: object) -> NoReturn:
        """Refuse, as :meth:`floats`."""
        self.floats(hidden)


def _refuse_pages() -> NoReturn:
    raise AssertionError("pages of several ranks on GPUs don't leave them")


class LeadingCudaExecutor(PipelinedExecutor):
    """:class:`gpu.executor.Executor` over the first of several stages on GPUs."""

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        assert isinstance(self._model, LeadingCudaStage)
        self._model.open(slot)
        super().open(slot)
