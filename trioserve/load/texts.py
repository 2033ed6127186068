"""Random texts with a given number of tokens, made of common words."""

from __future__ import annotations

import random
from typing import Protocol

import attrs
import tokenizers

from trioserve.model_files.native import panics_raised

_WORDS = """
the of and to in is that it for was on are as with they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out
them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know river light stone garden window letter
morning village captain mountain engine paper silver music winter summer bridge kitchen
teacher market island forest number
""".split()  # noqa: SIM905

_MAX_TRIES = 20


class Texts(Protocol):
    """A maker of random texts, and a counter of tokens."""

    @property
    def exact(self) -> bool:
        """True if a tokenizer counts the tokens."""

    def make(self, tokens: int, rng: random.Random, prefix: str = "") -> str:
        """Return ``prefix`` followed by ``tokens`` tokens of random words."""

    def count(self, text: str) -> int:
        """Return the number of tokens in ``text``."""


@attrs.frozen
class CountedTexts:
    """Texts with an exact number of tokens, by the model's tokenizer."""

    tokenizer: tokenizers.Tokenizer

    @property
    def exact(self) -> bool:
        """True: a tokenizer counts the tokens."""
        return True

    def make(self, tokens: int, rng: random.Random, prefix: str = "") -> str:
        """Return ``prefix`` followed by ``tokens`` tokens of random words, as one encoded text."""
        size = self.count(prefix) + tokens
        text = prefix
        for _ in range(_MAX_TRIES):
            # A word has at least one token, so this is never too short.
            words = " ".join(rng.choices(_WORDS, k=tokens + 1))
            ids = self._ids(f"{prefix} {words}" if prefix else words.capitalize())[:size]
            with panics_raised():
                text = self.tokenizer.decode(ids, skip_special_tokens=False)
            if text.startswith(prefix) and self.count(text) == size:
                break
        # A few tokenizers don't round-trip; then the length is nearly right.
        return text

    def count(self, text: str) -> int:
        """Return the number of tokens in ``text``, without special tokens."""
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        with panics_raised():
            return self.tokenizer.encode(text, add_special_tokens=False).ids


@attrs.frozen
class GuessedTexts:
    """Texts of an approximate length, without a tokenizer: a common word is usually one token."""

    @property
    def exact(self) -> bool:
        """False: the counts are guesses."""
        return False

    def make(self, tokens: int, rng: random.Random, prefix: str = "") -> str:
        """Return ``prefix`` followed by ``tokens`` random words."""
        words = " ".join(rng.choices(_WORDS, k=tokens))
        return f"{prefix} {words}" if prefix else words.capitalize()

    def count(self, text: str) -> int:
        """Return a guess: a token per four characters."""
        return -(-len(text) // 4)
