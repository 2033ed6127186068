"""A cache of compiled grammars: each is compiled once, the most recently used ones are kept."""

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
"""Bytes of compiled grammars. A usual one takes 40 kB to 1 MB, 5,000 properties take 35 MB."""


@attrs.define(eq=False)
class _Entry:
    """A grammar that is compiled, or is being compiled by a thread."""

    num_bytes: int
    """Bytes that the grammar takes, or is expected to take."""
    outcome: Future[llguidance.LLMatcher] = attrs.field(factory=Future)


class GrammarCache:
    """The grammars of one vocabulary.

    :meth:`prepare` is for any thread, and may take seconds; :meth:`matcher` is for the thread of
    the steps, and takes under a millisecond for what is prepared.

    Args:
        vocabulary: of the model, or why it has no grammars.
        max_entries: how many are kept, errors included.
        max_bytes: how many bytes they may take together.
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
        """Return the bytes that the compiled grammars take together."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, grammar: Grammar) -> int:
        """Have ``grammar`` tried out in a process of its own and compiled, and wait for it.

        Returns:
            The bytes that it takes.

        Raises:
            GrammarError: it isn't served.
        """
        entry = self._compiled(grammar, self._try_and_compile)
        return entry.num_bytes

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Return a matcher of its own for a sequence that has no output yet.

        Compiles what isn't there any more, after many others or in a new worker: it must have been
        prepared once, here or in another process.

        Raises:
            GrammarError: the grammar isn't served.
        """
        return self._compiled(grammar, self._compile).outcome.result().deep_copy()

    def close(self) -> None:
        """End the processes behind it. What still compiles in one of them fails."""
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
        """Return the entry of ``grammar`` once its outcome is there."""
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
                self._weigh(grammar, entry, num_bytes)
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

    def _weigh(self, grammar: Grammar, entry: _Entry, num_bytes: int) -> None:
        """Count the bytes that ``entry`` takes, now that they are known."""
        with self._lock:
            if self._entries.get(grammar) is entry:
                self._num_bytes += num_bytes - entry.num_bytes
                entry.num_bytes = num_bytes
                self._drop_oldest()
            entry.num_bytes = num_bytes

    def _drop_oldest(self) -> None:
        """Drop what is too much. A thread that waits for a dropped entry has it all the same."""
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
