"""The cost of grammars in a step: ``python -m bench.engine.grammar_masks``.

Microseconds a row for masks, in sequences that go on at random over the default model's vocabulary
of 49,152 tokens. In every step the masks of all rows are computed as :mod:`gpu.constraints` does
it, which is timed, and a token is drawn for each, any that is allowed, which isn't. A sequence that
has ended makes room for a new one.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from bench.report import markdown, script
from bench.servers import MODEL
from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.grammars import GrammarVocabulary
from gpu.slots import Slot
from trioserve.model_files import locate, open_model
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,8}-[0-9]+$"}},
        "born": {"type": "string", "format": "date-time"},
    },
    "required": ["name", "age", "tags", "born"],
}
GRAMMARS = {
    "any JSON object": Grammar("json_schema", '{"type": "object"}'),
    "a schema of four fields": Grammar("json_schema", json.dumps(PERSON)),
    "a regular expression": Grammar("regex", "([A-Z][a-z]{1,9} ){2,50}[.!?]"),
    "an enum of 1,000 strings": Grammar("choice", json.dumps([f"choice {i}" for i in range(1000)])),
}


def open_slot(constraints: Constraints, number: int, grammar: Grammar) -> Slot:
    """Return a sequence without output, behind a prompt of one token."""
    sampler, buffer = SamplerParams(grammar=grammar), np.zeros(128, dtype=np.int32)
    lengths = {"prompt_length": 1, "computed": 0, "length": 1}
    slot = Slot(number=number, generation=1, sampler=sampler, buffer=buffer, **lengths)
    constraints.open(slot)
    return slot


def measure(
    constraints: Constraints, grammar: Grammar, eos: Sequence[int], *, rows: int, steps: int
) -> list[float]:
    """Return the microseconds of each step, per row."""
    rng = random.Random(rows)
    slots = [open_slot(constraints, number, grammar) for number in range(rows)]
    logits = torch.zeros(rows, 1)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        bits = constraints.adjustment(logits, slots).bitmask
        times.append(1e6 * (time.perf_counter() - began) / rows)
        assert bits is not None
        for number, words in enumerate(bits):
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
            token = int(rng.choice(allowed))
            if token in eos:
                slots[number] = open_slot(constraints, number, grammar)
            else:
                slots[number].settle(slots[number].extend(), token)
    return times


@script
def compare(
    *, model: str = MODEL, rows: Sequence[int] = (1, 16, 64), threads: int = 2, steps: int = 100
) -> str:
    """Return a table with a line for each grammar and number of rows."""
    files = open_model(locate(model))
    cache = GrammarCache(GrammarVocabulary.of(files))
    constraints = Constraints(files.config.vocab_size, cache, num_threads=threads)
    lines = []
    for (name, grammar), number in itertools.product(GRAMMARS.items(), rows):
        eos = files.config.eos_token_ids
        times = measure(constraints, grammar, eos, rows=number, steps=steps)
        figures = statistics.median(times), statistics.fmean(times), max(times)
        lines.append([name, number, *(f"{figure:.0f}" for figure in figures)])
    cache.close()
    return markdown(["grammar", "rows", "median µs/row", "mean", "worst step"], lines)
