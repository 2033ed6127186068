"""Steps on the CPU, each finished before ``submit`` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gpu.cpu.model import CpuModel, CpuSampler, Floats, Hidden
from gpu.cpu.scores import logprobs_of, score_prompt
from gpu.executor import NO_COPIES, Content, Copies, Finished, Submission
from gpu.models.kv_prefix import write_prefixes
from gpu.sampling.adjustments import Adjuster, NoAdjuster
from gpu.sampling.drafting.drafter import DraftedStep, Drafter
from gpu.sampling.drawn import DeviceTimes, Drawn
from gpu.sampling.output_tensors import TensorSpan, logits_piece, read_span
from gpu.sampling.pooled import PooledSpan, pooled_prompt
from gpu.sampling.prompt_logprobs import PromptSpan, in_rows, prompt_piece
from gpu.sampling.sampler_io import SamplerRow, is_plainly_greedy
from gpu.sampling.slot_options import SlotOptions
from gpu.sampling.verification import Verification
from gpu.slots import Row, Slot, SlotTable
from trioserve.protocol.wire import PooledPrompt, PromptPiece, TensorPiece

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class CpuExecutor:
    """:class:`gpu.executor.Executor` over a model with its KV cache, and a sampler.

    With a ``drafter``, rows that may draft tokens do; :attr:`drafter` may be set later.
    """

    def __init__(
        self,
        model: CpuModel,
        sampler: CpuSampler,
        slots: SlotTable,
        adjuster: Adjuster | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._slot_options = SlotOptions(adjuster or NoAdjuster())
        self._choosy: set[int] = set()
        """Slots that don't always get their most probable token."""
        self._step_ended_ns = time.perf_counter_ns()
        self.drafter: Drafter | None = None

    @property
    def completions(self) -> int | None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return None

    @property
    def model(self) -> CpuModel:
        """The model that it computes with."""
        return self._model

    def replace_model(self, model: CpuModel) -> None:
        """Compute with ``model`` from the next step on; no slot is open."""
        self._model = model

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        self._slot_options.open(slot)
        if is_plainly_greedy(slot.sampler) and not self._slot_options.adjusts_slot(slot.number):
            self._choosy.discard(slot.number)
        else:
            self._choosy.add(slot.number)
        if self.drafter is not None:
            self.drafter.open(slot)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""
        self._choosy.discard(number)
        self._slot_options.close(number)
        if self.drafter is not None:
            self.drafter.close(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`."""
        began = time.perf_counter_ns()
        step = self._begin(rows, copies)
        drawn = self._compute(step.rows)
        ended = time.perf_counter_ns()
        if self.drafter is not None:
            self.drafter.learn(step, drawn, (ended - began) / 1e9)
        drawn.times = DeviceTimes(
            step_us=(ended - began) // 1000, idle_us=(began - self._step_ended_ns) // 1000
        )
        self._step_ended_ns = ended
        return Finished(drawn)

    def begin_transfer(self, written: Sequence[int]) -> None:
        """See :meth:`gpu.executor.PagedExecutor.begin_transfer`."""
        self._model.begin_transfer()
        if self.drafter is not None:
            self.drafter.forget_pages(written)

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.executor.PagedExecutor.read_page`."""
        return self._model.read_page(number)

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.executor.PagedExecutor.write_page`."""
        self._model.write_page(number, content)

    def _begin(self, rows: Sequence[Row], copies: Copies, share: float = 1.0) -> DraftedStep:
        """Copy pages, write prefixes, and add drafts.

        ``share`` is that of :meth:`Drafter.add_drafts`.
        """
        if len(copies):
            self._model.copy_pages(copies)
        write_prefixes(self._slots, self)
        if self.drafter is None:
            return DraftedStep(rows, {}, None)
        if len(copies):
            self.drafter.copy_pages(copies)
        return self.drafter.add_drafts(rows, share=share)

    def _compute(self, rows: Sequence[Row]) -> Drawn:
        if not rows:
            return Drawn(tokens=_NO_TOKENS)
        hidden, ends = self._model.forward(rows, self._slots)
        spans = self._slot_options.pooled.spans(rows, ends)
        states = [hidden[span.first_hidden : span.stop_hidden] for span in spans]
        pooled = self._pool(spans, map(self._model.floats, states))
        tensors = self._tensors(self._slot_options.tensor_spans(rows, ends), hidden)
        drawn = self._draw(rows, hidden, ends)
        drawn.pooled = pooled
        drawn.tensors += tensors
        return drawn

    def _tensors(self, spans: Sequence[TensorSpan], hidden: Hidden) -> list[TensorPiece]:
        """Return the hidden states and logits of ``spans``."""
        floats, logits = self._model.floats, self._model.logits
        vocab_size = self._sampler.vocab_size
        return [read_span(span, hidden, floats, logits, vocab_size) for span in spans]

    def _pool(self, spans: Sequence[PooledSpan], floats: Iterable[Floats]) -> list[PooledPrompt]:
        """Return the vectors of the prompts that the step completes, from each span's states."""
        found = []
        for span, states in zip(spans, floats, strict=True):
            vector = self._slot_options.pooled.take(span, states)
            if vector is not None:
                found.append(pooled_prompt(span, vector))
        return found

    def _draw(self, rows: Sequence[Row], hidden: Hidden, ends: npt.NDArray[np.integer]) -> Drawn:
        spans = self._slot_options.prompt_spans(rows, ends)
        prompts = [self._piece(span, hidden) for span in spans] if spans else []
        sampling = [row for row in rows if row.samples]
        if not sampling:
            return Drawn(tokens=_NO_TOKENS, prompts=prompts)
        if len(sampling) < len(rows):
            ends = ends[[row.samples for row in rows]]
        if not any(row.drafts for row in sampling):
            return self._sample_all(sampling, hidden, ends, prompts)
        drawn = self._verify(
            sampling, ends, lambda rows, places: self._sample_all(rows, hidden, places, [])
        )
        drawn.prompts = prompts
        return drawn

    def _verify(
        self,
        sampling: Sequence[Row],
        firsts: npt.NDArray[np.integer],
        sample: Callable[[list[Row], npt.NDArray[np.integer]], Drawn],
    ) -> Drawn:
        """Sample after each of ``sampling``, and after its drafts as far as they are accepted.

        The place of a row is that in ``firsts``; those of its drafts follow. ``sample`` is called
        with some rows, whose slots have the tokens before the one to draw, and their places.
        """
        adjusts = self._slot_options.adjusts_slot
        stepwise = {i for i, row in enumerate(sampling) if adjusts(row.slot.number)}
        verification = Verification(sampling, stepwise)
        while verification.places:
            places = [firsts[index] + depth for index, depth in verification.places]
            verification.take(sample(verification.sampling_rows, np.array(places)))
        return verification.result()

    def _sample_all(
        self,
        sampling: list[Row],
        hidden: Hidden,
        ends: npt.NDArray[np.integer],
        prompts: list[PromptPiece],
    ) -> Drawn:
        """Sample a token for each of ``sampling``, from the hidden states ``ends``."""
        if not self._choosy or all(row.slot.number not in self._choosy for row in sampling):
            best = self._model.most_probable(hidden, ends)
            if best is not None:
                return Drawn(tokens=best, prompts=prompts)
        return self._sample(self._model.logits(hidden, ends), sampling, prompts)

    def _piece(self, span: PromptSpan, hidden: Hidden) -> PromptPiece:
        logits_of, vocab_size = self._model.logits, self._sampler.vocab_size
        return prompt_piece(span, score_prompt(span, hidden, logits_of, vocab_size))

    def _sample(self, logits: Floats, rows: list[Row], prompts: list[PromptPiece]) -> Drawn:
        """Sample a token for each of ``rows``, whose slots have the tokens before it."""
        asked = [
            SamplerRow(row.slot.sampler, row.slot.tokens, row.slot.prompt_length) for row in rows
        ]
        adjustment = (
            self._slot_options.adjustment(logits, rows)
            if self._slot_options.adjusts(rows)
            else None
        )
        # Both come before the sampler, which overwrites the logits.
        named = self._named(logits, rows)
        kept = [logits_piece(rows[i], logits[i]) for i in self._slot_options.kept_logits(rows)]
        drawn = self._sampler.sample(logits, asked, adjustment)
        drawn.named, drawn.prompts, drawn.tensors = named, prompts, kept
        return drawn

    def _named(self, logits: Floats, rows: list[Row]) -> list[Floats] | None:
        named = self._slot_options.named_ids(rows)
        if not named:
            return None
        values = logprobs_of(logits, np.array(list(named)), named.values())
        return in_rows(len(rows), named, values)
