"""Steps on a GPU, or in the emulation: packed on the host, queued, and waited for later.

A step is one upload, the forward pass, the sampler, and a copy of what was drawn. The host reads
none of its results: the next step's input tokens are gathered from the device's own history, so it
can be queued before this one has ended. Steps of rows of one token replay CUDA graphs, forward and
sampling apart; steps with adapters have graphs of their own with adapters' kernels. Steps
with longer rows are launched one kernel after the other.

Where logits are adjusted before the draw, the sampler is launched behind the graph of the forward
pass: it is four launches, queued while the device computes, and a graph of its own for them would
have to copy every mask to where it was captured. If an adjustment needs a token that is still on
the device, the step is deferred (see :mod:`gpu.executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu._util.upload import upload
from gpu.attention import StepLayout
from gpu.attention.kv_cache import content_of, fill
from gpu.attention.layout import in_layout_order, step_layout
from gpu.cuda.forward import ForwardPass, pack_rows
from gpu.cuda.graphs import Capturer
from gpu.cuda.ranks import SoleRank
from gpu.cuda.sampler import DeviceSampler
from gpu.cuda.step import CudaStep, CudaSubmission, DrawReports, PackedStep
from gpu.cuda.timeline import StepEnd, Timeline
from gpu.executor import NO_COPIES, Content, Copies, Submission
from gpu.models.kv_prefix import write_prefixes
from gpu.models.rotary_positions import positions_of
from gpu.models.step_embeddings import embeddings_of
from gpu.sampling.adjustments import Adjuster, NoAdjuster
from gpu.sampling.output_tensors import TensorSpan
from gpu.sampling.pooled import PooledSpan
from gpu.sampling.prompt_logprobs import PromptSpan
from gpu.sampling.prompt_scores import logprobs_of, score_prompt
from gpu.sampling.slot_options import SlotOptions
from gpu.slots import Row, Slot, SlotTable


def single_tokens(row: Row) -> list[Row]:
    """Return ``row``, or a row for its token and one for each of its drafts."""
    if not row.drafts:
        return [row]
    return [
        Row(slot=row.slot.drafted(depth), start=row.start + depth, count=1, samples=True)
        for depth in range(row.drafts + 1)
    ]


class CudaExecutor:
    """:class:`gpu.executor.Executor` over kernels.

    The parts share one device and the step buffer of the forward pass.
    """

    def __init__(
        self,
        forward: ForwardPass,
        *,
        sampler: DeviceSampler,
        slots: SlotTable,
        timeline: Timeline,
        rank: SoleRank,
        adjuster: Adjuster | None = None,
    ) -> None:
        self._forward = forward
        self._buffer = forward.buffer
        self._state = forward.state
        self._sampler = sampler
        self._slots = slots
        self._timeline = timeline
        self._rank = rank
        self._slot_options = SlotOptions(adjuster or NoAdjuster())
        self._has_mrope = bool(forward.model.config.mrope_section)

    @property
    def completions(self) -> int | None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return self._timeline.completions

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        self._state.open(slot)
        self._sampler.open(slot.number, slot.sampler, slot.prompt_length)
        self._slot_options.open(slot)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""
        self._slot_options.close(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`."""
        if not rows:
            self._change_pages(copies)
            return CudaSubmission(CudaStep(), self.draw, self._timeline.skip_step())
        step = self.begin(rows, copies)
        submission = CudaSubmission(step, self.draw)
        if not self._slot_options.needs_unknown_token(step.rows):
            submission.sample()
        return submission

    def copy_pages(self, copies: Copies) -> None:
        """Queue copies of pages, one after the other: [C, 2], source and destination."""
        with self._rank.in_step():
            self._rank.copy_pages(copies)
            self._forward.attention.copy_pages(copies)

    def _change_pages(self, copies: Copies) -> None:
        self.copy_pages(copies)
        write_prefixes(self._slots, self)

    def begin_transfer(self, written: Sequence[int]) -> None:
        """See :meth:`gpu.executor.PagedExecutor.begin_transfer`."""

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.executor.PagedExecutor.read_page`."""
        return content_of(self._forward.attention.page(number))

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.executor.PagedExecutor.write_page`."""
        fill(self._forward.attention.page(number), content)

    def adjusts(self, row: Row) -> bool:
        """Return whether the logits of ``row`` are adjusted before a token is drawn."""
        return self._slot_options.adjusts_slot(row.slot.number)

    def capture(
        self, capturer: Capturer, max_rows: int, progress: Callable[[int, int], None]
    ) -> None:
        """Capture steps of up to ``max_rows`` rows: see :meth:`ForwardPass.capture`."""
        self._forward.capture(capturer, max_rows, progress, self._draw)

    def begin(
        self,
        rows: Sequence[Row],
        copies: Copies = NO_COPIES,
        from_host: Sequence[Row] | None = None,
    ) -> CudaStep:
        """Queue copies and the forward pass of at least one row, and what is reported of it.

        A row with drafts becomes rows of one token (:func:`single_tokens`). Each sees those before
        it, as every layer writes all keys and values before it attends. ``from_host`` are rows
        whose tokens the device may lack: those of one token if the sampler doesn't append any.
        """
        if from_host is None:
            from_host = [] if self._sampler.appends else [row for row in rows if row.count == 1]
        rows = [each for row in rows for each in single_tokens(row)]
        sampling = [row for row in rows if row.samples]
        ordered = in_layout_order(rows)
        rotary = positions_of(ordered) if self._has_mrope else None
        layout = step_layout(ordered, self._slots, rotary)
        packed = self._packed(ordered, layout, len(sampling))
        adjusted = self._slot_options.adjusts(sampling)
        # A graph has no logits side by side if some rows don't sample.
        replayable = packed.fits_graphs and not (adjusted and len(sampling) < len(rows))
        forward = self._forward
        with torch.inference_mode():
            replay = forward.pack_attention(layout, replayable, packed.adapted)
            size = replay.size if replay else 0
            place_of = pack_rows(self._buffer, ordered, layout, padded_to=size)
            places = np.array([place_of[row.slot.number, row.end] for row in sampling], np.int64)
            self._state.pack(ordered, self._slots, from_host)
            self._timeline.begin_step()
            self._change_pages(copies)
            if forward.adapters is not None and packed.adapted:
                forward.adapters.pack(ordered, padded_to=size)
            reports = self._queue_forward(attrs.evolve(packed, replay=replay))
            draws = self._draw_reports(sampling, forward.logits, places)
            self._timeline.end_forward()
        return CudaStep(
            rows=sampling,
            places=places,
            replay=replay,
            adjusted=adjusted,
            spans=packed.spans,
            pools=[span for span in packed.pools if span.is_last],
            tensors=packed.tensors,
            reports=reports,
            draws=draws,
        )

    def _packed(self, rows: Sequence[Row], layout: StepLayout, num_sampled: int) -> PackedStep:
        """Return what a step of ``rows`` brings and reports besides its draws."""
        ends = layout.query_start[1:] - 1
        return PackedStep(
            replay=None,
            num_tokens=len(layout.positions),
            adapted=any(row.slot.adapter for row in rows),
            spans=self._slot_options.prompt_spans(rows, ends),
            pools=self._slot_options.pooled.spans(rows, ends),
            tensors=self._slot_options.tensor_spans(rows, ends),
            num_sampled=num_sampled,
            embedded=embeddings_of(rows, layout.query_start, self._slots.embedding_width),
        )

    def _queue_forward(self, step: PackedStep) -> list[torch.Tensor]:
        """Queue what is packed, on all ranks; return what it reports of prompts."""
        forward, replay, reports = self._forward, step.replay, list[torch.Tensor]()
        with self._rank.in_step():
            self._rank.launch(forward, step)
            self._buffer.upload()
            self._state.copy_large()
            self._timeline.begin_forward()
            if replay is not None:
                forward.replay(replay.kind, replay.size)
            else:
                hidden = forward.run(step.num_tokens, adapted=step.adapted, embedded=step.embedded)
                reports += self._score(step.spans, hidden)
                reports += self._pool(step.pools, hidden)
                reports += [self._rows_of(span, hidden) for span in step.tensors]
                if step.num_sampled:
                    forward.head_of_sampled(hidden, step.num_sampled)
        return reports

    def draw(self, step: CudaStep) -> StepEnd:
        """Queue the draws of ``step``, and its end."""
        with torch.inference_mode():
            if step.adjusted:
                self._draw_adjusted(step)
            elif step.replay is not None:
                self._timeline.begin_sampling()
                step.replay.graphs.replay_sampling(step.replay.size)
            elif step.rows:
                self._timeline.begin_sampling()
                self._draw(len(step.rows), self._forward.logits[: len(step.rows)])
            return self._timeline.end_step(step.outputs(self._sampler.outputs))

    def draw_some(self, step: CudaStep, indices: Sequence[int]) -> CudaSubmission:
        """Queue draws of the rows ``indices`` of the last step, and keep the logits of the others.

        The tokens before those rows are known.
        """
        rows = [step.rows[index] for index in indices]
        with torch.inference_mode():
            places = upload(step.places[indices], self._forward.logits.device)
            logits = self._forward.logits.index_select(0, places)
            order = np.arange(len(rows))
            draws = self._draw_reports(rows, logits, order)
            self._timeline.begin_step()
            self._launch_sampler(
                rows,
                logits,
                self._buffer["sampling_slots"].index_select(0, places),
                self._buffer["lengths"].index_select(0, places),
            )
            part = CudaStep(rows=rows, places=order, draws=draws)
            ending = self._timeline.end_step(part.outputs(self._sampler.outputs))
        return CudaSubmission(part, self.draw, ending)

    def _score(self, spans: list[PromptSpan], hidden: torch.Tensor) -> list[torch.Tensor]:
        """Five tensors of each span."""
        logits, vocab_size = self._forward.model.logits, self._sampler.vocab_size
        return [each for span in spans for each in score_prompt(span, hidden, logits, vocab_size)]

    def _pool(self, spans: list[PooledSpan], hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return a vector of each span that completes a prompt."""
        states = (hidden[span.first_hidden : span.stop_hidden].float() for span in spans)
        taken = map(self._slot_options.pooled.take, spans, states)
        return [vector for vector in taken if vector is not None]

    def _rows_of(self, span: TensorSpan, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of ``span`` [n, E], or their logits [n, V], in float32."""
        if not span.of_logits:
            return hidden[span.first_hidden : span.stop_hidden].float()
        vocab_size = self._sampler.vocab_size
        shape = (span.stop_hidden - span.first_hidden, vocab_size)
        rows = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        for first, stop in span.slices(vocab_size):
            logits = self._forward.model.logits(hidden[first:stop])
            rows[first - span.first_hidden : stop - span.first_hidden] = logits
        return rows

    def _draw_reports(
        self, rows: Sequence[Row], logits: torch.Tensor, places: npt.NDArray[np.int64]
    ) -> DrawReports:
        """Return the reports of ``rows``; row i has the logits ``logits[places[i]]``."""
        named, kept = self._slot_options.named_ids(rows), self._slot_options.kept_logits(rows)
        tensors = []
        if named:
            tensors.append(logprobs_of(logits, places[list(named)], named.values()))
        if kept:
            tensors.append(logits.index_select(0, upload(places[kept], logits.device)).float())
        return DrawReports(named, kept, tensors)

    def _draw(self, num_rows: int, logits: torch.Tensor) -> None:
        slots, lengths = self._buffer["sampling_slots"], self._buffer["lengths"]
        self._sampler.launch(logits, slots[:num_rows], lengths[:num_rows])

    def _draw_adjusted(self, step: CudaStep) -> None:
        """Queue the draws of rows that all sample, after adjusting their logits."""
        num_rows = len(step.rows)
        logits = self._forward.logits[:num_rows]
        in_place = [step.rows[i] for i in np.argsort(step.places)]
        slots, lengths = self._buffer["sampling_slots"], self._buffer["lengths"]
        self._launch_sampler(in_place, logits, slots[:num_rows], lengths[:num_rows])

    def _launch_sampler(
        self, rows: Sequence[Row], logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Queue the draws of ``rows`` from their ``logits``, after adjusting these."""
        adjustment = self._slot_options.adjustment(logits, rows)
        masks = adjustment.bitmask
        self._timeline.begin_sampling()
        self._sampler.launch(
            logits,
            slots,
            lengths,
            bias=adjustment.bias,
            bitmask=None if masks is None else upload(masks, logits.device),
        )
