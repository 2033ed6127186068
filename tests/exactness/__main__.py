"""The matrix of exactness on any model: ``python -m tests.exactness [MODEL]``.

Runs configurations that cover every pair of values, and counts the outputs that differ from those
of the plainest one with the same weights. Exit code 1: one differs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from itertools import islice

from tests.exactness.dimensions import DIMENSIONS, covering, plainest
from tests.exactness.run import run
from trioserve.model_files import locate


def main() -> int:
    """Run the matrix, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description=__doc__)
    model = "a folder, a GGUF file or a name (default: %(default)s)"
    parser.add_argument("model", nargs="?", default="smollm2-135m", help=model)
    parser.add_argument("--seed", type=int, default=0, help="chooses other configurations")
    parser.add_argument("--first", type=int, default=1, help="goes on from this configuration")
    options = parser.parse_args()
    formats = DIMENSIONS["quantization"]
    if locate(options.model).suffix == ".gguf":
        formats += ("auto",)  # the file's own
    expected = functools.cache(lambda quantization: run(plainest(quantization), options.model))
    num_outputs = num_different = 0
    chosen = covering({**DIMENSIONS, "quantization": formats}, options.seed)
    for number, configuration in islice(enumerate(chosen, 1), options.first - 1, None):
        found = run(configuration, options.model)
        pairs = zip(found, expected(configuration.quantization), strict=True)
        different = sum(one != other for one, other in pairs)
        num_outputs, num_different = num_outputs + len(found), num_different + different
        mark = "differs" if different else "equal"
        print(f"{number}/{len(chosen)} {mark}: {configuration}", flush=True)
    print(f"{num_different} of {num_outputs} answers differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
