"""A child that ends or stays stopped is noticed; one that goes on isn't."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.process_faults import hung
from trioserve.protocol.child_state import wait_ended_or_stopped

WAITING = """
import subprocess, sys
from trioserve.protocol.child_state import wait_ended_or_stopped
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
print(wait_ended_or_stopped(child.pid), flush=True)
"""


@contextlib.contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_child_that_is_stopped_or_ends(number: signal.Signals) -> None:
    with running("input()") as child:
        child.send_signal(number)
        assert wait_ended_or_stopped(child.pid) == (number is signal.SIGSTOP)
    assert not wait_ended_or_stopped(child.pid)  # it has been reaped


def test_a_child_that_goes_on_soon() -> None:
    with running("print(flush=True); input()") as child, ThreadPoolExecutor(1) as pool:
        assert child.stdout is not None
        child.stdout.readline()
        found = pool.submit(wait_ended_or_stopped, child.pid)
        for _ in range(3):
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            child.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        assert not found.done()
        child.kill()
        assert found.result() is False


@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_child_that_is_stopped_and_continued_with_its_parent(first: str) -> None:
    with running(WAITING) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        both = [parent.pid, child] if first == "parent" else [child, parent.pid]
        for pid in reversed(both):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
        with hung(child):
            time.sleep(0.5)  # a debugger's stop isn't seen
        os.kill(child, signal.SIGKILL)
        assert parent.stdout.readline() == "False\n"
