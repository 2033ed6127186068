"""The flag ``--mock-worker``: a worker that computes nothing, to measure everything else.

Its value is the duration of a step: ``10ms``; or ``50000/s``, a number of tokens per second, with
those of prompts; or both. With ``10ms,50000/s`` a step takes 10 ms, and 20 µs more per token. ``0``
is as fast as possible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trioserve.cli.usage import UsageError
from trioserve.config.options import Option, OptionGroup

if TYPE_CHECKING:
    from trioserve.protocol.wire import MockSteps

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"
_TIME = re.compile(_NUMBER + r"(us|ms|s)|0")
_RATE = re.compile(_NUMBER + r"/s")
_LONGEST = 3600.0
"""Longest step in seconds. In a longer one the worker would count as hung."""


MOCK_OPTION = Option(
    name="mock_worker",
    kind=str,
    default=None,
    help="load no model and compute nothing, to measure everything else: a step takes TIME (10ms), "
    "or its tokens a set rate (50000/s), or both (10ms,50000/s), or nothing (0), and gives the "
    "next token of a fixed text",
    group="measuring",
    metavar="TIME",
)
MOCK_GROUPS = {
    "measuring": OptionGroup("Measuring", "benchmarking#Is it the server that is measured?")
}


def mock_steps(arguments: Mapping[str, Any]) -> MockSteps | None:
    """Return the step times of the flag; None without it.

    Raises:
        UsageError: The value isn't a time, a rate or both.
    """
    text = arguments.get("mock_worker")
    if text is None:
        return None
    time, rate = 0.0, 0.0
    kinds: list[str] = []
    for part in str(text).split(","):
        if found := _TIME.fullmatch(part):
            kinds.append("time")
            time = float(found[1]) * _UNITS[found[2]] if found[1] else 0.0
        elif (found := _RATE.fullmatch(part)) and float(found[1]) > 0:
            kinds.append("rate")
            rate = 1 / float(found[1])
        else:
            kinds.append("neither")
    if sorted(kinds) not in (["time"], ["rate"], ["rate", "time"]) or max(time, rate) > _LONGEST:
        raise UsageError(
            f"--mock-worker must be a step's time, a rate or both, such as 10ms, 50000/s or "
            f"10ms,50000/s, not {str(text)!r}"
        )
    from trioserve.protocol.wire import MockSteps  # which loads NumPy: --help answers without

    return MockSteps(step_seconds=time, token_seconds=rate)
