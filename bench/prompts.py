"""Prompts of an exact number of tokens, no two of which begin alike unless they are to."""

from __future__ import annotations

import functools
import random

import tokenizers

from bench.servers import MODEL
from trioserve.load.texts import CountedTexts
from trioserve.model_files import locate, open_model

__all__ = ["exact_prompts", "tokenizer"]


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """The default model's, read once."""
    return open_model(locate(MODEL)).load_tokenizer()


def exact_prompts(
    tokenizer: tokenizers.Tokenizer,
    count: int,
    tokens: int,
    seed: int | str,
    *,
    prefix_tokens: int = 0,
) -> list[str]:
    """``count`` texts of random English words that ``tokenizer`` turns into ``tokens`` ids each.

    All begin with the same ``prefix_tokens`` further ids. Another ``seed`` gives others, all of
    them: whoever is asked for several things names each in its seed, since a server keeps what it
    has computed.
    """
    texts = CountedTexts(tokenizer)
    # A number and its negative would be the same seed.
    chooser = random.Random(f"prompts {seed}")
    prefix = texts.make(prefix_tokens, chooser) if prefix_tokens else ""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        text = texts.make(tokens, chooser, prefix)
        if texts.count(text) == prefix_tokens + tokens:
            prompts[text] = None
    return list(prompts)
