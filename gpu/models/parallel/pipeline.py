"""The ranks of several stages: what goes from stage to stage, and from the last one to rank 0.

Hidden states go from each rank to the rank of the same number in the next stage. A stage doesn't
wait until the next one has taken them, so it computes on while the next one is busy. The messages
of rank 0 come to all ranks in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu.lora.torch_adapters import TokenGroup
from gpu.models.parallel.group import RankGroup
from gpu.models.parallel.leading import LeadingAttention, LeadingDecoder
from gpu.models.parallel.link import RankLink
from trioserve.protocol.wire import Start

_SENT_FOR_A_PLAN = 2
"""Tensors that go from a stage to the next one for a plan: hidden states, and a time."""
_SENT_BACK = 2
"""Tensors that may be on their way to rank 0 at a time; a slice of logits has 64 MiB."""


class PipelineGroup(RankGroup):
    """The ranks of one stage, and their ways to the stages before and behind it."""

    def __init__(self, rendezvous: Path, rank: int, size: int, num_stages: int) -> None:
        super().__init__(rendezvous, rank, size, num_stages)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        """Sends that may be on their way, and their tensors, which must live until then."""

    @property
    def is_last(self) -> bool:
        """True if this is the last stage."""
        return self.stage == self.num_stages - 1

    def pass_on(self, x: torch.Tensor) -> None:
        """Send ``x`` to the next stage, if there is one; it mustn't change."""
        if not self.is_last:
            most = _SENT_FOR_A_PLAN * (self.num_stages + 1)
            self._post(x, (self.stage + 1) * self.size + self.rank, most)

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the stage before this one passes on, in the memory of ``x``."""
        return self._take(x, (self.stage - 1) * self.size + self.rank)

    def give_back(self, x: torch.Tensor) -> None:
        """Send ``x`` to rank 0 of the first stage, if this is the last stage's rank 0."""
        if not self.rank:
            self._post(x.contiguous(), 0, _SENT_BACK)

    def take_back(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last stage gives back, in the memory of ``x``."""
        return self._take(x, (self.num_stages - 1) * self.size)

    def _post(self, x: torch.Tensor, to: int, most: int) -> None:
        """Send ``x`` to a process; let at most ``most`` tensors be on their way."""
        self._sent.append((self._begin_send(x, to), x))
        while len(self._sent) > most:
            self._sent.popleft()[0].wait()

    def _begin_send(self, x: torch.Tensor, to: int) -> Any:
        return dist.isend(x, to)

    def _take(self, x: torch.Tensor, sender: int) -> torch.Tensor:
        dist.recv(x, sender)
        return x


def join_group(start: Start, rendezvous: Path, rank: int) -> RankGroup:
    """Return the group as process ``rank`` of ``start.num_ranks``, once all are there."""
    size, num_stages = start.tensor_parallel_size, start.pipeline_parallel_size
    if num_stages == 1:
        return RankGroup(rendezvous, rank, size)
    return PipelineGroup(rendezvous, rank, size, num_stages)


class LeadingStage:
    """The decoder of rank 0, whose stage is the first."""

    def __init__(self, decoder: LeadingDecoder, link: RankLink, group: PipelineGroup) -> None:
        self._decoder = decoder
        self._link = link
        self._group = group

    def forward(
        self,
        tokens: torch.Tensor,
        attention: LeadingAttention,
        adapted: Sequence[TokenGroup] = (),
    ) -> torch.Tensor:
        """Return the hidden states [T, E] behind this stage, which the next one gets, too."""
        hidden = self._decoder.forward(tokens, attention, adapted)
        with self._link.in_step():
            self._group.pass_on(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Refuse: the last stage has the head."""
        raise AssertionError("the first stage has no head")
