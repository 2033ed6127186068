"""Steps on a GPU, or in the emulation: packed on the host, queued, and waited for later.

A step is one upload, the forward pass, the sampler, and a copy of what was drawn. The host reads
none of its results: the next step's input tokens are gathered from the device's own history, so it
can be queued before this one has ended. Steps of rows of one token replay CUDA graphs, forward and
sampling apart; steps with longer rows are launched one kernel after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import StepLayout
from gpu.attention.cuda import CudaAttention
from gpu.device_sampler import DeviceSampler, top_lists
from gpu.device_state import DeviceState
from gpu.executor import Drawn, Submission, in_layout_order, step_layout
from gpu.graphs import Capturer, GraphLadder, ladder, sharing_ladder
from gpu.kernels import KernelLoader
from gpu.kernels.gather_tokens import GatherTokens
from gpu.models.decoder import Decoder
from gpu.slots import Row, Slot, SlotTable
from gpu.step_buffer import StepBuffer
from gpu.timeline import Ending, Timeline

__all__ = ["CudaExecutor", "executor_regions"]

_EMPTY_LAYOUT = StepLayout(
    positions=np.zeros(0, np.int64),
    query_start=np.zeros(1, np.int64),
    context_lens=np.zeros(0, np.int64),
    slots=np.zeros(0, np.int64),
    block_tables=np.zeros((0, 1), np.int32),
    num_decode_rows=0,
)


def executor_regions(max_rows: int, max_tokens: int) -> dict[str, int]:
    """What the executor itself needs of the step buffer."""
    return {
        "sampling_slots": max_rows,
        "lengths": max_rows,
        "sampled_from": max_rows,
        "token_slots": max_tokens,
    }


@attrs.frozen
class _Replay:
    """The graphs that a step replays."""

    graphs: GraphLadder
    size: int


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
        max_tokens: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._state = state
        self._buffer = buffer
        self._slots = slots
        self._timeline = timeline
        self._gather = GatherTokens(loader, history=state.history)
        self._tokens = torch.zeros(max_tokens, dtype=torch.int64, device=loader.device)
        self._plain = GraphLadder()
        self._sharing = GraphLadder()

    @property
    def completions(self) -> int | None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return self._timeline.completions

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        self._state.open(slot)
        self._sampler.open(slot.number, slot.sampler, slot.prompt_length)

    def submit(self, rows: Sequence[Row]) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`."""
        if not rows:
            return _Submission(self._timeline.skip_step(), np.zeros(0, np.int64), [])
        ordered = in_layout_order(rows)
        layout = step_layout(ordered, self._slots)
        with torch.inference_mode():
            replay = self._pack_attention(layout)
            places = self._pack_rows(ordered, layout, replay)
            self._state.pack(ordered, self._slots)
            self._timeline.begin_step()
            self._buffer.upload()
            self._state.copy_large()
            if replay is not None:
                self._replay(replay)
            else:
                self._launch(len(layout.positions), len(places))
            sampling = [row for row in rows if row.samples]
            asked = [row.slot.sampler.logprobs for row in sampling]
            order = np.array([places[row.slot.number] for row in sampling], dtype=np.int64)
            ending = self._timeline.end_step(self._outputs(order, asked))
        return _Submission(ending, order, asked)

    def capture(
        self, capturer: Capturer, max_rows: int, progress: Callable[[int, int], None]
    ) -> None:
        """Capture steps of up to ``max_rows`` rows of one token.

        ``progress`` is called with how many batch sizes are captured, and of how many.
        """
        plain = ladder(max_rows)
        sharing = sharing_ladder(max_rows) if self._attention.may_share else []
        total = len(plain) + len(sharing)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        progress(0, total)
        with torch.inference_mode():
            for graphs, sizes, shares in (
                (self._sharing, sharing, True),
                (self._plain, plain, False),
            ):
                graphs.capture(
                    capturer,
                    sizes,
                    prepare=functools.partial(self._prepare_padded, shares=shares),
                    forward=lambda size: self._model.logits(self._forward(size)),
                    sample=self._sample,
                    on_captured=count,
                )

    def _prepare_padded(self, size: int, *, shares: bool) -> None:
        """Set the launches of a captured step, and have a step of nothing but padding for it."""
        self._attention.begin_padded(size, shares=shares)
        self._attention.pack_padded(_EMPTY_LAYOUT, size, None)
        self._pack_rows([], _EMPTY_LAYOUT, _Replay(self._plain, size))
        self._state.pack([], self._slots)
        self._buffer.upload()

    def _pack_attention(self, layout: StepLayout) -> _Replay | None:
        """Pack what attention needs, for the graphs that fit the step; None if none does."""
        num_rows = len(layout.slots)
        if layout.num_decode_rows == num_rows:
            size = self._sharing.size_for(num_rows)
            shared = None if size is None else self._attention.find_shared(layout, size)
            graphs = self._plain if shared is None else self._sharing
            size = graphs.size_for(num_rows)
            if size is not None:
                self._attention.pack_padded(layout, size, shared)
                return _Replay(graphs, size)
        self._attention.begin(layout)
        return None

    def _pack_rows(
        self, ordered: Sequence[Row], layout: StepLayout, replay: _Replay | None
    ) -> dict[int, int]:
        """Pack whose tokens are gathered and which rows sample: the place of each of these.

        In a graph every row has its place, as padding if it doesn't sample; else they close up.
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
        return {slot: place for place, slot in enumerate(numbers.tolist()) if slot >= 0}

    def _replay(self, replay: _Replay) -> None:
        replay.graphs.replay_forward(replay.size)
        self._timeline.before_outputs()
        replay.graphs.replay_sampling(replay.size)

    def _launch(self, num_tokens: int, num_sampling: int) -> None:
        hidden = self._forward(num_tokens)
        if num_sampling:
            last = hidden.index_select(0, self._buffer["sampled_from"][:num_sampling])
            logits = self._model.logits(last)
            self._timeline.before_outputs()
            self._sample(num_sampling, logits)

    def _forward(self, num_tokens: int) -> torch.Tensor:
        """The hidden states of a step's tokens, whose launches attention has been set for."""
        self._state.scatter()
        tokens = self._tokens[:num_tokens]
        self._gather.launch(self._buffer["token_slots"], self._buffer["positions"], tokens)
        return self._model.forward(tokens, self._attention)

    def _sample(self, num_rows: int, logits: torch.Tensor) -> None:
        slots, lengths = self._buffer["sampling_slots"], self._buffer["lengths"]
        self._sampler.launch(logits, slots[:num_rows], lengths[:num_rows])

    def _outputs(self, places: npt.NDArray[np.int64], asked: list[int]) -> list[torch.Tensor]:
        """What of the sampler's outputs is to be copied to the host."""
        if not asked:
            return []
        count, outputs = int(places.max()) + 1, self._sampler.outputs
        wanted = [outputs.tokens]
        if max(asked) >= 0:
            wanted += [outputs.logprobs, outputs.top_ids, outputs.top_values]
        return [output[:count] for output in wanted]


@attrs.frozen
class _Submission:
    """A step that has been queued: where each row that samples finds its outputs."""

    _ending: Ending
    _places: npt.NDArray[np.int64]
    _asked: list[int]

    def wait(self) -> Drawn:
        """See :meth:`gpu.executor.Submission.wait`."""
        finished = self._ending.wait()
        outputs = [output[self._places] for output in finished.outputs]
        reports = len(outputs) > 1
        return Drawn(
            tokens=outputs[0] if outputs else np.zeros(0, np.int32),
            logprobs=outputs[1] if reports else None,
            top=top_lists(outputs[2], outputs[3], self._asked) if reports else None,
            step_us=finished.step_us,
            idle_us=finished.idle_us,
        )
