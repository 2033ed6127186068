"""A small vocabulary and matchers over it, for tests of grammars."""

from __future__ import annotations

import functools

import llguidance
import numpy as np

from gpu.constraints.grammars import GrammarVocabulary, compile_text, to_llguidance
from tests.support.tiny_models import tiny_tokenizer
from trioserve.protocol.grammar import Grammar

__all__ = ["EOS", "VOCABULARY", "allowed", "allowed_of", "ids_of", "make_matcher", "text_of"]

EOS = (2, 0)
VOCAB_SIZE = 310
"""The tokenizer has 300 tokens: ten more are the model's alone."""
VOCABULARY = GrammarVocabulary(tiny_tokenizer().to_str(), VOCAB_SIZE, EOS)


@functools.cache
def tokenizer() -> llguidance.LLTokenizer:
    return VOCABULARY.build()


def make_matcher(kind: str, text: str) -> llguidance.LLMatcher:
    """Return a new matcher of a grammar that compiles."""
    return compile_text(to_llguidance(Grammar(kind, text), tokenizer()), tokenizer())


def allowed_of(mask: bytes) -> set[int]:
    """Return the token ids of a mask."""
    return set(
        np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist()
    )


def allowed(matcher: llguidance.LLMatcher) -> set[int]:
    """Return the token ids that ``matcher`` allows next."""
    return allowed_of(matcher.compute_bitmask())


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text).ids


def text_of(ids: list[int]) -> str:
    return tiny_tokenizer().decode(ids, skip_special_tokens=True)
