"""The worker process: messages in, messages out, one at a time and in order.

Plans that arrive while one runs wait in the socket, so two plans in flight need nothing here. The
process ends when it is told to quit, or when its standard input ends: whoever started it holds the
other end, and its death closes it. Signals that ask it to end are ignored, because service managers
send them to every process at once, and the engine still needs its worker while it drains.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pynng

from gpu import loading
from gpu.runner import Runner
from gpu.slots import PlanError
from trioserve import wire
from trioserve.errors import ModelLoadError

__all__ = ["Worker", "run"]

SEND_MS = 10_000
PROGRESS_INTERVAL = 0.1
EXIT_PARENT_GONE = 3

_log = logging.getLogger("gpu.worker")


class Quit(Exception):
    """The engine is done with this worker."""


class Worker:
    """The conversation of :mod:`trioserve.wire`, from Hello to Quit, over a connected socket."""

    def __init__(self, socket: pynng.Pair0) -> None:
        self._socket = socket
        self._calls: dict[str, Callable[[Runner, Any], Any]] = {
            "ping": lambda _, arguments: arguments,
            "statistics": lambda runner, _: _statistics(runner),
        }
        self._last_progress = -PROGRESS_INTERVAL

    def run(self) -> None:
        """Talk until told to quit."""
        try:
            self._send(
                wire.Hello(
                    protocol=wire.PROTOCOL_VERSION,
                    schema=wire.schema_hash(),
                    package=str(Path(__file__).resolve().parent),
                    pid=os.getpid(),
                )
            )
            start = self._receive()
            if not isinstance(start, wire.Start):
                raise wire.WireError(f"{type(start).__name__} came where Start was due")
            self._serve(self._load(start))
        except Quit:
            return

    def _load(self, start: wire.Start) -> Runner:
        try:
            runner, ready = loading.load(start, self._report_progress)
        except Exception as error:
            known = isinstance(error, ModelLoadError)
            if not known:
                _log.exception("the model can't be loaded")
            message = str(error) if known else f"loading failed: {_one_line(error)}"
            self._send(wire.Failure(number=0, message=message, fatal=True))
            # A message is lost if its socket closes too soon: stay until the engine has heard.
            while True:
                self._receive()
        self._send(ready)
        return runner

    def _report_progress(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last_progress >= PROGRESS_INTERVAL:
            self._last_progress = now
            self._send(wire.Progress(stage=stage, done=done, total=total))

    def _serve(self, runner: Runner) -> NoReturn:
        while True:
            message = self._receive()
            match message:
                case wire.Plan():
                    self._send(self._step(runner, message))
                case wire.Reset():
                    runner.reset(message.next_plan)
                case wire.Call():
                    self._send(self._answer(runner, message))
                case _:
                    raise wire.WireError(f"{type(message).__name__} came while serving")

    def _step(self, runner: Runner, plan: wire.Plan) -> wire.StepResult | wire.Failure:
        try:
            return runner.step(plan)
        except PlanError as error:
            _log.error("plan %d: %s", plan.number, error)
            return wire.Failure(number=plan.number, message=str(error), slot=error.slot)
        except Exception as error:
            _log.exception("plan %d failed", plan.number)
            return wire.Failure(number=plan.number, message=_one_line(error))

    def _answer(self, runner: Runner, call: wire.Call) -> wire.Reply:
        function = self._calls.get(call.name)
        if function is None:
            return wire.Reply(number=call.number, error=f"this worker knows no call {call.name!r}")
        try:
            arguments = msgspec.msgpack.decode(call.arguments) if call.arguments else None
            result = msgspec.msgpack.encode(function(runner, arguments))
        except Exception as error:
            _log.exception("the call %r failed", call.name)
            return wire.Reply(number=call.number, error=_one_line(error))
        return wire.Reply(number=call.number, result=result)

    def _send(self, message: wire.Message) -> None:
        self._socket.send(wire.encode(message))

    def _receive(self) -> wire.Message:
        """The next message; waits for it. Raises Quit if it is that."""
        message = wire.decode(self._socket.recv())
        if isinstance(message, wire.Quit):
            raise Quit
        return message


def _statistics(runner: Runner) -> dict[str, int]:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "open_slots": len(runner.slots),
        "pages_used": runner.slots.num_pages_used(),
        "steps": runner.num_steps,
        "resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
    }


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _exit_with_parent() -> None:
    """Leave at once when standard input ends, whatever the main thread is doing."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(EXIT_PARENT_GONE)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run(url: str) -> None:
    """Be the worker of the engine that listens at ``url``, until it says Quit."""
    logging.basicConfig(format="worker %(process)d: %(message)s", level=logging.INFO)
    _exit_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with pynng.Pair0(
        dial=url,
        block_on_dial=True,
        send_timeout=SEND_MS,
        recv_max_size=wire.MAX_MESSAGE_BYTES,
        recv_buffer_size=wire.BUFFERED_MESSAGES,
        send_buffer_size=wire.BUFFERED_MESSAGES,
    ) as socket:
        Worker(socket).run()
