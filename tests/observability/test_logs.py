"""Events as a library emits them, and as the command line prints them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from gpu._util.logs import ConsoleFormatter as WorkerFormatter
from trioserve.cli.terminal import Terminal
from trioserve.observability.logs import ASKED_FOR, get_logger, setup_logging
from trioserve.protocol.log_output import WORKER_LOG, escaped

ROOT = Path(__file__).parents[2]


@pytest.fixture
def logging_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKER_LOG, "")
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


HOSTILE = [
    ("\x1b[2J", "\\x1b[2J"),
    ("\x9b2J", "\\x9b2J"),
    ("a\u202egnp.exe", "a\\u202egnp.exe"),
    ("\u2066\u2069\u200b\ufeff", "\\u2066\\u2069\\u200b\\ufeff"),
    ("a\u2028b\u2029c", "a\\u2028b\\u2029c"),
    ("\U000e0041", "\\U000e0041"),
    ("\ud800", "\\ud800"),
]


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_no_text_does_anything_to_a_terminal(
    text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("debug", "console")
    log = get_logger("trioserve.test")
    log.info("request", path=text)
    logging.getLogger("other").warning("it said %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("failed", tasks=text)
    get_logger(ASKED_FOR).info("task dump", tasks=text)
    written = capsys.readouterr().err
    assert written.count(shown) == 5
    assert written.replace("\n", "").isprintable()


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_no_text_does_anything_to_a_terminal_in_a_worker(
    text: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(WORKER_LOG, raising=False)
    record = logging.LogRecord("gpu", logging.ERROR, "", 0, "it says %s", (text,), None)
    try:
        raise ValueError(text)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    written = WorkerFormatter("worker %(process)d: %(message)s").format(record)
    assert written.count(shown) == 2
    assert written.replace("\n", "").isprintable()


def test_what_is_kept_of_a_text() -> None:
    assert escaped("héllo 世界 🙂") == "héllo 世界 🙂"
    assert escaped("a\nb\tc\rd", keep="\n\t") == "a\nb\tc\\rd"


@pytest.mark.usefixtures("logging_restored")
def test_a_dump_is_readable_at_a_terminal_and_at_any_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("error", "console")
    get_logger(ASKED_FOR).info("task dump", tasks="2 trio tasks:\n  <init>: 'waiting'\n")
    line, *rest = capsys.readouterr().err.splitlines()
    assert line.endswith("[info     ] task dump [trioserve.dump]")
    assert rest == ["2 trio tasks:", "  <init>: 'waiting'", ""]
    get_logger("trioserve.test").error("request", tasks="a\nb")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.usefixtures("logging_restored")
def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the text that doesn't fit into the pipe; the next line that fits says how much."""
    reading, writing = os.pipe()
    with open(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        setup_logging("info", "json")
        log = get_logger("trioserve.test")
        for number in range(100):
            log.info("many", number=number, text="x" * 2000)
        taken = os.read(reading, 1 << 20)
        log.info("again")
        log.info("and again")
        after = os.read(reading, 1 << 20)
        monkeypatch.undo()
    os.close(reading)
    # The last line that was taken may lack its end.
    numbers = [json.loads(line)["number"] for line in taken.splitlines()[:-1]]
    assert 20 <= len(numbers) < 40
    assert numbers == list(range(len(numbers)))
    rest, lost, again, more = after.splitlines()
    assert rest == b""
    assert json.loads(lost)["event"] == "log lines dropped"
    assert json.loads(lost)["number"] == 100 - len(numbers)
    assert [json.loads(line)["event"] for line in (again, more)] == ["again", "and again"]


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize("broken", ["full disk", "reader that left", "closed", "none"])
def test_a_log_that_cant_be_written_fails_nobody(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open("/dev/full" if broken == "full disk" else writing, "w")  # noqa: SIM115
    if broken == "closed":
        stream.close()
    setup_logging("info", "json")
    monkeypatch.setattr(sys, "stderr", None if broken == "none" else stream)
    log = get_logger("trioserve.test")
    log.info("to nobody")
    log.exception("nor this", exc_info=ValueError("why"))
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        stream.close()


WORKER = """
import logging, warnings
from gpu._util.logs import set_up_logging
set_up_logging()
log = logging.getLogger("gpu.test")
log.info("step %d", 1)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
warnings.warn("beware")
raise ValueError("why")
"""


def run_worker_log(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(WORKER_LOG, None)
    if setting is not None:
        environment[WORKER_LOG] = setting
    done = subprocess.run(
        [sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


@pytest.mark.usefixtures("logging_restored")
def test_a_worker_logs_as_its_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging("info", "json")
    events = [json.loads(line) for line in run_worker_log(monkeypatch, os.environ[WORKER_LOG])]
    shown = [(event["level"], event["logger"], event["event"]) for event in events]
    assert shown[:2] == [("info", "gpu.test", "step 1"), ("error", "gpu.test", "failed")]
    assert shown[2][:2] == ("warning", "py.warnings")
    assert "beware" in shown[2][2]
    assert shown[3] == ("critical", "gpu.worker", "crashed")
    assert "ZeroDivisionError" in events[1]["exception"]
    assert "ValueError: why" in events[3]["exception"]
    assert len({event["pid"] for event in events}) == 1
    assert all(event["timestamp"].endswith("Z") for event in events)

    setup_logging("error", "console")
    first, *_, last = run_worker_log(monkeypatch, os.environ[WORKER_LOG])
    assert first.startswith("worker ")
    assert first.endswith(": failed")
    assert last == "ValueError: why"


def test_the_worker_of_a_library_logs_text(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = run_worker_log(monkeypatch, None)
    assert first.endswith(": step 1")


def test_a_model_cannot_turn_the_order_of_a_terminals_text_around() -> None:
    class Screen(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    screen, notes = Screen(), io.StringIO()
    terminal = Terminal(io.StringIO(), screen, notes)
    terminal.write("a\u202eb\u2066c\u2028d\x1b[2Je\n\tשלם 👩\u200d🚀")
    terminal.note("a\u202eb\x1b")
    assert screen.getvalue() == "abcd[2Je\n\tשלם 👩\u200d🚀"
    assert notes.getvalue() == "a\\u202eb\\x1b\n"
