"""The project's targets, and which of them a comparison reached.

Every target is a ratio of figures of one run on one machine, the median of the ratios of each
round, or a bound on one figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import attrs

from bench.compare.contest import OWN, Row, ratios
from bench.report import Verdict


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Return all targets that comparisons of servers decide."""
    return [*_throughput(rows), *_shared_prefix(rows), *_alone(rows)]


def _throughput(rows: Sequence[Row]) -> Iterator[Verdict]:
    for format, bound in (("bf16", 1.05), ("q8_0", 1.5), ("q4_1", 1.5)):
        of = _Case(rows, "throughput", "1 stream", format)
        yield of.ratio("1 stream, tokens/s", "llama.cpp", "tokens_per_second", bound)
    for case in ("8 streams", "32 streams"):
        of = _Case(rows, "throughput", case, "bf16")
        best = of.best("tokens_per_second", max)
        yield of.ratio(f"{case}, tokens/s", best, "tokens_per_second", 1.5, moonshot=1.8)
        best = of.best("itl_p99_ms", min)
        yield of.ratio(f"{case}, ITL p99", best, "itl_p99_ms", 1.0, at_most=True)
    for case in ("1 stream", "8 streams", "32 streams"):
        of = _Case(rows, "throughput", case, "bf16")
        best = of.best("ttft_p50_ms", min)
        yield of.ratio(f"{case}, TTFT p50", best, "ttft_p50_ms", 1.0, at_most=True)


def _shared_prefix(rows: Sequence[Row]) -> Iterator[Verdict]:
    of = _Case(rows, "shared_prefix", "", "bf16")
    what = "1,000-token shared prefix"
    best = of.best("tokens_per_second", max)
    yield of.ratio(f"{what}, tokens/s", best, "tokens_per_second", 2.0)
    best = of.best("ttft_p50_ms", min)
    yield of.ratio(f"{what}, TTFT p50", best, "ttft_p50_ms", 0.25, at_most=True)


def _alone(rows: Sequence[Row]) -> Iterator[Verdict]:
    of = _Case(rows, "cpu_after_leave", "", "bf16")
    theirs = of.median("vllm", "burnt_cpu_seconds")
    detail = "" if theirs is None else f"vllm: {theirs:.2f} s"
    what = "CPU burnt after 16 clients leave"
    yield of.bound(what, "burnt_cpu_seconds", 0.2, against="vllm bf16", detail=detail)
    for format in ("q4_1", "bf16"):
        of = _Case(rows, "memory", "", format)
        yield of.ratio("memory (PSS), MiB", "llama.cpp", "pss_mib", 1.0, at_most=True)
    of = _Case(rows, "start", "", "q4_1")
    yield of.bound("start to first token, default model", "first_token_seconds", 3.0)


@attrs.frozen
class _Case:
    """All servers in one case of one scenario, in one format."""

    every: Sequence[Row]
    scenario: str
    case: str
    format: str

    @property
    def rows(self) -> list[Row]:
        wanted = (self.scenario, self.case, self.format)
        return [row for row in self.every if (row.scenario, row.case, row.format) == wanted]

    def median(self, server: str, name: str) -> float | None:
        """Return a server's figure over the rounds; None where it wasn't measured."""
        found = [row.values[name] for row in self.rows if row.server == server]
        return statistics.median(found) if found else None

    def best(self, name: str, choose: Callable[..., str]) -> str:
        """Return the best peer's name, "" where there is none."""
        peers = {row.server for row in self.rows if row.server != OWN}
        return choose(sorted(peers), key=lambda one: self.median(one, name)) if peers else ""

    def bound(self, what: str, name: str, bound: float, **more: str) -> Verdict:
        """Hold our figure, in seconds, to a bound."""
        rounds = sum(row.server == OWN for row in self.rows) or None
        reached = self.median(OWN, name)
        fields = {"at_most": True, "unit": "s", "rounds": rounds, "against": "", **more}
        return Verdict(what=what, bound=bound, reached=reached, **fields)

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
        """Compare our figure with that of ``peer``."""
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
