"""The steps of a rank behind rank 0: it does what rank 0 does, or says, and has no slots."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu.cpu.model import Floats
from gpu.cpu.rank_weights import FollowingWeights
from gpu.executor import Copies
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.pages import FollowingPages, PagedPart
from gpu.models.parallel.stage_link import StageLink
from gpu.models.parallel.stage_times import no_times
from gpu.models.parallel.steps import (
    BeginTransfer,
    Compute,
    ComputeLogits,
    ComputeRowLogits,
    ComputeRows,
    CopyPages,
    DiscardOnRanks,
    LoadOnRanks,
    ReadOnRanks,
    ReturnResults,
    Step,
    SwapOnRanks,
    UnloadOnRanks,
    decode_step,
)
from gpu.sampling.prompt_logprobs import rows_in_a_slice
from gpu.weights.replacement import weights_for
from trioserve.model_files import ModelFiles


class ComputedModel(PagedPart, Protocol):
    """The methods of :class:`gpu.cpu.model.CpuModel` that have to do with steps of other ranks."""

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""

    def floats(self, hidden: Any) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        ...

    def logits(self, hidden: Any, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`."""
        ...


class FollowingModel(Protocol):
    """A rank's part of a model, computed by torch or by the compiled kernels."""

    @property
    def model(self) -> ComputedModel:
        """The part itself."""

    def read_weights(self, files: ModelFiles) -> Callable[[], None]:
        """Read other weights; see :data:`gpu.loading.weight_swap.ReadWeights`."""
        ...

    def load(self, step: LoadOnRanks) -> None:
        """Hold this rank's part of an adapter."""

    def unload(self, step: UnloadOnRanks) -> None:
        """Forget an adapter."""

    def states_before(self, step: Step) -> npt.NDArray[Any]:
        """Return the memory of the states that a step begins with, on a stage behind the first."""
        ...

    def compute(self, step: Step) -> Any:
        """Return the hidden states [T, E] of a step, and fill the KV cache.

        On a stage before the last, they are those that the next one begins with, as an array.
        """
        ...

    def compute_logits(self, step: Step, hidden: Any) -> None:
        """Compute this rank's part of logits, of ``hidden`` states of the last step or others."""


class FollowingSteps:
    """The steps of one rank: of its part, or of its stage and of what rank 0 gets back of that.

    ``files`` are those of the model.
    """

    def __init__(self, link: RankLink, rank: FollowingModel, files: ModelFiles) -> None:
        self._link = link
        self._rank = rank
        self._vocab_size = files.native.vocab_size
        files_at = functools.partial(weights_for, files)
        self._weights = FollowingWeights(link, files_at, rank.read_weights)
        self._pages = FollowingPages(link, lambda: rank.model)
        self._hidden: Any = None
        """Hidden states of the last step that was computed."""
        self._took_us = 0
        """Microseconds that it took this stage."""

    def follow(self) -> None:
        """Do what rank 0 does or says, step by step."""
        self._pages.start()
        while True:
            match decode_step(self._link.receive()):
                case Compute() | ComputeRows() as step:
                    self.compute(step)
                case ComputeLogits() | ComputeRowLogits() as step:
                    self._rank.compute_logits(step, self._hidden)
                case ReturnResults() as step:
                    assert self._link.stages is not None
                    self._return_results(step, self._link.stages)
                case ReadOnRanks() | SwapOnRanks() | DiscardOnRanks() as step:
                    self._weights.follow(step)
                case LoadOnRanks() as step:
                    self._rank.load(step)
                case UnloadOnRanks() as step:
                    self._rank.unload(step)
                case CopyPages(copies=pairs):
                    copies = np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2)
                    self._rank.model.copy_pages(copies)
                case BeginTransfer():
                    self._pages.begin()

    def compute(self, step: Compute | ComputeRows) -> None:
        """Compute this rank's part of a step; a stage gives its states to the next one."""
        stages = self._link.stages
        if stages is not None and not stages.is_first:
            stages.receive(self._rank.states_before(step))
        began = time.perf_counter_ns()
        self._hidden = self._rank.compute(step)
        self._took_us = (time.perf_counter_ns() - began) // 1000
        if stages is not None and not stages.is_last:
            stages.send(self._hidden)

    def _return_results(self, step: ReturnResults, stages: StageLink) -> None:
        """Send what the step is for to rank 0 from the last stage; else times to the next one."""
        took_us = no_times(stages)
        if not stages.is_first:
            stages.receive(took_us)
        took_us[stages.stage] = self._took_us
        if not stages.is_last:
            return stages.send(took_us)
        began = time.perf_counter_ns()
        hidden, model = self._hidden, self._rank.model

        def give_back(numbers: npt.NDArray[Any]) -> None:
            if stages.rank == 0:  # the others have computed their parts
                stages.send(numbers)

        for first, stop in step.pooled:
            give_back(model.floats(hidden[first:stop]))
        size = rows_in_a_slice(self._vocab_size)
        for first, stop in step.scored:
            for start in range(first, stop, size):
                give_back(model.logits(hidden[start : min(start + size, stop)]))
        if step.drawn:
            give_back(model.logits(hidden, np.frombuffer(step.drawn, dtype=np.int64).copy()))
        took_us[-1] = (time.perf_counter_ns() - began) // 1000
        give_back(took_us)
