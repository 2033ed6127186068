"""The documentation's times of a shutdown are those of the code."""

from __future__ import annotations

import math
import re
from pathlib import Path

from trioserve import ServerConfig
from trioserve._util.child_process import KILL_GRACE
from trioserve.front_ends.processes.pool import END_GRACE
from trioserve.front_ends.server.session import STOP_GRACE
from trioserve.http.server.server import FINAL_GRACE
from trioserve.observability.tracing import FLUSH_SECONDS
from trioserve.workers.process import QUIT_GRACE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = " ".join((DOCS / "shutdown.md").read_text(encoding="utf-8").split())
FRONT_ENDS = " ".join((DOCS / "front-ends.md").read_text(encoding="utf-8").split())
WORDS = {"half a second": 0.5, "two seconds": 2.0, "five seconds": 5.0, "ten seconds": 10.0}


def told(pattern: str, text: str = PAGE) -> float:
    """Return the number that the page has in that place."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return WORDS.get(found[1]) or float(found[1])


def test_each_part_has_the_time_that_is_told() -> None:
    assert told("The last events have (two seconds) to leave") == FINAL_GRACE
    assert told("The worker ends[*]*, within (half a second) or by force") == QUIT_GRACE
    assert told("spans that wait for a collector .{0,40} have (five seconds)") == FLUSH_SECONDS
    assert told(r"is waited for (\d+) seconds more") == KILL_GRACE
    ended = "One that is stopped and can't drain is ended (ten seconds) after `--shutdown-timeout`"
    assert told(ended, FRONT_ENDS) == END_GRACE


def test_the_whole_is_the_sum() -> None:
    whole = told(r"`--shutdown-timeout` and (\d+) seconds at most")
    assert whole == math.ceil(FINAL_GRACE + QUIT_GRACE + FLUSH_SECONDS)
    # One that drains is done before those are ended that don't.
    assert FINAL_GRACE + FLUSH_SECONDS < END_GRACE
    with_front_ends = told(r"it is (\d+), should one of them hang")
    assert with_front_ends == math.ceil(END_GRACE + STOP_GRACE + QUIT_GRACE)
    drain: float = ServerConfig.__attrs_attrs__.shutdown_timeout.default  # type: ignore[attr-defined]
    for name in ("TimeoutStopSec=", "terminationGracePeriodSeconds: "):
        assert told(rf"{name}(\d+)`") > drain + with_front_ends
