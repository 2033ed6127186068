"""The project's targets, and which of them a comparison reached."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

import attrs

from bench.compare.contest import OWN, Row, ratios
from bench.report import Verdict


@attrs.frozen
class Target:
    """A bound on the ratio of this server's figure to a peer's, of one run on one machine.

    Without a ``peer`` it is the best one in that figure. A target in seconds is a bound on this
    server's own figure, and its peer's is shown.
    """

    what: str
    scenario: str
    case: str
    format: str
    figure: str
    bound: float
    peer: str = ""
    at_most: bool = False
    moonshot: float | None = None
    unit: str = "times"
    server: str = OWN

    def verdict(self, rows: Sequence[Row]) -> Verdict:
        """Return the target beside the median of all rounds."""
        here = (self.scenario, self.case, self.format)
        mine = [row for row in rows if (row.scenario, row.case, row.format) == here]
        found: dict[str, list[float]] = {}
        for row in mine:
            found.setdefault(row.server, []).append(row.values[self.figure])
        medians = {server: statistics.median(values) for server, values in found.items()}
        ours, best = medians.pop(self.server, None), min if self.at_most else max
        if self.unit == "s":
            peer, reached, rounds = self.peer, ours, len(found.get(self.server, ()))
            detail = f"{peer}: {medians[peer]:.2f} s" if peer in medians else ""
        else:
            peer = self.peer or best(sorted(medians), key=medians.__getitem__, default="")
            each = ratios(mine, self.case, self.format, self.server, peer, self.figure)
            reached, rounds = statistics.median(each) if each else None, len(each)
            detail = f"{ours:.4g} : {medians[peer]:.4g}" if each else ""
            peer = peer or "the best peer"
        bounds = {"bound": self.bound, "at_most": self.at_most, "moonshot": self.moonshot}
        shown: dict[str, Any] = {"what": self.what, "unit": self.unit, "detail": detail}
        against = f"{peer} {self.format}" if peer else ""
        return Verdict(against=against, reached=reached, rounds=rounds or None, **shown, **bounds)


# llama.cpp alone is beside the kernels for AVX2: vLLM has none.
_ONE, _MANY = (1.0, 1.5) if os.environ.get("TRIOSERVE_CPU_ISA") == "avx2" else (1.1, 1.6)
_RATE, _TTFT, _GAPS = "tokens_per_second", "ttft_p50_ms", "itl_p99_ms"
_WIDTHS, _PREFIX = "throughput", "shared_prefix"
_SHARED = "1,000-token shared prefix"
_LEFT, _BURNT = "CPU burnt after 16 clients leave", "burnt_cpu_seconds"
_STARTED, _FIRST = "start to first token, default model", "first_token_seconds"
_PSS = ("memory (PSS), MiB", "memory", "")
_DRAFTS = f"{OWN}, drafts by text"
_GAINS = {
    "1 stream": (2.0, 2.0, 2.0, 1.0),
    "8 streams": (1.3, 1.3, 1.3, 0.98),
    "32 streams": (0.98, 0.98, 0.98, 0.98),
}
TARGETS = [
    Target("1 stream, tokens/s", _WIDTHS, "1 stream", "bf16", _RATE, _ONE, "llama.cpp"),
    Target("1 stream, tokens/s", _WIDTHS, "1 stream", "q8_0", _RATE, 1.6, "llama.cpp"),
    Target("1 stream, tokens/s", _WIDTHS, "1 stream", "q4_1", _RATE, 1.6, "llama.cpp"),
    Target("1 stream, TTFT p50", _WIDTHS, "1 stream", "bf16", _TTFT, 1.0, at_most=True),
    *(
        Target(f"{streams}, {what}", _WIDTHS, streams, "bf16", figure, bound, at_most=bound == 1.0)
        for streams in ("8 streams", "32 streams")
        for what, figure, bound in (
            ("tokens/s", _RATE, _MANY),
            ("TTFT p50", _TTFT, 1.0),
            ("TTFT p99", "ttft_p99_ms", 1.0),
            ("ITL p99", _GAPS, 1.0),
        )
    ),
    Target("4 prompts of 1,000, tokens/s", "prompts", "4 streams", "bf16", _RATE, 1.0),
    Target("burst of 16 prompts, TTFT p99", "burst", "", "bf16", "ttft_p99_ms", 1.0, at_most=True),
    Target("burst of 16 prompts, ITL p99", "burst", "", "bf16", _GAPS, 1.0, at_most=True),
    Target(f"{_SHARED}, tokens/s", _PREFIX, "4 streams", "bf16", _RATE, 2.0),
    Target(f"{_SHARED}, TTFT p50", _PREFIX, "4 streams", "bf16", _TTFT, 0.25, at_most=True),
    Target(_LEFT, "cpu_after_leave", "", "bf16", _BURNT, 0.2, "vllm", at_most=True, unit="s"),
    *(
        Target(case, "speculation", case, "bf16", _RATE, bound, OWN, server=_DRAFTS)
        for streams, bounds in _GAINS.items()
        for task, bound in zip(("edit", "json", "quote", "chat"), bounds, strict=True)
        for case in (f"{task}, {streams}",)
    ),
    Target("4 beams, tokens/s", "beam_search", "4 beams", "bf16", _RATE, 5.0, "vllm"),
    Target(*_PSS, "q4_1", "pss_mib", 1.0, "llama.cpp", at_most=True),
    Target(*_PSS, "bf16", "pss_mib", 1.0, "llama.cpp", at_most=True),
    Target(_STARTED, "start", "", "q4_1", _FIRST, 1.5, at_most=True, unit="s"),
]


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Return all targets that comparisons of servers decide."""
    return [target.verdict(rows) for target in TARGETS]
