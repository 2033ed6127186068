"""Any load that ``trioserve bench`` knows, on all servers side by side.

``python -m bench.compare --compare vllm --load --dataset chat --concurrency 4``: what follows
``--load`` are the options of ``trioserve bench``. They are no part of the targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from bench.prompts import tokenizer
from bench.scenario import Taken, Turn, taken_from
from bench.servers import Running
from bench.validity import InvalidRun, check_answers
from trioserve.cli.bench import points_of
from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.flags import bench_options
from trioserve.cli.parser import parse
from trioserve.load.measure import MeasureError, Point, measure, warm_up
from trioserve.load.texts import CountedTexts
from trioserve.load.work import Conversation

__all__ = ["Load", "load_of"]

_SEED_STEP = 97
"""Between the seeds of two rounds."""


@attrs.frozen(kw_only=True)
class Load:
    """Each concurrency or rate is a case. Prompts are others in each round."""

    options: BenchOptions
    name: str = "load"

    def warm_up(self) -> list[Turn]:
        """What ``trioserve bench`` sends before it measures."""
        before = points_of(self.options, _texts())[1]

        async def measure(one: Running) -> Taken:
            try:
                await warm_up(one.target, before, max(len(before), 1))
            except MeasureError as error:
                raise InvalidRun(f"{one.server.title}: {error}") from error
            return Taken(values={})

        return [Turn(case="", measure=measure)]

    def turns(self, round: int) -> list[Turn]:
        """Each case once."""
        seed = self.options.seed + _SEED_STEP * (round + 1)
        options = attrs.evolve(self.options, seed=seed)
        return [self._turn(point) for point in points_of(options, _texts())[0]]

    def _turn(self, point: Point) -> Turn:
        async def take(one: Running) -> Taken:
            try:
                measured = await measure(one.target, point)
            except MeasureError as error:
                raise InvalidRun(f"{one.server.title}: {error}") from error
            check_answers(one.server.title, measured.run, point.work)
            taken = taken_from(measured.run)
            return taken if _comparable(point.work) else attrs.evolve(taken, answers=())

        return Turn(case=point.label, measure=take)


def load_of(words: Sequence[str]) -> Load:
    """The load that the options of ``trioserve bench`` in ``words`` describe.

    Raises:
        UsageError: they don't.
        SystemExit: one is unknown.
    """
    return Load(options=bench_options(vars(parse(["bench", *words]))))


def _comparable(work: Sequence[Conversation]) -> bool:
    """Whether all servers are asked the same, and answer all of it.

    Later turns hold what was answered before, which parts after a while.
    """
    turns = [turn for one in work for turn in one.turns]
    return len(turns) == len(work) and all(turn.cancel is None for turn in turns)


def _texts() -> CountedTexts:
    return CountedTexts(tokenizer())
