"""Weight swaps of several ranks: all read the new weights, and all put them in place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu.loading.weight_swap import ModelWeights, ReadWeights
from gpu.models.parallel.link import RankLink, attempted
from gpu.models.parallel.steps import DiscardOnRanks, ReadOnRanks, SwapOnRanks, encode_step
from trioserve.model_files import ModelFiles
from trioserve.protocol.errors import ModelLoadError


class LeadingWeights(ModelWeights[ModelFiles]):
    """The weights of rank 0: what is done with them here, the other ranks do with theirs.

    ``read`` returns what swaps the weights in on this rank.
    """

    def __init__(
        self, link: RankLink, files_at: Callable[[Path], ModelFiles], read: ReadWeights
    ) -> None:
        super().__init__(files_at, self._swapping_all(read))
        self._link = link
        self._answered = threading.Event()
        """Set when all ranks have answered what they were last told to read."""
        self._answered.set()

    def reading(self, path: str) -> Callable[[], str]:
        """See :meth:`gpu.loading.weight_swap.ModelWeights.reading`; all ranks read."""
        read = super().reading(path)
        self._link.send(encode_step(ReadOnRanks(path)))
        before, answered = self._answered, threading.Event()
        self._answered = answered

        def read_on_all() -> str:
            checksum, error = attempted(self._link, read)
            before.wait()
            with self._link.in_step():
                error = self._link.first_error(error)
            answered.set()
            if error:
                raise ModelLoadError(error)
            return checksum[0]

        return read_on_all

    def discard(self) -> None:
        """See :meth:`gpu.loading.weight_swap.ModelWeights.discard`; all ranks do so."""
        super().discard()
        self._link.send(encode_step(DiscardOnRanks()))

    def _swapping_all(self, read: ReadWeights) -> ReadWeights:
        def read_here(files: ModelFiles) -> Callable[[], None]:
            swap = read(files)

            def swap_all() -> None:
                with self._link.in_step():
                    self._link.send(encode_step(SwapOnRanks()))
                    swap()

            return swap_all

        return read_here


class FollowingWeights:
    """The weights of another rank, which does with them what rank 0 says."""

    def __init__(
        self, link: RankLink, files_at: Callable[[Path], ModelFiles], read: ReadWeights
    ) -> None:
        self._link = link
        self._weights = ModelWeights(files_at, read)
        self._reading = ThreadPoolExecutor(1)  # so that answers come in the order of the messages

    def follow(self, step: ReadOnRanks | SwapOnRanks | DiscardOnRanks) -> None:
        """Do one step."""
        match step:
            case ReadOnRanks(path=path):
                self._reading.submit(self._answer, self._weights.reading(path))
            case SwapOnRanks():
                self._weights.swap(self._weights.path)
            case DiscardOnRanks():
                self._weights.discard()

    def _answer(self, read: Callable[[], str]) -> None:
        _, error = attempted(self._link, read)
        self._link.send(error.encode())
