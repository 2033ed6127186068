"""Measurements: the points of a sweep, one after the other, with a warm-up before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trioserve.errors import TrioserveError
from trioserve.load.figures import Figures, Limits, figures_of
from trioserve.load.loop import Progress, closed_loop, open_loop
from trioserve.load.records import Run
from trioserve.load.target import AnyTarget
from trioserve.load.texts import Texts
from trioserve.load.work import Conversation, Turn

__all__ = ["MeasureError", "Measured", "Point", "count_tokens", "measure", "warm_up"]

_WARM_UP_TOKENS = 16


class MeasureError(TrioserveError):
    """There is nothing to measure, or nothing that could be said of it."""


@attrs.frozen(kw_only=True)
class Point:
    """One measurement: a closed loop of ``concurrency`` streams, or an open one of ``arrivals``."""

    work: Sequence[Conversation]
    concurrency: int | None = None
    arrivals: Sequence[float] | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        """What it is called in tables and plots."""
        if self.arrivals is None:
            return f"{self.concurrency} stream" + ("s" if self.concurrency != 1 else "")
        bound = "" if self.concurrency is None else f", {self.concurrency} at a time"
        return ("trace" if self.rate is None else f"{self.rate:g} requests/s") + bound


@attrs.frozen(kw_only=True)
class Measured:
    """What one measurement showed. ``series`` is who was asked, where several were."""

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
    """Run one point.

    Raises:
        MeasureError: the server counts no tokens, and ``texts`` can't either.
    """
    if point.arrivals is None:
        assert point.concurrency is not None
        run = await closed_loop(target, point.work, point.concurrency, progress=progress)
    else:
        run = await open_loop(
            target,
            point.work,
            point.arrivals,
            rate=point.rate,
            max_concurrency=point.concurrency,
            progress=progress,
        )
    count_tokens(run, point.work, texts)
    return Measured(label=point.label, run=run, figures=figures_of(run, limits), series=series)


def count_tokens(run: Run, work: Sequence[Conversation], texts: Texts | None) -> None:
    """Count the tokens of those answers whose server named no number.

    Of a prompt only the turn's own text is counted, not the history before it.

    Raises:
        MeasureError: it would have to be guessed.
    """
    for record in run.records:
        if record.error or record.cancelled or record.completion_tokens is not None:
            continue
        if texts is None or not texts.exact:
            raise MeasureError(
                "the server counts no tokens (usage at the end of the stream): give --tokenizer"
            )
        record.completion_tokens = texts.count(record.text)
        if record.prompt_tokens is None:
            turn = work[record.conversation].turns[record.turn]
            record.prompt_tokens = _prompt_tokens(turn, texts)


def _prompt_tokens(turn: Turn, texts: Texts) -> int:
    if isinstance(turn.prompt, tuple):
        return len(turn.prompt)
    parts = [turn.prompt] if turn.prompt is not None else []
    parts += [str(message.get("content", "")) for message in turn.messages or ()]
    return sum(map(texts.count, parts))


async def warm_up(target: AnyTarget, work: Sequence[Conversation], concurrency: int) -> None:
    """Send the first turn of each of ``work``, for a few tokens.

    Raises:
        MeasureError: one failed, so that what follows would, too.
    """
    if not work:
        return
    run = await closed_loop(target, [_shortened(one) for one in work], concurrency)
    for record in run.records:
        if record.error:
            raise MeasureError(f"a request of the warm-up failed: {record.error}")


def _shortened(conversation: Conversation) -> Conversation:
    first = conversation.turns[0]
    tokens = min(first.max_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    fields: dict[str, Any] = {"max_tokens": tokens, "cancel": None, "form": None}
    return Conversation(turns=(attrs.evolve(first, **fields),))
