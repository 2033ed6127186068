"""The log-probabilities of a prompt's tokens: columns, because a prompt may be long."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.requests.stream import TokenLogprob


@attrs.define(eq=False)
class PromptLogprobs:
    """Raw log-probabilities of prompt tokens, from position ``start`` (at least 1) on.

    Filled piece by piece as the prompt is computed. Token ids are the prompt's own; texts aren't
    kept, so the entries' are empty.
    """

    start: int
    num_top: int
    """Most probable alternatives of each token, no more than the vocabulary has."""
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

    @property
    def num_for_each(self) -> int:
        """The number of log-probabilities for each token: its own and those of others."""
        return 1 + self.num_top + len(self.token_ids)

    def check(self, piece: wire.PromptPiece, start: int, stop: int) -> None:
        """Demand that ``piece`` has the tokens from ``start`` to before ``stop``, and can be added.

        Raises:
            ValueError: it hasn't, it can't, or its columns don't fit together.
        """
        columns = _Columns.read(piece, self.num_top, len(self.token_ids))
        if (piece.start, piece.start + len(columns.logprobs)) != (start, stop):
            raise ValueError(
                f"it has prompt tokens {piece.start} to {piece.start + len(columns.logprobs)}, "
                f"where {start} to {stop} were due"
            )
        if start > self._stop:
            raise ValueError(f"prompt tokens {self._stop} to {start} are missing")

    def add(self, piece: wire.PromptPiece) -> None:
        """Take a piece that begins at :attr:`stop` or, where it comes once more, before it.

        Raises:
            ValueError: its columns don't fit together, or it begins past :attr:`stop`.
        """
        columns = _Columns.read(piece, self.num_top, len(self.token_ids))
        skip = self._stop - piece.start
        if skip < 0:
            raise ValueError(f"prompt tokens {self._stop} to {piece.start} are missing")
        if skip < len(columns.logprobs):
            columns = columns.after(skip)
            self._pieces.append(columns)
            self._stop += len(columns.logprobs)

    def pieces(self) -> list[wire.PromptPiece]:
        """Return all pieces so far as messages for another process.

        Their slots mean nothing.
        """
        pieces: list[wire.PromptPiece] = []
        start = self.start
        for columns in self._pieces:
            pieces.append(columns.piece(start))
            start += len(columns.logprobs)
        return pieces

    def entries(self, prompt_ids: list[int]) -> list[TokenLogprob]:
        """Return one entry for each position from ``start`` to :attr:`stop`."""
        entries: list[TokenLogprob] = []
        for columns in self._pieces:
            # Whole columns become Python's numbers at once: row by row is several times slower.
            rows = (column.tolist() for column in attrs.astuple(columns, recurse=False))
            for logprob, rank, top_ids, top_logprobs, ids_logprobs in zip(*rows, strict=True):
                entries.append(
                    TokenLogprob(
                        prompt_ids[self.start + len(entries)],
                        logprob,
                        "",
                        _triples(top_ids, top_logprobs),
                        _triples(self.token_ids, ids_logprobs),
                        rank,
                    )
                )
        return entries


def _triples(ids: Sequence[int], logprobs: list[float]) -> tuple[tuple[int, float, str], ...]:
    return tuple([(id, logprob, "") for id, logprob in zip(ids, logprobs, strict=True)])


@attrs.frozen(eq=False)
class _Columns:
    """A piece with P tokens."""

    logprobs: npt.NDArray[np.float32]  # [P]
    ranks: npt.NDArray[np.int32]  # [P]
    top_ids: npt.NDArray[np.int32]  # [P, K]
    top_logprobs: npt.NDArray[np.float32]  # [P, K]
    ids_logprobs: npt.NDArray[np.float32]  # [P, M]

    @classmethod
    def read(cls, piece: wire.PromptPiece, num_top: int, num_ids: int) -> _Columns:
        logprobs = wire.floats(piece.logprobs)
        count = len(logprobs)
        columns = cls(
            logprobs,
            wire.ints(piece.ranks),
            wire.ints(piece.top_ids),
            wire.floats(piece.top_logprobs),
            wire.floats(piece.ids_logprobs),
        )
        lengths = tuple(map(len, attrs.astuple(columns, recurse=False)))
        due = (count, count, count * num_top, count * num_top, count * num_ids)
        if lengths != due:
            raise ValueError(f"its columns have {lengths} numbers, where {due} were due")
        return cls(
            columns.logprobs,
            columns.ranks,
            columns.top_ids.reshape(count, num_top),
            columns.top_logprobs.reshape(count, num_top),
            columns.ids_logprobs.reshape(count, num_ids),
        )

    def piece(self, start: int) -> wire.PromptPiece:
        return wire.PromptPiece(
            slot=0,
            start=start,
            logprobs=wire.from_floats(self.logprobs),
            ranks=wire.from_ints(self.ranks),
            top_ids=wire.from_ints(self.top_ids),
            top_logprobs=wire.from_floats(self.top_logprobs),
            ids_logprobs=wire.from_floats(self.ids_logprobs),
        )

    def after(self, skip: int) -> _Columns:
        return self if skip == 0 else _Columns(*(column[skip:] for column in attrs.astuple(self)))
