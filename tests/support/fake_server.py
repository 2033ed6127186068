"""``python -m tests.fake_server serve fake ...``: the real command over an engine without a model.

A token after an ``!`` holds the event loop up for ``STALL`` seconds, as a bug might.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from trioserve.cli.commands import run
from trioserve.engine.engine import Engine
from trioserve.front_ends import serving
from trioserve.observability.logs import get_logger
from trioserve.protocol.sampling import SamplerParams
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine

STALL = 2.0
STEP_TIME = 0.01

_MARK, _LETTER = (byte_tokenizer().token_to_id(character) for character in "!a")
_log = get_logger("trioserve.fake")


def token(context: list[int], _: SamplerParams) -> int:
    if context[-1] == _MARK:
        _log.error("holding the loop up")
        time.sleep(STALL)
    return _LETTER


def open_engine(*_: Any, **__: Any) -> contextlib.AbstractAsyncContextManager[Engine]:
    return open_fake_engine(lambda: FakeWorker(token=token, step_time=STEP_TIME))


if __name__ == "__main__":
    serving.open_engine = open_engine  # type: ignore[assignment]
    run()
