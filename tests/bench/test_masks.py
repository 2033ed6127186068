"""The measurement of masks measures masks."""

from __future__ import annotations

from bench.grammar_masks import GRAMMARS, measure
from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from tests.support.grammar_vocabularies import EOS, VOCABULARY


def test_every_grammar_is_measured() -> None:
    cache = GrammarCache(VOCABULARY)
    constraints = Constraints(VOCABULARY.vocab_size, cache)
    for grammar in GRAMMARS.values():
        times = measure(constraints, grammar, EOS, rows=2, steps=30)
        assert len(times) == 30
        assert min(times) > 0
    cache.close()
