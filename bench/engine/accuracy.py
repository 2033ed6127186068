"""The accuracy of number formats: ``python -m bench.engine.accuracy``.

The default model reads some pages of this project's documentation, in windows of equal length, with
its weights and activations in each format. The table shows its perplexity, by how much the
log-probability of the token that follows differs from float32's, and how often the most probable
token is another one than float32's. Only differences between rows mean anything: the text is
technical, and the model small.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from bench.report import Made, markdown, run_script
from bench.servers import MODEL, tokenizer
from trioserve import open_engine

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = [f"{_ROOT}/docs/{page}.md" for page in ("security", "overload", "shutdown")]
REFERENCE = "float32"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "as the file has it": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
}
"""The engine's options for each format."""


@attrs.frozen
class Reading:
    """The log-probability of each following token, and the most probable token, of a text."""

    logprobs: list[float]
    most_probable: list[int]


async def read(options: dict[str, Any], windows: Sequence[Sequence[int]]) -> Reading:
    """Read all tokens of ``windows`` but the first of each with an engine's ``options``."""
    reading = Reading([], [])
    limits = {"max_model_len": max(map(len, windows)) + 1, "enable_prefix_caching": False}
    async with open_engine(MODEL, **limits, **options) as engine:
        for window in windows:
            ids = list(window)
            completion = await engine.complete(ids, max_tokens=0, prompt_logprobs=1)
            assert completion.prompt_logprobs is not None
            for entry in completion.prompt_logprobs.entries(ids):
                reading.logprobs.append(entry.logprob)
                reading.most_probable.append(entry.top[0][0])
    return reading


def compare(reading: Reading, reference: Reading) -> tuple[float, float, float]:
    """Return the perplexity, the mean difference, and the share of other choices."""
    pairs = list(zip(reading.logprobs, reference.logprobs, strict=True))
    choices = zip(reading.most_probable, reference.most_probable, strict=True)
    return (
        math.exp(-statistics.fmean(reading.logprobs)),
        statistics.fmean(abs(ours - theirs) for ours, theirs in pairs),
        sum(ours != theirs for ours, theirs in choices) / len(pairs),
    )


async def measure(options: argparse.Namespace) -> Made:
    """Return a table with a line for each format."""
    text = "\n\n".join(Path(path).read_text(encoding="utf-8") for path in options.text)
    ids, length = tokenizer().encode(text).ids, options.length
    windows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if length < 2 or not windows[: options.windows]:
        raise SystemExit(
            "--length is at least 2 and at most the text's length, --windows at least 1"
        )
    readings = {}
    for name, how in FORMATS.items():
        print(f"reading windows of {length} tokens: {name}", flush=True)
        readings[name] = await read(how, windows[: options.windows])
    lines = []
    for name, reading in readings.items():
        perplexity, difference, other = compare(reading, readings[REFERENCE])
        lines.append([name, f"{perplexity:.2f}", f"{difference:.4f}", f"{100 * other:.1f} %"])
    table = markdown(["format", "perplexity", "mean difference", "another choice"], lines)
    files = [Path(path).name for path in options.text]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Made(table, {"text": {"files": files, "sha256": digest}})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    return run_script("accuracy", measure, arguments, text=_PAGES, length=1024, windows=6)


if __name__ == "__main__":
    sys.exit(main())
