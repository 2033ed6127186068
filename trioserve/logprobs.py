"""The log-probabilities of a prompt's tokens: columns, because a prompt may be long."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from trioserve import wire
from trioserve.stream import TokenLogprob

__all__ = ["PromptLogprobs"]


@attrs.define(eq=False)
class PromptLogprobs:
    """Raw log-probabilities of prompt tokens, from position ``start`` (at least 1) on.

    Filled piece by piece as the prompt is computed. Token ids are the prompt's own; texts aren't
    kept, so the entries' are empty.
    """

    start: int
    num_top: int
    """Most probable alternatives of each token (fewer if the vocabulary is smaller)."""
    token_ids: tuple[int, ...] = ()
    """The request's ``logprob_token_ids``."""
    _pieces: list[_Columns] = attrs.field(factory=list, init=False)
    _stop: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._stop = self.start

    @property
    def stop(self) -> int:
        """The position of the first prompt token that hasn't come yet."""
        return self._stop

    def add(self, piece: wire.PromptPiece) -> None:
        """Take a piece that begins at :attr:`stop` or, after a preemption, before it.

        Raises:
            ValueError: its columns don't fit together, or it begins past :attr:`stop`.
        """
        columns = _Columns.read(piece, len(self.token_ids))
        skip = self._stop - piece.start
        if skip < 0:
            raise ValueError(f"prompt tokens {self._stop} to {piece.start} are missing")
        if skip < len(columns.logprobs):
            columns = columns.after(skip)
            self._pieces.append(columns)
            self._stop += len(columns.logprobs)

    def entries(self, prompt_ids: list[int]) -> list[TokenLogprob]:
        """One entry for each position from ``start`` to :attr:`stop`."""
        entries: list[TokenLogprob] = []
        for columns in self._pieces:
            for index in range(len(columns.logprobs)):
                position = self.start + len(entries)
                top = zip(
                    columns.top_ids[index].tolist(),
                    columns.top_logprobs[index].tolist(),
                    strict=True,
                )
                asked = zip(self.token_ids, columns.ids_logprobs[index].tolist(), strict=True)
                entries.append(
                    TokenLogprob(
                        prompt_ids[position],
                        float(columns.logprobs[index]),
                        "",
                        tuple((token, logprob, "") for token, logprob in top),
                        tuple((token, logprob, "") for token, logprob in asked),
                        int(columns.ranks[index]),
                    )
                )
        return entries


@attrs.frozen(eq=False)
class _Columns:
    """A piece with P tokens."""

    logprobs: npt.NDArray[np.float32]  # [P]
    ranks: npt.NDArray[np.int32]  # [P]
    top_ids: npt.NDArray[np.int32]  # [P, K]
    top_logprobs: npt.NDArray[np.float32]  # [P, K]
    ids_logprobs: npt.NDArray[np.float32]  # [P, M]

    @classmethod
    def read(cls, piece: wire.PromptPiece, num_ids: int) -> _Columns:
        logprobs, ranks = wire.floats(piece.logprobs), wire.ints(piece.ranks)
        count = len(logprobs)
        if len(ranks) != count:
            raise ValueError("a prompt piece has other ranks than log-probabilities")
        width = len(wire.ints(piece.top_ids)) // count if count else 0
        return cls(
            logprobs,
            ranks,
            wire.ints(piece.top_ids).reshape(count, width),
            wire.floats(piece.top_logprobs).reshape(count, width),
            wire.floats(piece.ids_logprobs).reshape(count, num_ids),
        )

    def after(self, skip: int) -> _Columns:
        return self if skip == 0 else _Columns(*(column[skip:] for column in attrs.astuple(self)))
