"""The accuracy of number formats: ``python -m bench.engine.accuracy``.

The default model reads some pages of this project's documentation, in windows of equal length, with
its weights and activations in each format. The table shows its perplexity, by how much the
log-probability of the token that follows differs from float32's, and how often the most probable
token is another one than float32's. Only differences between rows mean anything: the text is
technical, and the model small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import Made, markdown, script
from bench.servers import MODEL, tokenizer
from trioserve import open_engine

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES, WINDOW = ("security.md", "overload.md", "shutdown.md"), 1024
REFERENCE = "float32"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "as the file has it": {},
    **{name: {"quantization": name} for name in ("int8", "int4", "w8a8")},
}
"""The engine's options for each format."""


Reading = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""The log-probability of each following token of a text, and the most probable token."""


async def read(options: dict[str, Any], windows: Sequence[list[int]]) -> Reading:
    """Read all tokens of ``windows`` but the first of each with an engine's ``options``."""
    entries = []
    limits = {"max_model_len": max(map(len, windows)) + 1, "enable_prefix_caching": False}
    async with open_engine(MODEL, **limits, **options) as engine:
        for ids in windows:
            completion = await engine.complete(ids, max_tokens=0, prompt_logprobs=1)
            assert completion.prompt_logprobs is not None
            entries += completion.prompt_logprobs.entries(ids)
    choices = [entry.top[0][0] for entry in entries]
    return np.array([entry.logprob for entry in entries]), np.array(choices)


def compare(reading: Reading, reference: Reading) -> tuple[float, float, float]:
    """Return the perplexity, the mean difference, and the share of other choices."""
    (logprobs, choices), (expected, chosen) = reading, reference
    differences = np.abs(logprobs - expected)
    return np.exp(-logprobs.mean()), differences.mean(), (choices != chosen).mean()


@script
async def measure(*, windows: int = 6) -> Made:
    """Return a table with a line for each format."""
    text = "\n\n".join((_DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    ids = tokenizer().encode(text).ids
    starts = range(0, len(ids) - WINDOW + 1, WINDOW)
    parts = [ids[start : start + WINDOW] for start in starts][:windows]
    readings = {}
    for name, how in FORMATS.items():
        print(f"reading windows of {WINDOW} tokens: {name}", flush=True)
        readings[name] = await read(how, parts)
    lines = []
    for name, reading in readings.items():
        perplexity, difference, other = compare(reading, readings[REFERENCE])
        lines.append([name, f"{perplexity:.2f}", f"{difference:.4f}", f"{100 * other:.1f} %"])
    table = markdown(["format", "perplexity", "mean difference", "another choice"], lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Made(table, {"text": {"files": PAGES, "sha256": digest}})
