"""A step of the executor over kernels on its way: what is queued, and how its outputs are read."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.cuda.graphs import Replay
from gpu.cuda.sampler import SamplerOutputs, top_lists
from gpu.cuda.timeline import FinishedStep, StepEnd
from gpu.models.step_embeddings import StepEmbeddings
from gpu.sampling.drawn import Drawn
from gpu.sampling.output_tensors import TensorSpan, logits_piece, tensor_piece
from gpu.sampling.pooled import PooledSpan, pooled_prompt
from gpu.sampling.prompt_logprobs import PromptSpan, in_rows, prompt_piece
from gpu.slots import Row


@attrs.frozen(kw_only=True)
class PackedStep:
    """A step whose numbers are in the step buffer, and whose forward pass is to be launched."""

    replay: Replay | None
    num_tokens: int
    adapted: bool
    """True if rows have adapters."""
    spans: list[PromptSpan] = attrs.field(factory=list)
    pools: list[PooledSpan] = attrs.field(factory=list)
    tensors: list[TensorSpan] = attrs.field(factory=list)
    num_sampled: int = 0
    """Rows that sample."""
    embedded: StepEmbeddings | None = None

    @property
    def fits_graphs(self) -> bool:
        """True if it needs no hidden states, and no other embeddings than those of its tokens."""
        return not (self.spans or self.pools or self.tensors or self.embedded)


@attrs.frozen
class DrawReports:
    """Reports of the logits of rows that sample, besides the sampler's."""

    named: dict[int, list[int]]
    """Index of a row -> the ids of its reported log-probabilities."""
    kept: list[int]
    """Indices of the rows whose logits are returned."""
    tensors: list[torch.Tensor]
    """One tensor for ``named`` and one for ``kept``, where there are any."""


@attrs.frozen(kw_only=True)
class CudaStep:
    """A step with its forward pass queued.

    Its outputs are, in this order: one or four of the sampler's, if a row samples; five for each of
    ``spans``; one for each of ``pools`` and of ``tensors``; and those of ``draws``.
    """

    rows: list[Row] = attrs.field(factory=list)
    """The S rows that sample, in the plan's order."""
    places: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.zeros(0, np.int64))
    """[S], which logits and which of the sampler's outputs are a row's."""
    replay: Replay | None = None
    adjusted: bool = False
    """True if logits are adjusted before the draw."""
    spans: list[PromptSpan] = attrs.field(factory=list)
    pools: list[PooledSpan] = attrs.field(factory=list)
    """Spans that complete a prompt with a wanted vector."""
    tensors: list[TensorSpan] = attrs.field(factory=list)
    reports: list[torch.Tensor] = attrs.field(factory=list)
    """Tensors of the forward pass for ``spans``, ``pools`` and ``tensors``; kept alive until they
    are copied, as are those of ``draws``."""
    draws: DrawReports = attrs.field(factory=lambda: DrawReports({}, [], []))
    asked: list[int] = attrs.field(init=False)
    """[S], each row's ``SamplerParams.logprobs``."""

    @asked.default
    def _asked(self) -> list[int]:
        return [row.slot.sampler.logprobs for row in self.rows]

    def without_draws(self) -> CudaStep:
        """Return the step with nothing but its reports of prompts."""
        return CudaStep(
            spans=self.spans, pools=self.pools, tensors=self.tensors, reports=self.reports
        )

    def outputs(self, drawn: SamplerOutputs) -> list[torch.Tensor]:
        """Return what is to be copied to the host when the step ends."""
        if not self.rows:
            return self.reports
        wanted = [drawn.tokens]
        if max(self.asked) >= 0:
            wanted += [drawn.logprobs, drawn.top_ids, drawn.top_values]
        count = int(self.places.max()) + 1
        return [*(output[:count] for output in wanted), *self.reports, *self.draws.tensors]

    def drawn(self, finished: FinishedStep) -> Drawn:
        """Return what the copied outputs say, row by row."""
        arrived = iter(finished.outputs)
        tokens = next(arrived)[self.places] if self.rows else np.zeros(0, np.int32)
        logprobs = top = None
        if max(self.asked, default=-1) >= 0:
            logprobs, top_ids, top_values = (next(arrived)[self.places] for _ in range(3))
            top = top_lists(top_ids, top_values, self.asked)
        prompts = [prompt_piece(span, [next(arrived) for _ in range(5)]) for span in self.spans]
        pooled = [pooled_prompt(span, next(arrived)) for span in self.pools]
        tensors = [tensor_piece(span, next(arrived)) for span in self.tensors]
        named = None
        if self.draws.named:
            named = in_rows(len(self.rows), self.draws.named, next(arrived))
        if self.draws.kept:
            tensors += map(logits_piece, [self.rows[i] for i in self.draws.kept], next(arrived))
        return Drawn(
            tokens=tokens,
            logprobs=logprobs,
            top=top,
            named=named,
            prompts=prompts,
            pooled=pooled,
            tensors=tensors,
            times=finished.times,
        )


@attrs.define
class CudaSubmission:
    """:class:`gpu.executor.Submission` of a step; ``finish`` queues its draws and its end."""

    _step: CudaStep
    _finish: Callable[[CudaStep], StepEnd]
    _ending: StepEnd | None = None

    @property
    def deferred(self) -> bool:
        """See :attr:`gpu.executor.Submission.deferred`."""
        return self._ending is None

    def sample(self) -> None:
        """See :meth:`gpu.executor.Submission.sample`."""
        self._ending = self._finish(self._step)

    def wait(self) -> Drawn:
        """See :meth:`gpu.executor.Submission.wait`."""
        assert self._ending is not None
        return self._step.drawn(self._ending.wait())
