"""Compiled grammars, each made once for all who ask for it, the most recently used ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import llguidance

from gpu.constraints.grammar_trial import GrammarTrial
from gpu.constraints.grammars import GrammarVocabulary, compile_text, to_llguidance
from gpu.constraints.refusals import GrammarError
from trioserve.grammar import Grammar

__all__ = ["GrammarCache"]

MAX_ENTRIES = 1024
MAX_CHARACTERS = 4 << 20
"""Of the texts. A compiled grammar takes about 1 kB, a schema of 5,000 properties 35 MB."""


class GrammarCache:
    """The grammars of one vocabulary.

    :meth:`prepare` is for any thread, and may take seconds; :meth:`matcher` is for the thread of
    the steps, and takes under a millisecond for what is prepared.

    Args:
        vocabulary: of the model, or why it has no grammars.
        max_entries: how many are kept, errors included.
        max_characters: how many characters their texts may have together.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary | GrammarError,
        *,
        max_entries: int = MAX_ENTRIES,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._max_entries = max_entries
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._entries: OrderedDict[Grammar, Future[llguidance.LLMatcher]] = OrderedDict()
        self._characters = 0
        self._trials: list[GrammarTrial] = []
        self._idle: list[GrammarTrial] = []
        self._unusable = vocabulary if isinstance(vocabulary, GrammarError) else None
        if isinstance(vocabulary, GrammarVocabulary):
            try:
                self._tokenizer = vocabulary.build()
                self._vocabulary = vocabulary
            except GrammarError as error:
                self._unusable = error

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, grammar: Grammar) -> None:
        """Have ``grammar`` tried out in a process of its own and compiled, and wait for it.

        Raises:
            GrammarError: it isn't served.
        """
        self._compiled(grammar, self._try_and_compile)

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher of its own for a sequence that has no output yet.

        Compiles what isn't there any more, after many others or in a new worker: it must have been
        prepared once, here or in another process.

        Raises:
            GrammarError: the grammar isn't served.
        """
        return self._compiled(grammar, self._compile).deep_copy()

    def close(self) -> None:
        """End the processes behind it. What still compiles in one of them fails."""
        with self._lock:
            for trial in self._trials:
                trial.kill()
            for trial in self._idle:
                trial.close()

    def _compiled(
        self, grammar: Grammar, compiled: Callable[[Grammar], llguidance.LLMatcher]
    ) -> llguidance.LLMatcher:
        if self._unusable is not None:
            raise self._unusable
        with self._lock:
            entry = self._entries.get(grammar)
            mine = entry is None
            if entry is None:
                entry = self._entries[grammar] = Future()
                self._characters += len(grammar.text)
                self._drop_oldest()
            else:
                self._entries.move_to_end(grammar)
        if mine:
            try:
                entry.set_result(compiled(grammar))
            except BaseException as error:
                entry.set_exception(error)
                if not isinstance(error, GrammarError):
                    self._forget(grammar)
                    raise
        return entry.result()

    def _try_and_compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        with self._lock:
            if not self._idle:
                self._idle.append(GrammarTrial(self._vocabulary))
                self._trials += self._idle
            trial = self._idle.pop()
        try:
            text = trial.run(grammar)
        finally:
            with self._lock:
                self._idle.append(trial)
        return compile_text(text, self._tokenizer)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        return compile_text(to_llguidance(grammar, self._tokenizer), self._tokenizer)

    def _drop_oldest(self) -> None:
        """Those that are still being compiled may go too: who waits for them has them."""
        while len(self._entries) > max(self._max_entries, 1) or (
            self._characters > self._max_characters and len(self._entries) > 1
        ):
            dropped, _ = self._entries.popitem(last=False)
            self._characters -= len(dropped.text)

    def _forget(self, grammar: Grammar) -> None:
        with self._lock:
            if self._entries.pop(grammar, None) is not None:
                self._characters -= len(grammar.text)
