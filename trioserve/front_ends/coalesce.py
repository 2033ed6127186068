"""Several steps as one, for a front end that lags: each sequence has one row.

A row of several tokens costs a front end hardly more than one of one token, so it catches up; its
clients see fewer and larger events meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.front_ends.messages import (
    Entry,
    SequenceEnd,
    StepRow,
    StepUpdate,
    numbers_of,
    packed,
)


@attrs.define(eq=False)
class _Gained:
    """A sequence's tokens, log-probabilities and ending of all steps."""

    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[Entry] | None = None
    ending: SequenceEnd | None = None

    @property
    def is_plain(self) -> bool:
        return len(self.tokens) == 1 and self.logprobs is None and self.ending is None


def merged(steps: Sequence[StepUpdate]) -> StepUpdate:
    """Return consecutive ``steps`` as one."""
    if len(steps) == 1:
        return steps[0]
    gained: dict[int, _Gained] = {}
    for step in steps:
        for number, token in zip(numbers_of(step.numbers), numbers_of(step.tokens), strict=True):
            gained.setdefault(number, _Gained()).tokens.append(token)
        for row in step.rows:
            own = gained.setdefault(row.number, _Gained())
            own.tokens += row.tokens
            own.ending = row.ending
            if row.logprobs is not None:
                own.logprobs = [*(own.logprobs or ()), *row.logprobs]
    plain = {number: own for number, own in gained.items() if own.is_plain}
    rows = [
        StepRow(
            number,
            tuple(own.tokens),
            None if own.logprobs is None else tuple(own.logprobs),
            own.ending,
        )
        for number, own in gained.items()
        if number not in plain
    ]
    tokens = [own.tokens[0] for own in plain.values()]
    return StepUpdate(steps[-1].time, packed(plain), packed(tokens), rows)
