"""An LRU cache of compiled grammars; each is compiled once, by one thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import attrs
import llguidance

from gpu.constraints.grammar_trial import GrammarTrial, estimated_bytes
from gpu.constraints.grammars import GrammarVocabulary, compile_text, to_llguidance
from gpu.constraints.refusals import GrammarError
from trioserve.protocol.grammar import Grammar

MAX_ENTRIES = 1024
MAX_BYTES = 256 << 20
"""Most bytes of compiled grammars. A usual one takes 40 kB to 1 MB, 5,000 properties 35 MB."""


@attrs.define(eq=False)
class _Entry:
    """A grammar that is compiled, or being compiled by a thread."""

    num_bytes: int
    """Bytes of the compiled grammar; an estimate until it is compiled."""
    outcome: Future[llguidance.LLMatcher] = attrs.field(factory=Future)


class GrammarCache:
    """The compiled grammars of one vocabulary.

    Call :meth:`prepare` in any thread; it may take seconds. Call :meth:`matcher` in the thread that
    runs steps; it takes under a millisecond for a prepared grammar.

    Args:
        vocabulary: the model's, or the error that every grammar gets.
        max_entries: most grammars kept, including errors.
        max_bytes: most bytes of all grammars.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary | GrammarError,
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._trials: list[GrammarTrial] = []
        self._idle: list[GrammarTrial] = []
        self._unusable = vocabulary if isinstance(vocabulary, GrammarError) else None
        if isinstance(vocabulary, GrammarVocabulary):
            try:
                self._tokenizer = vocabulary.build()
                self._vocabulary = vocabulary
            except GrammarError as error:
                self._unusable = error

    @property
    def num_bytes(self) -> int:
        """Bytes of all compiled grammars."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, grammar: Grammar, *, tried: bool = False) -> int:
        """Compile ``grammar``, first in a child process with limits; return its bytes.

        With ``tried``, a worker has done so before, and the child isn't needed.

        Raises:
            GrammarError: it can't be compiled within the limits.
        """
        compiled = self._compile if tried else self._try_and_compile
        return self._compiled(grammar, compiled).num_bytes

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Return a new matcher, for a sequence without output.

        A grammar that has been evicted, or was prepared in another worker, is compiled again,
        without limits.

        Raises:
            GrammarError: the grammar can't be compiled.
        """
        return self._compiled(grammar, self._compile).outcome.result().deep_copy()

    def close(self) -> None:
        """Kill the child processes; grammars still being compiled fail."""
        with self._lock:
            for trial in self._trials:
                trial.kill()
            for trial in self._idle:
                trial.close()

    def _compiled(
        self,
        grammar: Grammar,
        compiled: Callable[[Grammar], tuple[llguidance.LLMatcher, int]],
    ) -> _Entry:
        """Return the entry of ``grammar``; compile it, or wait for the thread that does."""
        if self._unusable is not None:
            raise self._unusable
        with self._lock:
            entry = self._entries.get(grammar)
            mine = entry is None
            if entry is None:
                entry = self._entries[grammar] = _Entry(len(grammar.text))
                self._num_bytes += entry.num_bytes
                self._drop_oldest()
            else:
                self._entries.move_to_end(grammar)
        if mine:
            try:
                matcher, num_bytes = compiled(grammar)
            except BaseException as error:
                entry.outcome.set_exception(error)
                if not isinstance(error, GrammarError):
                    self._forget(grammar)
                    raise
            else:
                self._set_bytes(grammar, entry, num_bytes)
                entry.outcome.set_result(matcher)
        entry.outcome.result()
        return entry

    def _try_and_compile(self, grammar: Grammar) -> tuple[llguidance.LLMatcher, int]:
        with self._lock:
            if not self._idle:
                self._idle.append(GrammarTrial(self._vocabulary))
                self._trials += self._idle
            trial = self._idle.pop()
        try:
            verdict = trial.run(grammar)
        finally:
            with self._lock:
                self._idle.append(trial)
        return compile_text(verdict.text, self._tokenizer), verdict.num_bytes

    def _compile(self, grammar: Grammar) -> tuple[llguidance.LLMatcher, int]:
        text = to_llguidance(grammar, self._tokenizer)
        return compile_text(text, self._tokenizer), estimated_bytes(grammar)

    def _set_bytes(self, grammar: Grammar, entry: _Entry, num_bytes: int) -> None:
        """Replace the estimated bytes of ``entry`` by the measured ones."""
        with self._lock:
            if self._entries.get(grammar) is entry:
                self._num_bytes += num_bytes - entry.num_bytes
                entry.num_bytes = num_bytes
                self._drop_oldest()
            entry.num_bytes = num_bytes

    def _drop_oldest(self) -> None:
        """Evict entries beyond the limits. Threads that wait for an evicted one still get it."""
        while len(self._entries) > max(self._max_entries, 1) or (
            self._num_bytes > self._max_bytes and len(self._entries) > 1
        ):
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def _forget(self, grammar: Grammar) -> None:
        with self._lock:
            dropped = self._entries.pop(grammar, None)
            if dropped is not None:
                self._num_bytes -= dropped.num_bytes
