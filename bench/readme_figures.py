"""The figures of the README, from the results that ``docs/performance.md`` shows.

``python -m bench.readme_figures`` writes them, after :mod:`bench.performance_page`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.performance_page import RESULTS, filled, sources_on
from bench.report import markdown
from bench.rows import Row

__all__ = ["figures", "main"]

ROOT = Path(__file__).resolve().parents[1]
SERVERS = {"trioserve": "trioserve", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
CASES = {"1 stream": "1", "8 streams": "8", "32 streams": "32"}
EVENTS = "µs of CPU per SSE event, 256 streams"


def figures(page: str, results: Path = RESULTS) -> str:
    """Return the README's block for ``page``, the text of docs/performance.md."""
    sources = sources_on(page)
    file = sources["throughput"]
    read: dict[str, Any] = json.loads((results / file).read_text())
    rows = [Row(**each) for each in read["measurements"] if each.get("scenario") == "throughput"]
    events = json.loads((results / sources["sse"]).read_text())
    (ratio,) = [each["reached"] for each in events["verdicts"] if each["what"] == EVENTS]
    ours, theirs = (
        _median(rows, "1 stream", server, "q4_1", "tokens_per_second")
        for server in ("trioserve", "llama.cpp")
    )
    lines = [
        [name, *(_cell(rows, case, server) for server in SERVERS)] for case, name in CASES.items()
    ]
    return (
        f"{markdown(['streams', *SERVERS.values()], lines)}\n\n"
        f"With the 4-bit weights of the model's own file one stream gets {ours:,.0f} tokens/s "
        f"(llama.cpp {theirs:,.0f}),\nand an event of a stream costs {ratio:.2f} times the CPU "
        f"that it costs uvicorn. From `bench/results/{file}`."
    )


def _cell(rows: Sequence[Row], case: str, server: str) -> str:
    rate = _median(rows, case, server, "bf16", "tokens_per_second")
    first = _median(rows, case, server, "bf16", "ttft_p50_ms")
    return f"{rate:,.0f}, {first:,.0f} ms"


def _median(rows: Sequence[Row], case: str, server: str, format: str, name: str) -> float:
    return statistics.median(
        row.values[name]
        for row in rows
        if (row.case, row.server, row.format) == (case, server, format)
    )


def main() -> int:
    """Write the README's figures."""
    readme = ROOT / "README.md"
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    text = filled(readme.read_text(encoding="utf-8"), {"summary": figures(page)})
    readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
