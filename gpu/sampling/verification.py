"""Verification of draft tokens: a draft counts if it is the token that is sampled in its place.

The random numbers of a draw depend on seed, position and sequence alone. So what is sampled after
an accepted draft is what would be sampled there without drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gpu.sampling.drawn import Drawn
from gpu.slots import Row

_NO_VALUES = np.empty(0, dtype=np.float32)
_NO_TOP = (np.empty(0, dtype=np.int32), _NO_VALUES)


class Verification:
    """The tokens sampled after the last tokens of rows, and after their drafts while they count.

    A place is a row's index and a number of drafts before it. All places of a row are sampled at
    once, except for ``stepwise`` rows, whose logits are adjusted by what was sampled before.
    """

    def __init__(self, rows: Sequence[Row], stepwise: Collection[int]) -> None:
        self._rows = rows
        self._stepwise = stepwise
        self._kept: list[list[int]] = [[] for _ in rows]
        """For each row, the numbers of the draws that count."""
        self._ended = [False] * len(rows)
        self._draws: list[Drawn] = []
        self._num_draws = 0
        self.places = [
            (index, depth)
            for index, row in enumerate(rows)
            for depth in range(1 if index in stepwise else row.drafts + 1)
        ]
        """Places to sample next; none when all is verified."""

    @property
    def sampling_rows(self) -> list[Row]:
        """The row of each place, with the slot as it is there."""
        return [_at(self._rows[index], depth) for index, depth in self.places]

    def take(self, drawn: Drawn) -> None:
        """Take the tokens sampled at :attr:`places`."""
        following: list[tuple[int, int]] = []
        for number, ((index, depth), token) in enumerate(
            zip(self.places, drawn.tokens.tolist(), strict=True), self._num_draws
        ):
            if self._ended[index]:
                continue
            self._kept[index].append(number)
            if not self._goes_on(index, depth, token):
                self._ended[index] = True
            elif index in self._stepwise:
                following.append((index, depth + 1))
        self._draws.append(drawn)
        self._num_draws += len(self.places)
        self.places = following

    def _goes_on(self, index: int, depth: int, token: int) -> bool:
        """Return whether the draft in the place of ``token`` counts, and more may follow."""
        row = self._rows[index]
        position = row.slot.num_tokens + depth
        if depth == row.drafts or row.slot.token(position) != token:
            return False
        return not row.slot.sampler.is_stop(token, position + 1 - row.slot.prompt_length)

    def result(self) -> Drawn:
        """Return what was sampled in all places that count, row after row."""
        order = [number for kept in self._kept for number in kept]
        drawn = _joined(self._draws)
        return Drawn(
            tokens=drawn.tokens[order],
            counts=np.array([len(kept) for kept in self._kept]),
            drafted=np.array([row.drafts for row in self._rows], dtype=np.int32),
            logprobs=None if drawn.logprobs is None else drawn.logprobs[order],
            top=None if drawn.top is None else [drawn.top[number] for number in order],
            named=None if drawn.named is None else [drawn.named[number] for number in order],
            tensors=[piece for each in self._draws for piece in each.tensors],
        )


def _at(row: Row, depth: int) -> Row:
    slot = row.slot.drafted(depth)
    return Row(slot=slot, start=row.start, count=row.count, samples=True)


def _joined(draws: list[Drawn]) -> Drawn:
    """Return several draws as one."""
    if len(draws) == 1:
        return draws[0]
    joined = Drawn(tokens=np.concatenate([drawn.tokens for drawn in draws]))
    sizes = [len(drawn.tokens) for drawn in draws]
    if any(drawn.logprobs is not None for drawn in draws):
        joined.logprobs = np.concatenate(
            [
                np.full(size, np.nan, dtype=np.float32)
                if drawn.logprobs is None
                else drawn.logprobs
                for drawn, size in zip(draws, sizes, strict=True)
            ]
        )
    if any(drawn.top is not None for drawn in draws):
        joined.top = [
            entry
            for drawn, size in zip(draws, sizes, strict=True)
            for entry in drawn.top or [_NO_TOP] * size
        ]
    if any(drawn.named is not None for drawn in draws):
        joined.named = [
            entry
            for drawn, size in zip(draws, sizes, strict=True)
            for entry in drawn.named or [_NO_VALUES] * size
        ]
    return joined
