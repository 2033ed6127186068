"""The points of a sweep and their measurement, and a warm-up before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from trioserve.load.figures import Figures, Limits, figures_of
from trioserve.load.loop import Progress, closed_loop, open_loop
from trioserve.load.records import Run
from trioserve.load.target import AnyTarget
from trioserve.load.texts import Texts
from trioserve.load.work import Conversation, Turn
from trioserve.protocol.errors import TrioserveError

_WARM_UP_TOKENS = 16
_USAGE = "(usage at the end of the stream): give --tokenizer"


class MeasureError(TrioserveError):
    """The measurement is impossible, or its result would be a guess."""


@attrs.frozen(kw_only=True)
class Point:
    """One measurement: a closed loop of ``concurrency`` streams, or an open one of ``arrivals``."""

    work: Sequence[Conversation]
    concurrency: int | None = None
    arrivals: Sequence[float] | None = None
    rate: float | None = None
    """Requests per second, to be reported; infinite if all come at once."""
    repetition: int = 1
    """Number of this repetition of the same measurement, from 1."""

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        again = "" if self.repetition == 1 else f" ({self.repetition})"
        if self.arrivals is None:
            return f"{self.concurrency} stream{'s' if self.concurrency != 1 else ''}{again}"
        bound = "" if self.concurrency is None else f", {self.concurrency} at a time"
        return self._pace + bound + again

    @property
    def _pace(self) -> str:
        if self.rate is None:
            return "trace"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"


@attrs.frozen(kw_only=True)
class Measured:
    """The result of one measurement. ``series`` names the target if there are several."""

    label: str
    run: Run
    figures: Figures
    series: str = ""


async def measure(
    target: AnyTarget,
    point: Point,
    *,
    limits: Limits | None = None,
    texts: Texts | None = None,
    progress: Progress | None = None,
    series: str = "",
) -> Measured:
    """Measure one point.

    Raises:
        MeasureError: The server doesn't count tokens, and ``texts`` can't either.
    """
    if point.arrivals is None:
        assert point.concurrency is not None
        run = await closed_loop(target, point.work, point.concurrency, progress=progress)
    else:
        run = await open_loop(
            target,
            point.work,
            point.arrivals,
            # Plots and JSON can't show an infinite number.
            rate=None if point.rate is None or math.isinf(point.rate) else point.rate,
            max_concurrency=point.concurrency,
            progress=progress,
        )
    count_tokens(run, point.work, texts)
    return Measured(label=point.label, run=run, figures=figures_of(run, limits), series=series)


def count_tokens(run: Run, work: Sequence[Conversation], texts: Texts | None) -> None:
    """Count the tokens of answers for which the server reported no counts.

    Of a prompt only the turn's own text is counted, without the history. Without a tokenizer, an
    uncounted answer fails if other answers have counts.

    Raises:
        MeasureError: No answer has counts, and there is no tokenizer.
    """
    answered = [one for one in run.records if not one.error and not one.cancelled]
    uncounted = [one for one in answered if one.completion_tokens is None]
    if not uncounted:
        return
    if texts is None or not texts.exact:
        if len(uncounted) == len(answered):
            raise MeasureError(f"the server counts no tokens {_USAGE}")
        for record in uncounted:
            record.fail("no usage", f"the server named no number of tokens {_USAGE}")
        return
    for record in uncounted:
        record.completion_tokens = texts.count(record.reasoning + record.text)
        if record.prompt_tokens is None:
            turn = work[record.conversation].turns[record.turn]
            record.prompt_tokens = _prompt_tokens(turn, texts)


def _prompt_tokens(turn: Turn, texts: Texts) -> int:
    if isinstance(turn.prompt, tuple):
        return len(turn.prompt)
    parts = [turn.prompt] if turn.prompt is not None else []
    contents = [message.get("content") for message in turn.messages or ()]
    parts += [content for content in contents if isinstance(content, str)]
    return sum(map(texts.count, parts))


async def warm_up(
    target: AnyTarget,
    work: Sequence[Conversation],
    concurrency: int,
    *,
    texts: Texts | None = None,
) -> None:
    """Send the first turn of each conversation, for a few tokens.

    Raises:
        MeasureError: A request failed, or the server doesn't count tokens and ``texts`` can't
            either. The measurement would fail likewise.
    """
    if not work:
        return
    shortened = [_shortened(one) for one in work]
    run = await closed_loop(target, shortened, concurrency)
    for record in run.records:
        if record.error:
            raise MeasureError(f"a request of the warm-up failed: {record.error}")
    count_tokens(run, shortened, texts)


def _shortened(conversation: Conversation) -> Conversation:
    first = conversation.turns[0]
    tokens = min(first.max_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    fields: dict[str, Any] = {"max_tokens": tokens, "cancel": None, "form": None}
    return Conversation(turns=(attrs.evolve(first, **fields),))
