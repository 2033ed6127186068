"""The tower of a model on a CPU: a child process of the worker with a low priority.

A thread of the worker would take the steps' time whatever its priority: it may be put off while it
holds the interpreter's lock, and threads of a step that wait for each other by ``sched_yield`` give
their cores to it. So the process also has a session of its own. A tower that dies of its input
costs that call alone.

:func:`run` runs in the child. It reads a :class:`TowerOrder`, and writes the reason for which the
tower can't be loaded, empty if it can. Then it reads the arguments of calls and writes a
:class:`TowerAnswer` to each, until its standard input ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import attrs
import msgspec

from gpu._util.errors import summarize
from gpu._util.logs import set_up_logging
from gpu._util.pipes import read_message, write_message
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.priority import lower_priority

NICENESS = 19
"""Niceness of the process: a tower takes the time that steps leave, and little more."""
MAX_TRIES = 2
"""Times that a call is made whose process ends, which the system may have killed for memory."""


@attrs.frozen(kw_only=True)
class TowerOrder:
    """The order that the child gets."""

    model: str
    """Folder of the model."""
    dtype: str
    """Number format of the decoder, in which embeddings are sent."""
    num_threads: int


@attrs.frozen
class TowerAnswer:
    """The result of a call, or the error in one line, with its traceback if the tower raised it."""

    result: Any = None
    error: str = ""
    traceback: str = ""


class TowerFailed(Exception):
    """The tower can't compute the embeddings."""


class TowerProcess:
    """The child process, which has loaded the tower. Use it in one thread at a time.

    Raises:
        ModelLoadError: The tower can't be loaded; one line says why.
    """

    def __init__(self, order: TowerOrder) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = self._start()

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Return the result of :class:`gpu.models.media.encoding.EncodeMedia`.

        Raises:
            TowerFailed: It raised an error, or the process ended twice.
            ModelLoadError: The process ended, and can't be started again; or the arrays aren't
                there any more.
        """
        for _ in range(MAX_TRIES):
            try:
                answer = self._ask(arguments)
            except (EOFError, BrokenPipeError):
                self.close()
                continue
            if answer.error and not answer.traceback:
                raise ModelLoadError(answer.error)
            if answer.error:
                failure = TowerFailed(answer.error)
                failure.add_note(answer.traceback)
                raise failure
            return answer.result
        raise TowerFailed(f"the tower's process ended {MAX_TRIES} times while it computed this")

    def close(self) -> None:
        """Kill the child, and close its pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, arguments: dict[str, Any]) -> TowerAnswer:
        if self._process is None:
            self._process = self._start()
        source, target = self._process.stdout, self._process.stdin
        assert source is not None
        assert target is not None
        write_message(target, arguments)
        return msgspec.convert(read_message(source), TowerAnswer)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu", "--tower"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, self._order)
            error = str(read_message(process.stdout))
        except (EOFError, BrokenPipeError):
            error = f"the tower's process ended with status {process.wait()} while it loaded"
        if error:
            process.kill()
            process.communicate()
            raise ModelLoadError(error)
        return process


def run() -> None:
    """Run the child: load the tower, and answer calls until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source, target = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # No library may write between the messages.
    set_up_logging()
    order = msgspec.convert(read_message(source), TowerOrder)
    try:
        encode = _load(order)
    except ModelLoadError as error:
        write_message(target, str(error))
        return
    lower_priority(NICENESS)
    write_message(target, "")
    while True:
        try:
            arguments = read_message(source)
        except EOFError:
            return
        try:
            answer = TowerAnswer(encode(arguments))
        except ModelLoadError as error:
            answer = TowerAnswer(error=str(error))
        except Exception as error:  # Towers check their inputs in many ways.
            answer = TowerAnswer(error=summarize(error), traceback=traceback.format_exc())
        write_message(target, answer)


def _load(order: TowerOrder) -> Any:
    import torch

    from gpu.models.media.encoding import EncodeMedia, Tower

    torch.set_num_threads(order.num_threads)
    files = open_model(Path(order.model))
    tower: Tower
    # A CPU computes float32 as fast as other formats, and more precisely.
    if files.speech is not None:
        from gpu.models.transformers_models.speech.encoder import SpeechEncoder

        tower = SpeechEncoder.load(files)
    else:
        from gpu.models.media.tower import MediaTower

        tower = MediaTower.load(files, torch.float32, torch.device("cpu"))
    return EncodeMedia(tower, getattr(torch, order.dtype))
