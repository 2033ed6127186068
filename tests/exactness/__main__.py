"""The matrix of exactness on any model: ``python -m tests.exactness``.

Runs configurations that cover every pair of values, and counts the answers that differ from those
of the plainest one with the same weights. Exit code 1: one differs. ``--model`` is a folder, a GGUF
file or a name; another ``--seed`` chooses other configurations.
"""

from __future__ import annotations

import functools

from bench.report import Made, markdown, script
from bench.servers import MODEL
from tests.exactness.dimensions import DIMENSIONS, covering, plainest
from tests.exactness.run import run, slices_of
from trioserve.model_files import locate


@script
def measure(*, model: str = MODEL, seed: int = 0) -> Made:
    """Return how many configurations and answers there were, and how many answers differ."""
    formats = DIMENSIONS["quantization"]
    if locate(model).suffix != ".gguf":
        formats = tuple(each for each in formats if each != "auto")
    parallel = DIMENSIONS["parallel"]
    if slices_of(model) == 1:
        parallel = tuple(each for each in parallel if each != "tensor")
    dimensions = {**DIMENSIONS, "quantization": formats, "parallel": parallel}
    expected = functools.cache(lambda quantization: run(plainest(quantization), model))
    num_answers = num_different = 0
    chosen = covering(dimensions, seed)
    for number, configuration in enumerate(chosen, 1):
        found = run(configuration, model)
        pairs = zip(found, expected(configuration.quantization), strict=True)
        different = sum(one != other for one, other in pairs)
        num_answers, num_different = num_answers + len(found), num_different + different
        mark = "differs" if different else "equal"
        print(f"{number}/{len(chosen)} {mark}: {configuration}", flush=True)
    heads = ["model", "configurations", "answers", "answers that differ"]
    table = markdown(heads, [[model, len(chosen), num_answers, num_different]])
    return Made(table, status=1 if num_different else 0)
