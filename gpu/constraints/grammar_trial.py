"""Grammars are tried out in a process of their own before the worker compiles them.

What llguidance's limits don't bound would take the whole worker with it: checking that 30 patterns
of an ``allOf`` have no text in common takes all the memory there is, and no thread can be stopped.
So a child process compiles first, with as much processor time and memory as a grammar may take; if
it dies of that, the grammar is refused. What passes costs the worker as much again, and no more.

:func:`main` is the child. Both ways go MessagePack messages behind their length, four bytes: to it
first a :class:`~gpu.constraints.grammars.GrammarVocabulary` with the limits, then grammars; from it
a :class:`TrialVerdict` for each. It ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import attrs
import msgspec

from gpu.constraints.grammars import GrammarVocabulary, compile_text, to_llguidance
from gpu.constraints.refusals import GrammarError
from trioserve.protocol.grammar import Grammar

MAX_SECONDS = 5
MAX_MEMORY = 1 << 30

_LEAST_BYTES = 1 << 15
_BYTES_PER_CHARACTER = 300
"""The bytes of a compiled schema with many properties, for each character of its text."""

_ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen
class TrialVerdict:
    """A grammar in llguidance's form and the bytes that it takes compiled, or why it is refused."""

    text: str = ""
    num_bytes: int = 0
    error: str = ""


class GrammarTrial:
    """The child process, which is started when it is needed. For one thread at a time.

    Args:
        vocabulary: of the model.
        max_seconds: processor time that one grammar may take, a whole number.
        max_memory: bytes that one grammar may take.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        max_seconds: int = MAX_SECONDS,
        max_memory: int = MAX_MEMORY,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._max_memory = max_memory
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, grammar: Grammar) -> TrialVerdict:
        """Try out ``grammar``; returns a verdict without an error.

        Raises:
            GrammarError: it can't be compiled, or not within the limits.
        """
        try:
            verdict = self._ask(grammar)
        except (EOFError, BrokenPipeError) as error:
            self.close()
            raise GrammarError(
                f"it takes more than {self._max_seconds} s or {self._max_memory >> 20} MiB to "
                "compile"
            ) from error
        if verdict.error:
            raise GrammarError(verdict.error)
        return verdict

    def kill(self) -> None:
        """End the child, if there is one, whatever another thread waits for."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, grammar: Grammar) -> TrialVerdict:
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(root=str(_ROOT))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert process.stdin is not None
            _write(process.stdin, (self._vocabulary, self._max_seconds, self._max_memory))
        assert process.stdin is not None
        assert process.stdout is not None
        _write(process.stdin, grammar)
        return msgspec.convert(_read(process.stdout), TrialVerdict)


# The package is found where this process has found it, whatever the environment says.
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from gpu.constraints.grammar_trial import main; main()"
)


def main() -> None:
    """Be the child: answer what comes on standard input."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary, max_seconds, max_memory = _read(source)
    try:
        tokenizer = msgspec.convert(vocabulary, GrammarVocabulary).build()
    except GrammarError as error:
        _write(target, TrialVerdict(error=str(error)))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + max_memory)
    while True:
        try:
            grammar = msgspec.convert(_read(source), Grammar)
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + max_seconds))
        before = allocated()
        try:
            text = to_llguidance(grammar, tokenizer)
            compiled = compile_text(text, tokenizer)
        except GrammarError as error:
            _write(target, TrialVerdict(error=str(error)))
        else:
            num_bytes = max(allocated() - before, 0) or estimated_bytes(grammar)
            del compiled
            _write(target, TrialVerdict(text, num_bytes))


class _Mallinfo(ctypes.Structure):
    """The fields of glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


# Looked up once: no request opens a library. It isn't there without glibc.
_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


def allocated() -> int:
    """Return the bytes that this process has allocated, llguidance's included; 0 without glibc."""
    if _mallinfo is None:
        return 0
    found = _mallinfo()
    return int(found.uordblks + found.hblkhd)


def estimated_bytes(grammar: Grammar) -> int:
    """Return about how many bytes a grammar takes compiled, where that can't be measured."""
    return _LEAST_BYTES + _BYTES_PER_CHARACTER * len(grammar.text)


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _write(target: IO[bytes], message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    target.write(len(body).to_bytes(4, "little") + body)
    target.flush()


def _read(source: IO[bytes]) -> Any:
    """Return the next message; raises EOFError if there is none, or not all of it."""
    head = source.read(4)
    size = int.from_bytes(head, "little")
    body = source.read(size)
    if len(head) < 4 or len(body) < size:
        raise EOFError
    return msgspec.msgpack.decode(body)
