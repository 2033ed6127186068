"""What a number format costs in accuracy: ``python -m bench.accuracy``.

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
import trio

from bench.report import markdown, own_versions, save
from bench.servers import MODEL
from trioserve import open_engine

__all__ = ["FORMATS", "Accuracy", "Reading", "compare", "main", "read"]

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = ("docs/security.md", "docs/overload.md", "docs/shutdown.md")
REFERENCE = "float32"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "as the file has it": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
}
"""The options of each."""


@attrs.frozen
class Reading:
    """What a model made of a text, token after token."""

    logprobs: list[float]
    """Of the tokens that follow."""
    most_probable: list[int]


@attrs.frozen(kw_only=True)
class Accuracy:
    """One format. Log-probabilities are natural."""

    format: str
    perplexity: float
    mean_difference: float
    """Of the log-probabilities of the tokens that follow, from the reference's, without sign."""
    other_choice: float
    """Share of the positions at which another token is the most probable."""


async def read(options: dict[str, Any], windows: Sequence[Sequence[int]]) -> Reading:
    """All tokens of ``windows`` but the first of each, as a model with ``options`` sees them."""
    reading = Reading([], [])
    length = max(map(len, windows)) + 1
    async with open_engine(
        MODEL, max_model_len=length, enable_prefix_caching=False, **options
    ) as engine:
        for window in windows:
            ids = list(window)
            completion = await engine.complete(ids, max_tokens=0, prompt_logprobs=1)
            assert completion.prompt_logprobs is not None
            for entry in completion.prompt_logprobs.entries(ids):
                reading.logprobs.append(entry.logprob)
                reading.most_probable.append(entry.top[0][0])
    return reading


def compare(name: str, reading: Reading, reference: Reading) -> Accuracy:
    """How far ``reading`` is from ``reference``."""
    pairs = list(zip(reading.logprobs, reference.logprobs, strict=True))
    choices = zip(reading.most_probable, reference.most_probable, strict=True)
    return Accuracy(
        format=name,
        perplexity=math.exp(-statistics.fmean(reading.logprobs)),
        mean_difference=statistics.fmean(abs(ours - theirs) for ours, theirs in pairs),
        other_choice=sum(ours != theirs for ours, theirs in choices) / len(pairs),
    )


def _table(found: Sequence[Accuracy]) -> str:
    heads = ["format", "perplexity", "mean difference", "another choice"]
    lines = [
        [
            each.format,
            f"{each.perplexity:.2f}",
            f"{each.mean_difference:.4f}",
            f"{100 * each.other_choice:.1f} %",
        ]
        for each in found
    ]
    return markdown(heads, lines)


async def _windows(text: str, length: int, most: int) -> list[list[int]]:
    async with open_engine(MODEL) as engine:
        ids = engine.tokenizer.encode(text)
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)][:most]


async def _measure(text: str, length: int, most: int) -> list[Accuracy]:
    windows = await _windows(text, length, most)
    if not windows:
        raise SystemExit(f"the text has fewer than {length} tokens: lower --length")
    readings = {}
    for name, options in FORMATS.items():
        print(f"reading {len(windows)} x {length} tokens: {name}", flush=True)
        readings[name] = await read(options, windows)
    return [compare(name, reading, readings[REFERENCE]) for name, reading in readings.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, save the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="another text than pages of the documentation")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=6, help="most windows")
    parser.add_argument("--out", type=Path, default=_ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    if options.length < 2 or options.windows < 1:
        parser.error("--length is at least 2, and --windows at least 1")
    paths = [options.text] if options.text else [_ROOT / page for page in _PAGES]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    found = trio.run(_measure, text, options.length, options.windows)
    print("\n" + _table(found) + "\n")
    facts = {
        "options": {"length": options.length, "windows": options.windows},
        "text": {
            "files": [path.name for path in paths],
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
        "versions": own_versions(),
        "table": _table(found),
    }
    print(f"saved to {save(options.out, 'accuracy', found, facts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
