"""Four beams beside four sampled outputs, a request at a time: ``python -m bench.engine.beams``."""

from __future__ import annotations

import random
import time
from typing import Any

import attrs

from bench.engine import random_ids
from bench.report import Made, Rounds, Verdict, in_turns, markdown, script
from bench.servers import MODEL
from trioserve import open_engine

SIDES: dict[str, dict[str, Any]] = {"sampled": {}, "beams": {"beam_width": 4}}


@script
async def compare(
    *, model: str = MODEL, prompt: int = 128, output: int = 128, rounds: int = 10
) -> Made:
    """Return the times of a step with either, and the verdict."""
    found = Rounds()
    async with open_engine(model, dtype="bfloat16", enable_prefix_caching=False) as engine:
        for number, side in in_turns(rounds, list(SIDES)):
            params = {"n": 4, "ignore_eos": True, "seed": number, **SIDES[side]}
            tokens, began = random_ids(random.Random(number), prompt), time.perf_counter()
            await engine.complete(tokens, max_tokens=output, **params)
            found.add(side, ms=(time.perf_counter() - began) * 1000 / output)
    ratio, times = found.ratio("beams", "sampled", "ms"), found.medians()
    of = {"what": "4 beams, time", "against": "4 sampled outputs", "rounds": rounds}
    verdict = attrs.asdict(Verdict(bound=1.15, reached=ratio, at_most=True, **of))
    heads = ["prompt", "sampled, ms a token", "beams, ms a token", "ratio"]
    line = [prompt, *(f"{times[side]['ms']:.1f}" for side in SIDES), f"{ratio:.2f}"]
    return Made(markdown(heads, [line]), {"verdicts": [verdict]})
