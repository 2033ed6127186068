"""The steps of a rank behind rank 0: it does what rank 0 does, or says, and has no slots."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gpu.cpu.rank_weights import FollowingWeights
from gpu.cpu.stage_steps import ModelHead, StageModel, StageSteps
from gpu.executor import Copies
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.pages import FollowingPages, PagedPart
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
from gpu.weights.replacement import weights_for
from trioserve.model_files import ModelFiles


class ComputedModel(ModelHead, PagedPart, Protocol):
    """The methods of :class:`gpu.cpu.model.CpuModel` that have to do with steps of other ranks."""

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""


class FollowingModel(StageModel, Protocol):
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

    def compute_logits(self, step: Step, hidden: Any) -> None:
        """Compute this rank's part of logits, of ``hidden`` states of the last step or others."""


class FollowingSteps:
    """The steps of one rank: of its part, or of its stage and of what rank 0 gets back of that.

    ``files`` are those of the model.
    """

    def __init__(self, link: RankLink, rank: FollowingModel, files: ModelFiles) -> None:
        self._link = link
        self._rank = rank
        self._steps = StageSteps(link.stages, rank, files.native.vocab_size)
        files_at = functools.partial(weights_for, files)
        self._weights = FollowingWeights(link, files_at, rank.read_weights)
        self._pages = FollowingPages(link, lambda: rank.model)

    def follow(self) -> None:
        """Do what rank 0 does or says, step by step."""
        self._pages.start()
        while True:
            match decode_step(self._link.receive()):
                case Compute() | ComputeRows() as step:
                    self._steps.compute(step)
                case ComputeLogits() | ComputeRowLogits() as step:
                    self._rank.compute_logits(step, self._steps.hidden)
                case ReturnResults() as step:
                    self._steps.return_results(step)
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
