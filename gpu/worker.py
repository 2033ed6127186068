"""The worker process: receives messages from the engine and answers them in order.

A plan that arrives while another one is computed is queued on the device behind it. The process
exits on a Quit message, or when its standard input ends, since the parent's death closes that pipe.
It ignores SIGINT and SIGTERM: service managers send them to all processes at once, and the engine
needs its worker while it drains.

Threads answer the calls ``prepare``, ``read_weights``, ``load_adapter``, ``encode_media``,
``align_speech`` and those that transfer pages, in any order. All other calls are answered in order.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pynng

from gpu._util.background import Background
from gpu._util.errors import summarize
from gpu._util.logs import set_up_logging
from gpu._util.parent import exit_with_stdin
from gpu.constraints.adjuster import Constraints
from gpu.loading import loading
from gpu.loading.loaded_model import Serving
from gpu.loading.page_transfers import PageTransfers
from gpu.loading.weight_swap import ModelWeights
from gpu.lora.store import AdapterStore
from gpu.runner import Runner
from gpu.slots import PlanError
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.gc_tuning import freeze_objects

SEND_MS = 10_000
PROGRESS_INTERVAL = 0.1
EXIT_PARENT_GONE = 3
PREPARING_THREADS = 3
"""As many calls as the engine has open at a time; more would take CPU time from the steps."""
MAX_PREPARING = 64
"""Most calls open at a time. An abandoned call keeps its thread while the engine sends the next."""

_log = logging.getLogger("gpu.worker")


class QuitRequested(Exception):
    """A Quit message has arrived."""


class Worker:
    """The worker's side of :mod:`trioserve.protocol.wire`, from Hello to Quit, on one socket."""

    def __init__(self, socket: pynng.Pair0) -> None:
        self._socket = socket
        self._calls: dict[str, Callable[[Runner, Any], Any]] = {
            "ping": lambda _, arguments: arguments,
            "statistics": lambda runner, _: runner.statistics(),
            "swap_weights": self._swap_weights,
            "discard_weights": lambda *_: self._all_weights.discard(),
            "list_pages": lambda *_: self._page_transfers.list(),
            "delete_pages": lambda *_: self._page_transfers.delete_all(),
        }
        self._last_progress = -PROGRESS_INTERVAL
        # One thread more, so that an adapter doesn't wait for grammars.
        self._background = Background(PREPARING_THREADS + 1, "background")
        self._transferring = Background(2, "transfers")
        self._beside = Background(1, "beside")
        self._calls_beside: Mapping[str, Callable[[Any], Any]] = {}
        self._constraints: Constraints | None = None
        self._weights: ModelWeights[Any] | None = None
        self._adapters: AdapterStore[Any] | None = None
        self._transfers: PageTransfers | None = None
        self._ahead: deque[wire.Message] = deque()
        """Messages received and not handled yet, in order."""

    @property
    def busy(self) -> bool:
        """True while a background call is unfinished."""
        return any(each.num_unfinished for each in self._backgrounds)

    @property
    def _backgrounds(self) -> tuple[Background, ...]:
        return self._background, self._transferring, self._beside

    def run(self) -> None:
        """Send Hello, load the model and serve it until a Quit message arrives."""
        try:
            self._send(
                wire.WorkerHello(
                    protocol=wire.PROTOCOL_VERSION,
                    schema=wire.schema_hash(),
                    package=str(Path(__file__).resolve().parent),
                    pid=os.getpid(),
                )
            )
            start = self._receive()
            if not isinstance(start, wire.Start):
                raise wire.WireError(f"{type(start).__name__} came where Start was due")
            serving = self._load(start)
            self._weights = serving.weights
            self._adapters = serving.adapters
            self._transfers = serving.transfers
            self._calls_beside = serving.calls_beside
            self.serve(serving.runner, serving.constraints, serving.calls)
        except QuitRequested:
            return
        finally:
            for each in self._backgrounds:
                each.close()
            if self._constraints is not None:
                self._constraints.shut_down()

    def _load(self, start: wire.Start) -> Serving:
        try:
            serving = loading.load(start, self._report_progress)
        except Exception as error:
            known = isinstance(error, ModelLoadError)
            if not known:
                _log.exception("the model can't be loaded")
            message = str(error) if known else f"loading failed: {summarize(error)}"
            self._send(wire.Failure(number=0, message=message, fatal=True))
            # Closing the socket could lose the message: stay until the engine sends Quit.
            while True:
                self._receive()
        freeze_objects()
        self._send(serving.ready)
        return serving

    def _report_progress(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last_progress >= PROGRESS_INTERVAL:
            self._last_progress = now
            self._send(wire.LoadingProgress(stage=stage, done=done, total=total))

    def serve(
        self,
        runner: Runner,
        constraints: Constraints | None = None,
        calls: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> NoReturn:
        """Handle messages and finished steps until a Quit message arrives.

        Messages come first: a plan submitted before the previous one ends leaves no gap between
        them on the device. If another step is behind the one that has ended, there is no gap
        anyway, and the result comes first: to submit a plan may take as long as to compute a stage
        of it. ``constraints`` is None for a model that doesn't sample; ``calls`` are
        the calls that only this model answers, by name.
        """
        self._constraints = constraints
        for name, function in (calls or {}).items():
            self._calls[name] = functools.partial(_with_arguments, function)
        idle, waiting = select.poll(), select.poll()
        for poll in (idle, waiting):
            poll.register(self._socket.recv_fd, select.POLLIN)
        if runner.completions is not None:
            waiting.register(runner.completions, select.POLLIN)
        while True:
            if runner.num_pending and (runner.completions is None or not runner.accepts):
                self._finish(runner)
                continue
            # The executor's descriptor matters only while a step is pending.
            poll = waiting if runner.num_pending else idle
            ready = {descriptor for descriptor, _ in poll.poll(0 if self._ahead else None)}
            has_result = runner.completions in ready
            if has_result and runner.num_pending > 1:
                self._finish(runner)
            elif self._ahead:
                self._handle(runner, self._ahead.popleft())
            elif self._socket.recv_fd in ready:
                with contextlib.suppress(pynng.TryAgain):  # readable before the message is there
                    self._handle(runner, self._receive(block=False))
            elif has_result:
                self._finish(runner)

    def _handle(self, runner: Runner, message: wire.Message) -> None:
        match message:
            case wire.Plan():
                self._look_ahead(runner, message.number)
                self._submit(runner, message)
            case wire.Drop():
                runner.drop(message.slot, message.generation, message.plan)
            case wire.Reset():
                if self._transfers is not None:
                    self._transfers.wait()  # their pages are used for other content now
                runner.reset(message.next_plan)
                # A failed step's exception may hold tensors in a reference cycle of frames.
                gc.collect()
            case wire.Call(name="prepare") if self._constraints is not None:
                self._prepare(message, self._constraints)
            case wire.Call(name="read_weights"):
                self._read_weights(message)
            case wire.Call(name="load_adapter") if self._adapters is not None:
                # The engine loads one adapter at a time.
                self._answer_beside(self._background, message, self._adapters.load)
            case wire.Call() if self._transfers and message.name in self._transfers.calls:
                self._transfer(message, self._transfers)
            case wire.Call() if message.name in self._calls_beside:
                self._answer_beside(self._beside, message, self._calls_beside[message.name])
            case wire.Call(name="unload_adapter") if self._adapters is not None:
                self._send(_reply(message, self._adapters.unload))
            case wire.Call():
                self._call(runner, message)
            case _:
                raise wire.WireError(f"{type(message).__name__} came while serving")

    @property
    def _all_weights(self) -> ModelWeights[Any]:
        if self._weights is None:
            raise ModelLoadError("this worker has no weights")
        return self._weights

    @property
    def _page_transfers(self) -> PageTransfers:
        if self._transfers is None:
            raise ModelLoadError("this worker transfers no pages")
        return self._transfers

    def _read_weights(self, call: wire.Call) -> None:
        read = self._all_weights.reading(msgspec.msgpack.decode(call.arguments))
        self._answer_beside(self._background, call, lambda _: read())

    def _answer_beside(
        self, threads: Background, call: wire.Call, function: Callable[[Any], Any]
    ) -> None:
        """Answer a call in a thread, as soon as it can be, also in the middle of a step."""

        def answer() -> None:
            with contextlib.suppress(pynng.Closed):  # The loop has ended.
                self._send(_reply(call, function))

        threads.start(answer)

    def _transfer(self, call: wire.Call, transfers: PageTransfers) -> None:
        """Run a transfer of pages in a thread."""
        transfers.begin(call.name, msgspec.msgpack.decode(call.arguments))
        self._answer_beside(self._transferring, call, transfers.calls[call.name])

    def _swap_weights(self, runner: Runner, path: str) -> None:
        if len(runner.slots):
            raise ModelLoadError("weights can't be exchanged under a sequence that is open")
        if self._transfers is not None:
            self._transfers.wait()  # their pages are those of the old weights
        checksum = self._all_weights.swap(path)
        if self._transfers is not None:
            self._transfers.use(checksum)
        freeze_objects()  # collects the old weights, a large part of the memory

    def _look_ahead(self, runner: Runner, plan: int) -> None:
        """Handle what came behind ``plan``, the next one, and need not wait for it."""
        with contextlib.suppress(pynng.TryAgain):
            while True:
                self._ahead.append(self._receive(block=False))
        uncomputed = runner.next_result if runner.num_pending else plan
        behind, self._ahead = self._ahead, deque()
        for message in behind:
            if isinstance(message, wire.Drop) or _plan_of_export(message) < uncomputed:
                self._handle(runner, message)
            else:
                self._ahead.append(message)

    def _prepare(self, call: wire.Call, constraints: Constraints) -> None:
        if self._background.num_unfinished >= MAX_PREPARING:
            error = f"{MAX_PREPARING} others wait for the worker already"
            self._send(wire.Reply(number=call.number, error=error))
            return
        self._answer_beside(self._background, call, constraints.answer)

    def _submit(self, runner: Runner, plan: wire.Plan) -> None:
        try:
            runner.submit(plan)
        except Exception as error:
            while runner.num_pending:  # answers are in the order of the plans
                self._finish(runner)
            self._send(_failure(plan.number, error))

    def _finish(self, runner: Runner) -> None:
        """Block until the oldest plan is finished; send its result."""
        number = runner.next_result
        try:
            result = runner.finish()
        except Exception as error:
            self._send(_failure(number, error))
        else:
            self._send(result)

    def _call(self, runner: Runner, call: wire.Call) -> None:
        function = self._calls.get(call.name)
        if function is None:
            error = f"this worker knows no call {call.name!r}"
            self._send(wire.Reply(number=call.number, error=error))
            return
        failures: list[Exception] = []
        reply = _reply(call, functools.partial(function, runner), failures.append)
        if any(map(_is_fatal, failures)):
            self._send(wire.Failure(number=0, message=reply.error, fatal=True))
        else:
            self._send(reply)

    def _send(self, message: wire.Message) -> None:
        self._socket.send(wire.encode(message))

    def _receive(self, block: bool = True) -> wire.Message:
        """Return the next message.

        Raises:
            QuitRequested: the message is Quit.
            pynng.TryAgain: ``block`` is false and there is no message.
        """
        message = wire.decode(self._socket.recv(block=block))
        if isinstance(message, wire.Quit):
            raise QuitRequested
        return message


def _with_arguments(function: Callable[[Any], Any], _: Runner, arguments: Any) -> Any:
    """Call ``function`` with the arguments alone."""
    return function(arguments)


def _reply(
    call: wire.Call,
    function: Callable[[Any], Any],
    on_failure: Callable[[Exception], None] = lambda _: None,
) -> wire.Reply:
    """Run ``function`` with the call's arguments; return its result or its error as a reply."""
    try:
        arguments = msgspec.msgpack.decode(call.arguments) if call.arguments else None
        result = msgspec.msgpack.encode(function(arguments))
    except ModelLoadError as error:  # the caller gets its text
        return wire.Reply(number=call.number, error=str(error))
    except Exception as error:
        _log.exception("the call %r failed", call.name)
        on_failure(error)
        return wire.Reply(number=call.number, error=summarize(error))
    return wire.Reply(number=call.number, result=result)


def _plan_of_export(message: wire.Message) -> float:
    """Return the last plan that a call for an export of pages names; infinity if it isn't one."""
    if isinstance(message, wire.Call) and message.name == "export_pages":
        return float(msgspec.msgpack.decode(message.arguments)["plan"])
    return math.inf


def _failure(plan: int, error: Exception) -> wire.Failure:
    """Log the failure of a plan and return the message for the engine."""
    if isinstance(error, PlanError):
        _log.error("plan %d: %s", plan, error)
        return wire.Failure(number=plan, message=str(error), slot=error.slot)
    _log.error("plan %d failed", plan, exc_info=error)
    fatal = _is_fatal(error)
    return wire.Failure(number=plan, message=summarize(error), fatal=fatal)


def _is_fatal(error: Exception) -> bool:
    """Return whether the error has made the CUDA context unusable."""
    if "torch" not in sys.modules:  # no GPU is used without torch
        return False
    from gpu.cuda.device import is_poisoned_by

    return is_poisoned_by(error)


def run(url: str) -> None:
    """Run as the worker of the engine that listens at ``url``, until it sends Quit."""
    set_up_logging()
    # Dump the stacks of all threads on SIGUSR1 and before a crash by a signal.
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    exit_with_stdin(EXIT_PARENT_GONE)
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
        worker = Worker(socket)
        worker.run()
    if worker.busy:
        # A thread that compiles a grammar can't be stopped, so exit without joining it.
        logging.shutdown()
        os._exit(0)
