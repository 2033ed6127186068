"""The grammars of a model, with a vocabulary that is built at the first request for one.

That takes half a second for 49,000 tokens, and 40 MiB, which a server without structured output
saves. For 0.2 s of that time no step can run.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpu.constraints.refusals import GrammarError
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.grammar import Grammar

if TYPE_CHECKING:
    import llguidance

    from gpu.constraints.grammar_cache import GrammarCache


class Grammars(Protocol):
    """The part of :class:`gpu.constraints.grammar_cache.GrammarCache` that constraints use."""

    def prepare(self, grammar: Grammar, *, tried: bool = False) -> int:
        """Compile ``grammar`` and return its bytes. Call it in any thread; it may take seconds.

        With ``tried``, a worker of this model has compiled it within the limits.

        Raises:
            GrammarError: it can't be compiled within the limits.
        """
        ...

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Return a new matcher, for a sequence without output.

        Raises:
            GrammarError: the grammar can't be compiled.
        """
        ...

    def close(self) -> None:
        """Kill the child processes that compile grammars."""


class LazyGrammars:
    """The :class:`Grammars` of the model at ``model``, or of another ``tokenizer`` for it."""

    def __init__(self, model: Path, tokenizer: str = "") -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._cache: GrammarCache | None = None

    def load(self) -> None:
        """Build the vocabulary now, in any thread."""
        self._loaded()

    def prepare(self, grammar: Grammar, *, tried: bool = False) -> int:
        """See :meth:`Grammars.prepare`."""
        return self._loaded().prepare(grammar, tried=tried)

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """See :meth:`Grammars.matcher`."""
        return self._loaded().matcher(grammar)

    def close(self) -> None:
        """See :meth:`Grammars.close`."""
        if self._cache is not None:
            self._cache.close()

    def _loaded(self) -> GrammarCache:
        from gpu.constraints.grammar_cache import GrammarCache
        from gpu.constraints.grammars import GrammarVocabulary

        with self._lock:
            if self._cache is None:
                vocabulary: GrammarVocabulary | GrammarError
                try:
                    vocabulary = GrammarVocabulary.of(open_model(self._model), self._tokenizer)
                except GrammarError as error:
                    vocabulary = error
                except ModelLoadError as error:
                    vocabulary = GrammarError(f"the model's tokenizer can't be read again: {error}")
                self._cache = GrammarCache(vocabulary)
            return self._cache
