"""Requests whose answers are compared, and requests that keep them company."""

from __future__ import annotations

import json
import random
from typing import Any

NUM_OTHERS = 31
_LENGTH = 60
"""Tokens of a probe's output."""
_FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5, "logprobs": 1},
    {"temperature": 0.6, "min_p": 0.05, "n": 2, "seed": 6, "logprobs": 0},
    {"temperature": 0.7, "seed": 7, "guided_regex": "(ab|cd|e[0-9]){30,60}", "logprobs": 2},
    {"use_beam_search": True, "beam_width": 3, "n": 2, "repetition_penalty": 1.2, "logprobs": 1},
    {"use_beam_search": True, "n": 2, "guided_regex": "(ab|cd|e[0-9]){30,60}", "logprobs": 0},
)


def probes(vocab_size: int) -> list[dict[str, Any]]:
    """Return the probes, as bodies of ``/v1/completions``. Their prompts repeat themselves."""
    draw = random.Random(vocab_size)
    bodies: list[dict[str, Any]] = []
    for number, fields in enumerate(_FIELDS):
        piece = [draw.randrange(20, vocab_size) for _ in range(19 + number)]
        common = {"prompt": piece * 3, "max_tokens": _LENGTH, "ignore_eos": True}
        bodies.append({**common, "return_token_ids": True, **fields})
    return bodies


def others(vocab_size: int, seed: int) -> list[dict[str, Any]]:
    """Return requests that are computed beside probes, of many lengths."""
    draw = random.Random(seed)
    return [
        {
            "prompt": [draw.randrange(20, vocab_size) for _ in range(draw.randrange(4, 120))],
            "max_tokens": draw.randrange(20, 120),
            "ignore_eos": True,
            "temperature": draw.choice((0, 0.9)),
        }
        for _ in range(NUM_OTHERS)
    ]


def facts_of(answer: dict[str, Any]) -> str:
    """Return what must be equal: tokens, and log-probabilities to the last bit.

    A float32 in JSON has all of its digits.
    """
    choices = [
        [
            choice[name]
            for name in ("token_ids", "logprobs", "finish_reason", "cumulative_logprob")
            if name in choice
        ]
        for choice in answer["choices"]
    ]
    return json.dumps(choices, sort_keys=True)
