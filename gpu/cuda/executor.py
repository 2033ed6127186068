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

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpu._util.upload import upload
from gpu.attention import StepLayout
from gpu.attention.kv_cache import content_of, fill
from gpu.attention.layout import in_layout_order, step_layout
from gpu.cuda.adapters import CudaAdapters
from gpu.cuda.attention import CudaAttention
from gpu.cuda.graphs import Capturer, GraphLadder, ladder, sharing_ladder
from gpu.cuda.sampler import DeviceSampler
from gpu.cuda.state import DeviceState
from gpu.cuda.step import CudaStep, CudaSubmission, Replay
from gpu.cuda.step_buffer import StepBuffer
from gpu.cuda.timeline import StepEnd, Timeline
from gpu.executor import NO_COPIES, Content, Copies, Submission
from gpu.kernels import KernelLoader
from gpu.kernels.gather_tokens import GatherTokens
from gpu.models.decoder import Decoder
from gpu.sampling.adjustments import Adjuster, NoAdjuster
from gpu.sampling.pooled import PooledSpan
from gpu.sampling.prompt_logprobs import PromptSpan
from gpu.sampling.prompt_scores import logprobs_of, score_prompt
from gpu.sampling.slot_options import SlotOptions
from gpu.slots import Row, Slot, SlotTable

_EMPTY_LAYOUT = StepLayout(
    positions=np.zeros(0, np.int64),
    query_start=np.zeros(1, np.int64),
    context_lens=np.zeros(0, np.int64),
    slots=np.zeros(0, np.int64),
    block_tables=np.zeros((0, 1), np.int32),
    num_decode_rows=0,
)


def single_tokens(row: Row) -> list[Row]:
    """Return ``row``, or a row for its token and one for each of its drafts."""
    if not row.drafts:
        return [row]
    return [
        Row(slot=row.slot.drafted(depth), start=row.start + depth, count=1, samples=True)
        for depth in range(row.drafts + 1)
    ]


def executor_regions(max_rows: int, max_tokens: int) -> dict[str, int]:
    """Return what the executor itself needs of the step buffer."""
    return {
        "sampling_slots": max_rows,
        "lengths": max_rows,
        "sampled_from": max_rows,
        "token_slots": max_tokens,
    }


class CudaExecutor:
    """:class:`gpu.executor.Executor` over kernels.

    The parts share one device and one step buffer, which has the regions of all of them.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        model: Decoder,
        attention: CudaAttention,
        sampler: DeviceSampler,
        state: DeviceState,
        buffer: StepBuffer,
        slots: SlotTable,
        timeline: Timeline,
        max_rows: int,
        max_tokens: int,
        adjuster: Adjuster | None = None,
        adapters: CudaAdapters | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._state = state
        self._buffer = buffer
        self._slots = slots
        self._timeline = timeline
        self._gather = GatherTokens(loader, history=state.history)
        self._slot_options = SlotOptions(adjuster or NoAdjuster())
        self._adapters = adapters
        self._tokens = torch.zeros(max_tokens, dtype=torch.int64, device=loader.device)
        # Of the step that is being computed; a graph leaves them where others find them.
        self._logits = torch.empty(
            max_rows, sampler.vocab_size, dtype=torch.float32, device=loader.device
        )
        self._plain = GraphLadder()
        self._sharing = GraphLadder()
        self._adapted = GraphLadder()

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
            self.copy_pages(copies)
            return CudaSubmission(CudaStep(), self.draw, self._timeline.skip_step())
        step = self.begin(rows, copies)
        submission = CudaSubmission(step, self.draw)
        if not self._slot_options.needs_unknown_token(step.rows):
            submission.sample()
        return submission

    def copy_pages(self, copies: Copies) -> None:
        """Queue copies of pages, one after the other: [C, 2], source and destination."""
        self._attention.copy_pages(copies)

    def expect_pages(self, numbers: Sequence[int]) -> None:
        """See :meth:`gpu.executor.PagedExecutor.expect_pages`."""

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.executor.PagedExecutor.read_page`."""
        return content_of(self._attention.page(number))

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.executor.PagedExecutor.write_page`."""
        fill(self._attention.page(number), content)

    def adjusts(self, row: Row) -> bool:
        """Return whether the logits of ``row`` are adjusted before a token is drawn."""
        return self._slot_options.adjusts_slot(row.slot.number)

    def capture(
        self, capturer: Capturer, max_rows: int, progress: Callable[[int, int], None]
    ) -> None:
        """Capture steps of up to ``max_rows`` rows of one token.

        ``progress`` is called with how many batch sizes are captured, and of how many.
        """
        plain = ladder(max_rows)
        sharing = sharing_ladder(max_rows) if self._attention.may_share else []
        adapted = [] if self._adapters is None else plain
        total = len(plain) + len(sharing) + len(adapted)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        progress(0, total)
        with torch.inference_mode():
            for graphs, sizes in (
                (self._sharing, sharing),
                (self._plain, plain),
                (self._adapted, adapted),
            ):
                graphs.capture(
                    capturer,
                    sizes,
                    prepare=functools.partial(self._prepare_padded, graphs),
                    forward=functools.partial(self._forward_padded, graphs),
                    sample=self._draw,
                    on_captured=count,
                )

    def _prepare_padded(self, graphs: GraphLadder, size: int) -> None:
        """Set the launches of a captured step, and have a step of nothing but padding for it."""
        self._attention.begin_padded(size, shares=graphs is self._sharing)
        self._attention.pack_padded(_EMPTY_LAYOUT, size, None)
        self._pack_rows([], _EMPTY_LAYOUT, Replay(graphs, size))
        if self._adapters is not None:
            self._adapters.pack([], padded_to=size)
        self._state.pack([], self._slots)
        self._buffer.upload()

    def _forward_padded(self, graphs: GraphLadder, size: int) -> torch.Tensor:
        return self._head(self._forward(size, adapted=graphs is self._adapted))

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
        layout = step_layout(ordered, self._slots)
        spans = self._slot_options.prompt_spans(ordered, layout.query_start[1:] - 1)
        adjusted = self._slot_options.adjusts(sampling)
        adapted = any(row.slot.adapter for row in ordered)
        pools = self._slot_options.pooled.spans(ordered, layout.query_start[1:] - 1)
        # A graph gives no hidden states, and no logits side by side if some rows don't sample.
        replayable = not (spans or pools or (adjusted and len(sampling) < len(rows)))
        with torch.inference_mode():
            replay = self._pack_attention(layout, replayable, adapted)
            place_of = self._pack_rows(ordered, layout, replay)
            self._state.pack(ordered, self._slots, from_host)
            self._timeline.begin_step()
            self.copy_pages(copies)
            if self._adapters is not None and adapted:
                self._adapters.pack(ordered, padded_to=0 if replay is None else replay.size)
            self._buffer.upload()
            self._state.copy_large()
            places = np.array([place_of[row.slot.number, row.end] for row in sampling], np.int64)
            reports: list[torch.Tensor] = []
            self._timeline.begin_forward()
            if replay is not None:
                replay.graphs.replay_forward(replay.size)
            else:
                hidden = self._forward(len(layout.positions), adapted=adapted)
                reports += self._score(spans, hidden)
                reports += self._pool(pools, hidden)
                if sampling:
                    last = self._buffer["sampled_from"][: len(sampling)]
                    self._head(hidden.index_select(0, last))
            named = self._slot_options.named_ids(sampling)
            if named:
                reports.append(logprobs_of(self._logits, places[list(named)], named.values()))
            self._timeline.end_forward()
        return CudaStep(
            rows=sampling,
            places=places,
            replay=replay,
            adjusted=adjusted,
            spans=spans,
            pools=[span for span in pools if span.is_last],
            named=named,
            reports=reports,
        )

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
                self._draw(len(step.rows), self._logits[: len(step.rows)])
            return self._timeline.end_step(step.outputs(self._sampler.outputs))

    def draw_some(self, step: CudaStep, indices: Sequence[int]) -> CudaSubmission:
        """Queue draws of the rows ``indices`` of the last step, and keep the logits of the others.

        The tokens before those rows are known.
        """
        rows = [step.rows[index] for index in indices]
        named = self._slot_options.named_ids(rows)
        with torch.inference_mode():
            places = upload(step.places[indices], self._logits.device)
            logits = self._logits.index_select(0, places)
            reports = []
            if named:
                reports.append(logprobs_of(logits, np.array(list(named)), named.values()))
            self._timeline.begin_step()
            self._launch_sampler(
                rows,
                logits,
                self._buffer["sampling_slots"].index_select(0, places),
                self._buffer["lengths"].index_select(0, places),
            )
            part = CudaStep(rows=rows, places=np.arange(len(rows)), named=named, reports=reports)
            ending = self._timeline.end_step(part.outputs(self._sampler.outputs))
        return CudaSubmission(part, self.draw, ending)

    def _pack_attention(self, layout: StepLayout, replayable: bool, adapted: bool) -> Replay | None:
        """Pack what attention needs, for the graphs that fit the step; None if none does."""
        num_rows = len(layout.slots)
        if replayable and layout.num_decode_rows == num_rows:
            size = None if adapted else self._sharing.size_for(num_rows)
            shared = None if size is None else self._attention.find_shared(layout, size)
            unshared = self._adapted if adapted else self._plain
            graphs = unshared if shared is None else self._sharing
            size = graphs.size_for(num_rows)
            if size is not None:
                self._attention.pack_padded(layout, size, shared)
                return Replay(graphs, size)
        self._attention.begin(layout)
        return None

    def _pack_rows(
        self, ordered: Sequence[Row], layout: StepLayout, replay: Replay | None
    ) -> dict[tuple[int, int], int]:
        """Pack the token gathers and the rows that sample; return the index of each sampling row.

        A row's key is its slot and number of tokens. In a graph every row has its place, as padding
        if it doesn't sample; else they close up.
        """
        put, size = self._buffer.put, 0 if replay is None else replay.size
        samples = np.array([row.samples for row in ordered], dtype=bool)
        numbers, lengths, last = layout.slots, layout.context_lens, layout.query_start[1:] - 1
        put("token_slots", np.repeat(numbers, np.diff(layout.query_start)), padded_to=size, fill=-1)
        if replay is None:
            numbers, lengths, last = numbers[samples], lengths[samples], last[samples]
        else:
            numbers = np.where(samples, numbers, -1)
        put("sampling_slots", numbers, padded_to=size, fill=-1)
        put("lengths", lengths, padded_to=size)
        put("sampled_from", last)
        keys = zip(numbers.tolist(), lengths.tolist(), strict=True)
        return {key: place for place, key in enumerate(keys) if key[0] >= 0}

    def _forward(self, num_tokens: int, *, adapted: bool) -> torch.Tensor:
        """Return the hidden states of a step's tokens; attention is set for its launches."""
        self._state.scatter()
        tokens = self._tokens[:num_tokens]
        self._gather.launch(self._buffer["token_slots"], self._buffer["positions"], tokens)
        updates = [self._adapters] if adapted and self._adapters is not None else []
        return self._model.forward(tokens, self._attention, updates)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``hidden`` [R, E], in the first R rows of the logits' buffer."""
        return self._model.logits(hidden, self._logits[: len(hidden)])

    def _score(self, spans: list[PromptSpan], hidden: torch.Tensor) -> list[torch.Tensor]:
        """Five tensors of each span."""
        logits, vocab_size = self._model.logits, self._sampler.vocab_size
        return [each for span in spans for each in score_prompt(span, hidden, logits, vocab_size)]

    def _pool(self, spans: list[PooledSpan], hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return a vector of each span that completes a prompt."""
        states = (hidden[span.first_hidden : span.stop_hidden].float() for span in spans)
        taken = map(self._slot_options.pooled.take, spans, states)
        return [vector for vector in taken if vector is not None]

    def _draw(self, num_rows: int, logits: torch.Tensor) -> None:
        slots, lengths = self._buffer["sampling_slots"], self._buffer["lengths"]
        self._sampler.launch(logits, slots[:num_rows], lengths[:num_rows])

    def _draw_adjusted(self, step: CudaStep) -> None:
        """Queue the draws of rows that all sample, after adjusting their logits."""
        num_rows = len(step.rows)
        logits = self._logits[:num_rows]
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
