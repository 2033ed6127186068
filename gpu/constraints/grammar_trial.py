"""Compiles grammars in a child process with limits, before the worker compiles them.

Llguidance's limits don't bound everything: proving that 30 patterns of an ``allOf`` have no text in
common takes all memory, and a thread can't be stopped. A child process therefore compiles each
grammar first, with limits on CPU time and memory. If it dies of them, the grammar is refused. A
grammar that passes takes the worker as much again.

:func:`main` runs in the child. It reads a :class:`~gpu.constraints.grammars.GrammarVocabulary` with
the limits, then grammars, and writes a :class:`TrialVerdict` for each. It exits when its standard
input ends.
"""

from __future__ import annotations

import ctypes
import math
import resource
import subprocess
import sys
from pathlib import Path

import attrs
import msgspec

from gpu._util.pipes import read_message, write_message
from gpu.constraints.grammars import GrammarVocabulary, compile_text, to_llguidance
from gpu.constraints.refusals import GrammarError
from trioserve.protocol.grammar import Grammar

MAX_SECONDS = 5
MAX_MEMORY = 1 << 30

_LEAST_BYTES = 1 << 15
_BYTES_PER_CHARACTER = 300
"""Bytes of a compiled schema with many properties, for each character of its text."""

_ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen
class TrialVerdict:
    """A grammar in llguidance's format and its bytes when compiled, or why it is refused."""

    text: str = ""
    num_bytes: int = 0
    error: str = ""


class GrammarTrial:
    """The child process, started when it is needed. Use it in one thread at a time.

    Args:
        vocabulary: the model's.
        max_seconds: most seconds of CPU time for a grammar.
        max_memory: most bytes for a grammar.
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
        """Compile ``grammar`` in the child; return a verdict without an error.

        Raises:
            GrammarError: it can't be compiled within the limits.
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
        """Kill the child, if there is one, even while another thread waits for it."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Kill the child, if there is one, and close its pipes."""
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
            write_message(process.stdin, (self._vocabulary, self._max_seconds, self._max_memory))
        assert process.stdin is not None
        assert process.stdout is not None
        write_message(process.stdin, grammar)
        return msgspec.convert(read_message(process.stdout), TrialVerdict)


# The child imports the package from the same folder as this process.
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from gpu.constraints.grammar_trial import main; main()"
)


def main() -> None:
    """Run the child: answer the messages on standard input until it ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary, max_seconds, max_memory = read_message(source)
    try:
        tokenizer = msgspec.convert(vocabulary, GrammarVocabulary).build()
    except GrammarError as error:
        write_message(target, TrialVerdict(error=str(error)))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + max_memory)
    while True:
        try:
            grammar = msgspec.convert(read_message(source), Grammar)
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + max_seconds))
        before = allocated()
        try:
            text = to_llguidance(grammar, tokenizer)
            compiled = compile_text(text, tokenizer)
        except GrammarError as error:
            write_message(target, TrialVerdict(error=str(error)))
        else:
            num_bytes = max(allocated() - before, 0) or estimated_bytes(grammar)
            del compiled
            write_message(target, TrialVerdict(text, num_bytes))


class _Mallinfo(ctypes.Structure):
    """The fields of glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


# Looked up once, at import. Only glibc has it.
_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


def allocated() -> int:
    """Return the bytes that this process has allocated, including llguidance's; 0 without glibc."""
    if _mallinfo is None:
        return 0
    found = _mallinfo()
    return int(found.uordblks + found.hblkhd)


def estimated_bytes(grammar: Grammar) -> int:
    """Return an estimate of a compiled grammar's bytes, for where they can't be measured."""
    return _LEAST_BYTES + _BYTES_PER_CHARACTER * len(grammar.text)


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
