"""Loads as users make them: arrivals at a rate, and chats whose history comes again.

``python -m bench.loads --compare llama.cpp`` runs both. A warm-up has seed 0, rounds those from 1
on. They are no part of the targets; what
they ask is made by ``trioserve.load``, which has more: ``trioserve bench --help``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import attrs

from bench.prompts import tokenizer
from bench.scenario import Taken, Turn, taken_from
from bench.servers import Running
from bench.validity import check_answers
from trioserve.load import closed_loop
from trioserve.load.arrivals import poisson_arrivals
from trioserve.load.datasets import Lengths, chats, random_prompts
from trioserve.load.loop import open_loop
from trioserve.load.texts import CountedTexts
from trioserve.load.work import Conversation

__all__ = ["Chats", "Rates"]

_EVEN = Lengths(input_tokens=128, output_tokens=64, range_ratio=0.5)
_TURN = Lengths(input_tokens=64, output_tokens=64)


@attrs.frozen(kw_only=True)
class Rates:
    """An open loop: requests arrive by a Poisson process, however many are still running.

    Lengths are even between half and three halves of those given. Each rate is a case.
    """

    rates: Sequence[float] = (0.5, 1.0, 2.0)
    seconds: float = 20.0
    lengths: Lengths = _EVEN
    name: str = "rates"

    def warm_up(self) -> list[Turn]:
        """A few requests."""
        return [self._turn(2.0, 4, -1)]

    def turns(self, round: int) -> list[Turn]:
        """Each rate once."""
        return [
            self._turn(rate, math.ceil(rate * self.seconds), 1000 * round + index)
            for index, rate in enumerate(self.rates)
        ]

    def _turn(self, rate: float, count: int, seed: int) -> Turn:
        work = random_prompts(_texts(), count, self.lengths, seed=seed + 1)
        arrivals = poisson_arrivals(count, rate, seed + 1)

        async def measure(one: Running) -> Taken:
            run = await open_loop(one.target, work, arrivals, rate=rate)
            check_answers(one.server.title, run, work)
            return taken_from(run)

        return Turn(case=f"{rate:g} requests/s", measure=measure)


@attrs.frozen(kw_only=True)
class Chats:
    """A closed loop of conversations: each turn holds the whole history, answers included."""

    streams: int = 8
    turns_each: int = 4
    lengths: Lengths = _TURN
    name: str = "chats"

    def warm_up(self) -> list[Turn]:
        """Two conversations."""
        return [self._turn(2, -1)]

    def turns(self, round: int) -> list[Turn]:
        """As many conversations as streams."""
        return [self._turn(self.streams, round)]

    def _turn(self, count: int, seed: int) -> Turn:
        work: list[Conversation] = chats(
            _texts(), count, self.lengths, turns=self.turns_each, system_tokens=64, seed=seed + 1
        )

        async def measure(one: Running) -> Taken:
            run = await closed_loop(one.target, work, count)
            check_answers(one.server.title, run, work)
            # Answers part after a while, and what is asked then does, too: they aren't compared.
            return attrs.evolve(taken_from(run), answers=())

        return Turn(case=f"{self.streams} chats of {self.turns_each} turns", measure=measure)


def _texts() -> CountedTexts:
    return CountedTexts(tokenizer())


if __name__ == "__main__":
    from bench.compare import main

    sys.exit(main(scenarios=["rates", "chats"]))
