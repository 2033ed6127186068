"""What a comparison measures: scenarios and their turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from bench.servers import Running, Server
from bench.setting import Setting
from trioserve.load import Run, figures_of

__all__ = ["Lonely", "Scenario", "Taken", "Turn", "taken_from"]


@attrs.frozen(kw_only=True)
class Taken:
    """What was measured, the answers in the order of the requests, and all that the client saw."""

    values: Mapping[str, float]
    answers: Sequence[str] = ()
    run: Run | None = None


@attrs.frozen(kw_only=True)
class Turn:
    """One thing that is measured on every server, one after the other."""

    case: str
    measure: Callable[[Running], Awaitable[Taken]]


class Scenario(Protocol):
    """Measured on servers that are up all together; while one is measured, the others are idle."""

    @property
    def name(self) -> str:
        """As the results call it."""

    def warm_up(self) -> list[Turn]:
        """What is asked before, and not measured."""

    def turns(self, round: int) -> list[Turn]:
        """What is measured in a round, counted from 0; no two rounds ask the same."""


class Lonely(Protocol):
    """Measured on servers that are started for it, one at a time."""

    @property
    def name(self) -> str:
        """As the results call it."""

    def setting(self, format: str) -> Setting:
        """What a server is started with."""

    async def measure(self, server: Server, log: Path, round: int) -> Taken:
        """Start the server, its output going to ``log``, measure and stop it."""


def taken_from(run: Run) -> Taken:
    """The figures of a run that comparisons use, as ``trioserve.load`` defines them."""
    figures = figures_of(run)
    return Taken(
        values={
            "tokens_per_second": figures.output_tokens_per_second,
            "ttft_p50_ms": figures.ttft_ms.p50,
            "ttft_p99_ms": figures.ttft_ms.p99,
            "first_text_p50_ms": figures.first_text_ms.p50,
            "itl_p50_ms": figures.itl_ms.p50,
            "itl_p99_ms": figures.itl_ms.p99,
            "tpot_p50_ms": figures.tpot_ms.p50,
            "e2e_p50_ms": figures.e2e_ms.p50,
            "output_tokens": figures.completion_tokens,
        },
        answers=[record.text for record in run.records],
        run=run,
    )
