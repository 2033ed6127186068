"""What a grammar costs a step: microseconds a row for masks, in sequences that go on at random.

``python -m bench.grammar_masks`` takes the vocabulary of the default model (49,152 tokens). In
every step the masks of all rows are computed as :mod:`gpu.constraints` does it, which is timed, and
a token is drawn for each, any that is allowed, which isn't. A sequence that has ended makes room
for a new one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.grammars import GrammarVocabulary
from gpu.slots import Slot
from trioserve.model_files import locate, open_model
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams

__all__ = ["GRAMMARS", "main", "measure"]

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
PROMPT_LENGTH = 1


def open_slot(constraints: Constraints, number: int, grammar: Grammar) -> Slot:
    """A sequence without output."""
    slot = Slot(
        number=number,
        generation=1,
        prompt_length=PROMPT_LENGTH,
        computed=0,
        sampler=SamplerParams(grammar=grammar),
        buffer=np.zeros(128, dtype=np.int32),
        length=PROMPT_LENGTH,
    )
    constraints.open(slot)
    return slot


def measure(
    constraints: Constraints, grammar: Grammar, eos: Sequence[int], *, rows: int, steps: int
) -> list[float]:
    """What each step takes, in microseconds per row."""
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


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose vocabulary to take")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    files = open_model(locate(options.model))
    eos = files.config.eos_token_ids
    cache = GrammarCache(GrammarVocabulary.of(files))
    constraints = Constraints(files.config.vocab_size, cache, num_threads=options.threads)
    print("| grammar | rows | median µs/row | mean | worst step |\n|---|---|---|---|---|")
    for name, grammar in GRAMMARS.items():
        for rows in options.rows:
            times = measure(constraints, grammar, eos, rows=rows, steps=options.steps)
            middle, mean = statistics.median(times), statistics.fmean(times)
            print(f"| {name} | {rows} | {middle:.0f} | {mean:.0f} | {max(times):.0f} |", flush=True)
    cache.close()


if __name__ == "__main__":
    main()
