"""The forward pass of steps on one device, which every rank of a worker launches alike.

The input tokens are rank 0's, as it alone draws: they are gathered from its history, and broadcast
on the device. So a step can be queued on all ranks before the tokens of the one before are drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpu.attention import StepLayout
from gpu.cuda.adapters import CudaAdapters
from gpu.cuda.attention import CudaAttention
from gpu.cuda.graphs import Capturer, GraphLadder, Replay, ladder, sharing_ladder
from gpu.cuda.state import DeviceState
from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels import KernelLoader
from gpu.kernels.gather_tokens import GatherTokens
from gpu.models.decoder import Decoder
from gpu.models.parallel.ranks import Ranks
from gpu.models.step_embeddings import StepEmbeddings
from gpu.slots import Row

PLAIN, SHARING, ADAPTED = "plain", "sharing", "adapted"
"""The kinds of graphs: those with shared prefixes, and those with the kernels of adapters."""
_EMPTY_LAYOUT = StepLayout(
    positions=np.zeros(0, np.int64),
    query_start=np.zeros(1, np.int64),
    context_lens=np.zeros(0, np.int64),
    slots=np.zeros(0, np.int64),
    block_tables=np.zeros((0, 1), np.int32),
    num_decode_rows=0,
)


class ForwardPass:
    """The launches from the input tokens of a step to its logits.

    The parts share one device and one step buffer, which has the regions of all of them. Logits are
    those of at most ``max_rows`` rows.
    """

    @staticmethod
    def regions(max_rows: int, max_tokens: int) -> dict[str, int]:
        """Return what it needs of the step buffer itself."""
        return {
            "sampling_slots": max_rows,
            "lengths": max_rows,
            "sampled_from": max_rows,
            "token_slots": max_tokens,
        }

    def __init__(
        self,
        loader: KernelLoader,
        *,
        model: Decoder,
        attention: CudaAttention,
        state: DeviceState,
        buffer: StepBuffer,
        ranks: Ranks,
        max_rows: int,
        max_tokens: int,
        adapters: CudaAdapters | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.state = state
        self.buffer = buffer
        self.adapters = adapters
        self._ranks = ranks
        self._gather = GatherTokens(loader, history=state.history)
        self._tokens = torch.zeros(max_tokens, dtype=torch.int64, device=loader.device)
        # Of the step that is being computed; a graph leaves them where others find them.
        self.logits = torch.empty(
            max_rows, model.vocab_size, dtype=torch.float32, device=loader.device
        )
        """[max_rows, V] float32: in their first rows those of the last step."""
        self._ladders = {kind: GraphLadder() for kind in (PLAIN, SHARING, ADAPTED)}

    def run(
        self, num_tokens: int, *, adapted: bool, embedded: StepEmbeddings | None = None
    ) -> torch.Tensor:
        """Return the hidden states of a step's tokens; attention is set for its launches."""
        self.state.scatter()
        tokens = self._tokens[:num_tokens]
        self._gather.launch(self.buffer["token_slots"], self.buffer["positions"], tokens)
        self._ranks.broadcast(tokens)
        return self.model.forward(tokens, self.attention, self.updates(adapted), embedded)

    def updates(self, adapted: bool) -> list[CudaAdapters]:
        """Return the updates of a step's adapters; none if it isn't ``adapted``."""
        return [self.adapters] if adapted and self.adapters is not None else []

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``hidden`` [R, E], in the first R rows of :attr:`logits`."""
        return self.model.logits(hidden, self.logits[: len(hidden)])

    def head_of_sampled(self, hidden: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the logits of the rows that sample, which are in the step buffer."""
        return self.head(hidden.index_select(0, self.buffer["sampled_from"][:num_rows]))

    def pack_attention(self, layout: StepLayout, replayable: bool, adapted: bool) -> Replay | None:
        """Pack what attention needs, for the graphs that fit the step; None if none does."""
        num_rows, attention = len(layout.slots), self.attention
        if replayable and layout.num_decode_rows == num_rows:
            size = None if adapted else self._ladders[SHARING].size_for(num_rows)
            shared = None if size is None else attention.find_shared(layout, size)
            unshared = ADAPTED if adapted else PLAIN
            kind = unshared if shared is None else SHARING
            size = self._ladders[kind].size_for(num_rows)
            if size is not None:
                attention.pack_padded(layout, size, shared)
                return Replay(kind, self._ladders[kind], size)
        attention.begin(layout)
        return None

    def replay(self, kind: str, size: int) -> None:
        """Queue the graph of such a step."""
        self._ladders[kind].replay_forward(size)

    def capture(
        self,
        capturer: Capturer,
        max_rows: int,
        progress: Callable[[int, int], None],
        sample: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Capture steps of up to ``max_rows`` rows of one token.

        ``progress`` is called with how many batch sizes are captured, and of how many. ``sample``
        draws from the logits of so many rows; it is None where nothing is drawn.
        """
        plain = ladder(max_rows)
        sharing = sharing_ladder(max_rows) if self.attention.may_share else []
        adapted = [] if self.adapters is None else plain
        total = len(plain) + len(sharing) + len(adapted)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        progress(0, total)
        with torch.inference_mode():
            for kind, sizes in ((SHARING, sharing), (PLAIN, plain), (ADAPTED, adapted)):
                self._ladders[kind].capture(
                    capturer,
                    sizes,
                    prepare=functools.partial(self._prepare_padded, kind),
                    forward=functools.partial(self._run_padded, kind),
                    sample=sample,
                    on_captured=count,
                )

    def _prepare_padded(self, kind: str, size: int) -> None:
        """Set the launches of a captured step, and have a step of nothing but padding for it."""
        self.attention.begin_padded(size, shares=kind == SHARING)
        self.attention.pack_padded(_EMPTY_LAYOUT, size, None)
        pack_rows(self.buffer, [], _EMPTY_LAYOUT, padded_to=size)
        if self.adapters is not None:
            self.adapters.pack([], padded_to=size)
        self.state.pack_nothing()
        self.buffer.upload()

    def _run_padded(self, kind: str, size: int) -> torch.Tensor:
        return self.head(self.run(size, adapted=kind == ADAPTED))


def pack_tokens(buffer: StepBuffer, layout: StepLayout, *, padded_to: int) -> None:
    """Pack the token gathers; those of a graph are ``padded_to`` more than 0 tokens."""
    token_slots = np.repeat(layout.slots, np.diff(layout.query_start))
    buffer.put("token_slots", token_slots, padded_to=padded_to, fill=-1)


def pack_rows(
    buffer: StepBuffer, ordered: Sequence[Row], layout: StepLayout, *, padded_to: int
) -> dict[tuple[int, int], int]:
    """Pack the token gathers and the rows that sample; return the index of each sampling row.

    A row's key is its slot and number of tokens. In a graph, which is ``padded_to`` more than 0
    rows, every row has its place, as padding if it doesn't sample; else they close up.
    """
    put, size = buffer.put, padded_to
    samples = np.array([row.samples for row in ordered], dtype=bool)
    numbers, lengths, last = layout.slots, layout.context_lens, layout.query_start[1:] - 1
    pack_tokens(buffer, layout, padded_to=size)
    if size:
        numbers = np.where(samples, numbers, -1)
    else:
        numbers, lengths, last = numbers[samples], lengths[samples], last[samples]
    put("sampling_slots", numbers, padded_to=size, fill=-1)
    put("lengths", lengths, padded_to=size)
    put("sampled_from", last)
    keys = zip(numbers.tolist(), lengths.tolist(), strict=True)
    return {key: place for place, key in enumerate(keys) if key[0] >= 0}
