"""The steps of a rank between those of the stages around it, and what rank 0 gets back of them."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu.cpu.model import Floats
from gpu.models.parallel.stage_link import StageLink
from gpu.models.parallel.stage_times import no_times
from gpu.models.parallel.steps import ReturnResults
from gpu.sampling.prompt_logprobs import rows_in_a_slice


class ModelHead(Protocol):
    """The methods of :class:`gpu.cpu.model.CpuModel` that have to do with hidden states."""

    def floats(self, hidden: Any) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        ...

    def logits(self, hidden: Any, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`."""
        ...


class StageModel(Protocol):
    """A rank's part of a model; its steps are messages of rank 0."""

    @property
    def model(self) -> ModelHead:
        """The part itself."""

    def states_before(self, step: Any) -> npt.NDArray[Any]:
        """Return the memory of the states that a step begins with, on a stage behind the first."""
        ...

    def compute(self, step: Any) -> Any:
        """Return the hidden states [T, E] of a step, and fill the KV cache.

        On a stage before the last, they are those that the next one begins with, as an array.
        """
        ...


class StageSteps:
    """The steps of one rank behind rank 0, of its part of a model or of its stage.

    Args:
        stages: The ways to the other stages; None if there are none.
        rank: Its part of the model.
        vocab_size: The model's.
    """

    def __init__(self, stages: StageLink | None, rank: StageModel, vocab_size: int) -> None:
        self._stages = stages
        self._rank = rank
        self._vocab_size = vocab_size
        self.hidden: Any = None
        """Hidden states of the last step that was computed."""
        self._took_us = 0
        """Microseconds that it took this stage."""

    def compute(self, step: Any) -> None:
        """Compute this rank's part of a step; a stage gives its states to the next one."""
        stages = self._stages
        if stages is not None and not stages.is_first:
            stages.receive(self._rank.states_before(step))
        began = time.perf_counter_ns()
        self.hidden = self._rank.compute(step)
        self._took_us = (time.perf_counter_ns() - began) // 1000
        if stages is not None and not stages.is_last:
            stages.send(self.hidden)

    def return_results(self, step: ReturnResults) -> None:
        """Send what the step is for to rank 0 from the last stage; else times to the next one."""
        stages = self._stages
        assert stages is not None
        took_us = no_times(stages)
        if not stages.is_first:
            stages.receive(took_us)
        took_us[stages.stage] = self._took_us
        if not stages.is_last:
            return stages.send(took_us)
        began = time.perf_counter_ns()
        hidden, model = self.hidden, self._rank.model

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
