"""Events as a library emits them, and as the command line prints them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from trioserve.logs import get_logger, setup_logging


@pytest.fixture
def logging_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("trioserve")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, ours_level = before
    root.setLevel(level)
    ours.setLevel(ours_level)
    structlog.reset_defaults()


def test_a_library_emits_readable_standard_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trioserve"):
        get_logger("trioserve.test").info("worker 100%", name="a b", pid=3)
    (record,) = caplog.records
    assert record.name == "trioserve.test"
    assert record.getMessage() == "worker 100% name='a b' pid=3"
    assert record.__dict__["fields"] == {"name": "a b", "pid": 3}


@pytest.mark.usefixtures("logging_restored")
def test_json_holds_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json")
    log = get_logger("trioserve.test")
    log.debug("hidden")
    log.info("shown", pid=3)
    structlog.get_logger("trioserve.other").info("through %s itself", "structlog")
    logging.getLogger("somebody").info("hidden")
    logging.getLogger("somebody").warning("%s else", "somebody")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    captured = capsys.readouterr()
    assert captured.out == ""
    events = [json.loads(line) for line in captured.err.splitlines()]
    assert [(event["event"], event["level"], event["logger"]) for event in events] == [
        ("shown", "info", "trioserve.test"),
        ("through structlog itself", "info", "trioserve.other"),
        ("somebody else", "warning", "somebody"),
        ("failed", "error", "trioserve.test"),
    ]
    assert events[0]["pid"] == 3
    assert events[0]["timestamp"].endswith("Z")
    assert "ValueError: why" in events[3]["exception"]


@pytest.mark.usefixtures("logging_restored")
def test_the_format_follows_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_logging("debug", "auto")
    get_logger("trioserve.test").debug("to a file")
    assert json.loads(capsys.readouterr().err)["event"] == "to a file"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    setup_logging("debug", "auto")
    get_logger("trioserve.test").debug("to a person", k=1)
    assert "\x1b[" in capsys.readouterr().err
    setup_logging("debug", "console")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    setup_logging("debug", "console")
    get_logger("trioserve.test").debug("to a person", k=1)
    line = capsys.readouterr().err
    assert line.endswith("[debug    ] to a person [trioserve.test] k=1\n")
    get_logger("trioserve.test").info("request", path="/\x1b[2J")
    assert capsys.readouterr().err.endswith("request [trioserve.test] path=/\\x1b[2J\n")
