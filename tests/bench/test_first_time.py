"""The first-time reader's path, on a server that is installed already."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from bench.first_time import ask, open_console, started, stories, table
from tests.support.doc_blocks import ROOT

COMMAND = f"{sys.executable} -m trioserve serve --mock-worker 1ms --port 0"


def test_a_server_is_started_asked_and_stopped() -> None:
    server = started(f"echo begun; {COMMAND}", ROOT, os.environ)
    assert server.silence > 0
    assert ask(server.url)
    assert open_console(server.url) > 2
    server.stop()
    assert server.process.returncode in (0, 130)


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        started(f"{COMMAND} --nonsense", ROOT, os.environ)


def test_the_program_is_the_tutorials() -> None:
    assert "open_engine" in stories()


def test_the_table_and_what_the_page_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = table({"one": 1.25, "two": 60.0})
    assert text.endswith("| one | 1.25 |\n| two | 60.00 |\n| **all of it** | **61** |")
    monkeypatch.syspath_prepend(str(Path(ROOT, "docs", "_ext")))
    record = {
        "machine": {"cores": 2, "processor": "EPYC"},
        "versions": {"python": "3.11.7", "commit": "abc"},
        "table": text,
    }
    lines = list(importlib.import_module("first_time").table_lines(record))
    assert lines[0] == text
    assert "2 cores of an EPYC with Python 3.11.7, at commit abc; packages were do" in lines[-1]
