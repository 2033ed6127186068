"""Prompts of an exact number of tokens, no two of which begin alike unless they are to."""

from __future__ import annotations

import functools
import random

import tokenizers

from bench.servers import MODEL
from trioserve.model_files import locate, open_model

__all__ = ["exact_prompts", "tokenizer"]

_WORDS = """
the of and to in is that it for was on are as with they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out
them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know river light stone garden window letter
morning village captain mountain engine paper silver music winter summer bridge kitchen
teacher market island forest number
""".split()  # noqa: SIM905


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """The default model's, read once."""
    return open_model(locate(MODEL)).load_tokenizer()


def exact_prompts(
    tokenizer: tokenizers.Tokenizer, count: int, tokens: int, seed: int, *, prefix_tokens: int = 0
) -> list[str]:
    """``count`` texts of random English words that ``tokenizer`` turns into ``tokens`` ids each.

    All begin with the same ``prefix_tokens`` further ids, which are others for another ``seed``.
    """
    # Seeds of one sign only make a difference to this generator.
    chooser = random.Random(f"prompts {seed}")
    prefix = _ids(tokenizer, chooser, prefix_tokens).copy()
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        ids = prefix + _ids(tokenizer, chooser, tokens)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids == ids:
            prompts[text] = None
    return list(prompts)


def _ids(tokenizer: tokenizers.Tokenizer, chooser: random.Random, tokens: int) -> list[int]:
    # A word is at least one token, so this is never too short.
    text = " ".join(chooser.choices(_WORDS, k=tokens + 1)).capitalize()
    return list(tokenizer.encode(text, add_special_tokens=False).ids[:tokens])
