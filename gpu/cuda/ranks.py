"""The ranks of a worker on GPUs, as one of them sees the others; a worker may have one only.

Rank 0 packs each step, and sends the numbers that its step buffer has to the others. They launch
what it launches, over their parts of the model and of the KV cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpu.cuda.attention_packing import StepShape
from gpu.cuda.forward import ForwardPass
from gpu.cuda.step import PackedStep
from gpu.executor import Copies
from gpu.lora.reading import LoraWeights
from gpu.lora.store import AdapterStore
from gpu.models.parallel.adapter_parts import SentAdapters, adapter_part
from gpu.models.parallel.link import RankLink, agreed
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Alone, Ranks
from gpu.models.parallel.steps import CopyPages, LoadOnRanks, ReturnResults, UnloadOnRanks
from trioserve.model_files import ModelConfig
from trioserve.protocol.errors import ModelLoadError

T = TypeVar("T")


class LaunchStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Launch the forward pass of a step that rank 0 has packed."""

    numbers: bytes
    """Content of the step buffer, int32."""
    large: list[tuple[int, bytes]]
    """State that found no place there: a first index, and int32 from there on."""
    adapters: list[tuple[int, int]]
    """Numbers and slots of the step's adapters, in order."""
    num_tiles: int
    """Tiles of tokens with adapters."""
    graphs: str = ""
    """Kind of the graphs that are replayed; empty if kernels are launched one by one."""
    size: int = 0
    """Size of the graphs."""
    shape: StepShape | None = None
    """Launches of attention, if there are no graphs."""
    num_tokens: int = 0
    """Tokens of the step, without padding."""
    scored: list[tuple[int, int]] = []
    """Hidden states whose logits are computed in slices: the first, and the one behind the last."""
    num_sampled: int = 0
    """Rows that sample."""


class EndSteps(msgspec.Struct, frozen=True, tag=True):
    """End the steps with which memory is measured."""


RankStep: TypeAlias = (
    LaunchStep | EndSteps | CopyPages | LoadOnRanks | UnloadOnRanks | ReturnResults
)
_decoder = msgspec.msgpack.Decoder(RankStep)


def decode_rank_step(message: bytes) -> RankStep:
    """Return the step of a message."""
    step: RankStep = _decoder.decode(message)
    return step


class SoleRank:
    """The only rank of a worker: it has the whole model, and sends nothing."""

    part: ModelPart | None = None
    """Part of the model that the rank has; None for the whole."""
    ranks: Ranks = Alone()

    @property
    def leads(self) -> bool:
        """True if the rank is rank 0, which packs the steps."""
        return True

    @property
    def draws(self) -> bool:
        """True if the rank draws tokens on its GPU."""
        return True

    def agreed(self, load: Callable[[], T]) -> T:
        """Return what ``load`` returns, once it has returned on all ranks.

        Raises:
            ModelLoadError: It failed on a rank.
        """
        return load()

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        return number

    def check_alike(self, number: int, what: str) -> None:
        """Refuse ranks whose numbers differ; ``what`` says what they count.

        Raises:
            ModelLoadError: They do.
        """

    def adapter_store(
        self, config: ModelConfig, max_rank: int, pack: Callable[[LoraWeights], T]
    ) -> AdapterStore[T]:
        """Return a store of what ``pack`` makes of the rank's parts of adapters."""
        return AdapterStore(config, max_rank, pack)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Do what the others do as well: if it fails here, the ranks don't fit any more."""
        yield

    def copy_pages(self, copies: Copies) -> None:
        """Let the others copy pages."""

    def launch(self, forward: ForwardPass, step: PackedStep) -> None:
        """Let the others launch the step that is packed in ``forward``, before its upload."""

    def end_steps(self) -> None:
        """Let the others end the steps with which memory is measured."""


class CudaRank(SoleRank):
    """One of several ranks, with its ``link``; ``ranks`` are the sums over all of them."""

    def __init__(self, link: RankLink, ranks: Ranks, part: ModelPart) -> None:
        self.link = link
        self.ranks = ranks
        self.part: ModelPart = part
        self.serves = False
        """True once the model is loaded: from then on a failed step ends the worker. Before, the
        engine is told why, and ends it.
        """
        self._sent: SentAdapters[Any] | None = None

    @property
    def leads(self) -> bool:
        """See :attr:`SoleRank.leads`."""
        return self.link.rank == 0

    @property
    def draws(self) -> bool:
        """See :attr:`SoleRank.draws`; with several stages, rank 0 draws on the host."""
        return self.leads and self.part.stage is None

    def agreed(self, load: Callable[[], T]) -> T:
        """See :meth:`SoleRank.agreed`."""
        return agreed(self.link, load)

    def least(self, number: int) -> int:
        """See :meth:`SoleRank.least`."""
        return min(self.link.exchange(number))

    def check_alike(self, number: int, what: str) -> None:
        """See :meth:`SoleRank.check_alike`."""
        numbers = self.link.exchange(number)
        if len(set(numbers)) > 1:
            raise ModelLoadError(
                f"the {len(numbers)} GPUs of a worker must be alike, and these have "
                f"{', '.join(map(str, numbers))} {what}"
            )

    def adapter_store(
        self, config: ModelConfig, max_rank: int, pack: Callable[[LoraWeights], T]
    ) -> AdapterStore[T]:
        """See :meth:`SoleRank.adapter_store`."""

        def pack_part(adapter: LoraWeights) -> T:
            return pack(adapter_part(adapter, self.part))

        if not self.leads:
            return AdapterStore(self.part.whole, max_rank, pack_part)
        sent = SentAdapters(self.part.whole, max_rank, pack_part)
        self._sent = sent
        return sent

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """See :meth:`SoleRank.in_step`."""
        if self.serves:
            with self.link.in_step():
                yield
            return
        try:
            yield
        except ModelLoadError as error:
            if self.leads:
                raise  # the engine is told, and ends all ranks
            raise RuntimeError(str(error)) from error  # rank 0, which waits, ends with this process

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`SoleRank.copy_pages`."""
        if len(copies):
            self._send(CopyPages(copies.tobytes()))

    def launch(self, forward: ForwardPass, step: PackedStep) -> None:
        """See :meth:`SoleRank.launch`."""
        for due in [] if self._sent is None else self._sent.take():
            self._send(due)
        adapters = forward.adapters if step.adapted else None
        message = LaunchStep(
            numbers=forward.buffer.packed(),
            large=[(first, numbers.tobytes()) for first, numbers in forward.state.large],
            adapters=[] if adapters is None else adapters.brought,
            num_tiles=0 if adapters is None else adapters.num_tiles,
            num_tokens=step.num_tokens,
        )
        if step.replay is None:
            message = msgspec.structs.replace(
                message,
                shape=forward.attention.shape,
                scored=[
                    (each.first_hidden, each.first_hidden + each.stop - each.start)
                    for each in step.spans
                ]
                + [
                    (each.first_hidden, each.stop_hidden) for each in step.tensors if each.of_logits
                ],
                num_sampled=step.num_sampled,
            )
        else:
            graphs, size = step.replay.kind, step.replay.size
            message = msgspec.structs.replace(message, graphs=graphs, size=size)
        self._send(message)

    def end_steps(self) -> None:
        """See :meth:`SoleRank.end_steps`."""
        self._send(EndSteps())

    def _send(self, step: RankStep) -> None:
        self.link.send(msgspec.msgpack.encode(step))
