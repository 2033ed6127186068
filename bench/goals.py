"""The project's targets, and which of them a comparison reached.

Every target is a ratio of figures of one run on one machine, or a bound on one figure. Where it is
a ratio, it is the median of the ratios of each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import attrs

from bench.report import OWN, markdown, ratios
from bench.rows import Row

__all__ = ["Verdict", "goals_table", "judge"]

_BATCHES = ("8 streams", "32 streams")
_WIDTHS = ("1 stream", *_BATCHES)


@attrs.frozen(kw_only=True)
class Verdict:
    """One target beside what was reached, which is None where it wasn't measured.

    ``reached`` and ``bound`` are in the same unit; it is met if ``reached`` is at least ``bound``,
    or at most where ``at_most`` says so. ``detail`` says between which figures. ``rounds`` is how
    many were measured, None where there are none: the fewer, the more of a verdict is chance.
    """

    what: str
    against: str
    bound: float
    reached: float | None
    at_most: bool = False
    unit: str = "times"
    detail: str = ""
    moonshot: float | None = None
    rounds: int | None = None

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None where it wasn't measured."""
        return None if self.reached is None else self._within(self.reached, self.bound)

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.reached is None:
            return "not measured"
        if self.moonshot is not None and self._within(self.reached, self.moonshot):
            return "reached, the moonshot too"
        return "reached" if self.met else "**missed**"

    def _within(self, reached: float, bound: float) -> bool:
        return reached <= bound if self.at_most else reached >= bound


def goals_table(verdicts: Sequence[Verdict]) -> str:
    """A Markdown table, a line for each target."""
    lines = []
    for one in verdicts:
        target = f"{'≤' if one.at_most else '≥'} {one.bound:g} {one.unit}"
        if one.moonshot is not None:
            target += f" (moonshot {one.moonshot:g})"
        reached = "" if one.reached is None else f"{one.reached:.3g} {one.unit}"
        rounds = "" if one.rounds is None else str(one.rounds)
        lines.append([one.what, one.against, target, reached, rounds, one.verdict, one.detail])
    heads = ["", "against", "target", "measured", "rounds", "", "medians"]
    return markdown(heads, lines)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """All targets that comparisons of servers decide."""
    figures = _Figures(rows)
    return [
        *_one_stream(figures),
        *_batches(figures),
        *_first_tokens(figures),
        *_shared_prefix(figures),
        _after_leave(figures),
        *_memory(figures),
        _start(figures),
    ]


def _one_stream(figures: _Figures) -> Iterator[Verdict]:
    for format, bound in (("bf16", 1.05), ("q8_0", 1.5), ("q4_1", 1.5)):
        of = figures.of("throughput", "1 stream", format)
        yield of.ratio("1 stream, tokens/s", "llama.cpp", "tokens_per_second", bound)


def _batches(figures: _Figures) -> Iterator[Verdict]:
    for case in _BATCHES:
        of = figures.of("throughput", case, "bf16")
        best = of.best("tokens_per_second", most=True)
        yield of.ratio(f"{case}, tokens/s", best, "tokens_per_second", 1.5, moonshot=1.8)
        best = of.best("itl_p99_ms", most=False)
        yield of.ratio(f"{case}, ITL p99", best, "itl_p99_ms", 1.0, at_most=True)


def _first_tokens(figures: _Figures) -> Iterator[Verdict]:
    for case in _WIDTHS:
        of = figures.of("throughput", case, "bf16")
        best = of.best("ttft_p50_ms", most=False)
        yield of.ratio(f"{case}, TTFT p50", best, "ttft_p50_ms", 1.0, at_most=True)


def _shared_prefix(figures: _Figures) -> Iterator[Verdict]:
    of = figures.of("shared_prefix", "", "bf16")
    what = "1,000-token shared prefix"
    best = of.best("tokens_per_second", most=True)
    yield of.ratio(f"{what}, tokens/s", best, "tokens_per_second", 2.0)
    best = of.best("ttft_p50_ms", most=False)
    yield of.ratio(f"{what}, TTFT p50", best, "ttft_p50_ms", 0.25, at_most=True)


def _after_leave(figures: _Figures) -> Verdict:
    of = figures.of("cpu_after_leave", "", "bf16")
    theirs = of.median("vllm", "burnt_cpu_seconds")
    return Verdict(
        what="CPU burnt after 16 clients leave",
        against="vllm bf16",
        bound=0.2,
        reached=of.median(OWN, "burnt_cpu_seconds"),
        at_most=True,
        unit="s",
        detail="" if theirs is None else f"vllm: {theirs:.2f} s",
        rounds=of.rounds(OWN),
    )


def _memory(figures: _Figures) -> Iterator[Verdict]:
    for format in ("q4_1", "bf16"):
        of = figures.of("memory", "", format)
        yield of.ratio("memory (PSS), MiB", "llama.cpp", "pss_mib", 1.0, at_most=True)


def _start(figures: _Figures) -> Verdict:
    of = figures.of("start", "", "q4_1")
    return Verdict(
        what="start to first token, default model",
        against="",
        bound=3.0,
        reached=of.median(OWN, "first_token_seconds"),
        at_most=True,
        unit="s",
        rounds=of.rounds(OWN),
    )


@attrs.frozen
class _Figures:
    rows: Sequence[Row]

    def of(self, scenario: str, case: str, format: str) -> _Case:
        wanted = (scenario, case, format)
        rows = [row for row in self.rows if (row.scenario, row.case, row.format) == wanted]
        return _Case(rows=rows, case=case, format=format)


@attrs.frozen(kw_only=True)
class _Case:
    """All servers in one case of one scenario, in one format."""

    rows: Sequence[Row]
    case: str
    format: str

    def median(self, server: str, name: str) -> float | None:
        """A server's figure over the rounds; None where it wasn't measured."""
        found = [row.values[name] for row in self.rows if row.server == server]
        return statistics.median(found) if found else None

    def rounds(self, server: str) -> int | None:
        """In how many rounds a server was measured; None where it wasn't."""
        return sum(row.server == server for row in self.rows) or None

    def best(self, name: str, *, most: bool) -> str:
        """The peer with the most of ``name``, or the least; "" where there is none."""
        medians = {
            row.server: value
            for row in self.rows
            if row.server != OWN and (value := self.median(row.server, name)) is not None
        }
        choose: Callable[..., str] = max if most else min
        return choose(medians, key=medians.__getitem__) if medians else ""

    def ratio(
        self,
        what: str,
        peer: str,
        name: str,
        bound: float,
        *,
        at_most: bool = False,
        moonshot: float | None = None,
    ) -> Verdict:
        """Our figure by that of ``peer``."""
        found = ratios(self.rows, self.case, self.format, OWN, peer, name)
        ours, theirs = self.median(OWN, name), self.median(peer, name)
        return Verdict(
            what=what,
            against=f"{peer or 'the best peer'} {self.format}",
            bound=bound,
            reached=statistics.median(found) if found else None,
            at_most=at_most,
            detail=f"{ours:.4g} : {theirs:.4g}" if found else "",
            moonshot=moonshot,
            rounds=len(found) or None,
        )
