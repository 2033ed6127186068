"""Prompts of an exact number of tokens, no two of which begin alike."""

from __future__ import annotations

import random

import tokenizers

__all__ = ["exact_prompts"]

_WORDS = """
the of and to in is that it for was on are as with they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out
them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know river light stone garden window letter
morning village captain mountain engine paper silver music winter summer bridge kitchen
teacher market island forest number
""".split()  # noqa: SIM905


def exact_prompts(tokenizer: tokenizers.Tokenizer, count: int, tokens: int, seed: int) -> list[str]:
    """``count`` texts of random English words that ``tokenizer`` turns into ``tokens`` ids each."""
    chooser = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        # A word is at least one token, so this is never too short.
        text = " ".join(chooser.choices(_WORDS, k=tokens + 1)).capitalize()
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids == ids:
            prompts[text] = None
    return list(prompts)
