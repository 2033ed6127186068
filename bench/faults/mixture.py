"""Requests of all kinds: lengths, several outputs, stops, grammars, log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_WORDS = """
the of and to in is that it for was on are as with they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them
river light stone garden window letter morning village captain mountain engine paper silver music
""".split()  # noqa: SIM905

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def texts(random_numbers: random.Random, fewest: int, most: int) -> Iterator[str]:
    """Texts of ``fewest`` to ``most`` words, without end."""
    while True:
        words = random_numbers.choices(_WORDS, k=random_numbers.randint(fewest, most))
        yield " ".join(words).capitalize()


def _plain(numbers: random.Random) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True}


def _sampled(numbers: random.Random) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "seed": numbers.getrandbits(32)}


def _several(numbers: random.Random) -> dict[str, Any]:
    return {"n": numbers.randint(2, 4), "temperature": 0.8, "ignore_eos": True}


def _stops(numbers: random.Random) -> dict[str, Any]:
    return {"stop": [".", "\n\n", " the"], "temperature": 0.7, "frequency_penalty": 0.5}


def _logprobs(numbers: random.Random) -> dict[str, Any]:
    return {"logprobs": numbers.randint(0, 5), "temperature": 0}


def _schema(numbers: random.Random) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    return {"response_format": form, "temperature": 0.8}


def _regex(numbers: random.Random) -> dict[str, Any]:
    return {"structured_outputs": {"regex": f"[a-z]{{{numbers.randint(2, 30)}}}"}}


_KINDS: Sequence[tuple[int, Callable[[random.Random], dict[str, Any]]]] = (
    (4, _plain),
    (4, _sampled),
    (2, _several),
    (2, _stops),
    (2, _logprobs),
    (1, _schema),
    (1, _regex),
)


def mixture(
    numbers: random.Random, *, longest_prompt: int, longest_output: int
) -> Iterator[dict[str, Any]]:
    """Bodies for ``/v1/completions`` without end; lengths in words and in tokens.

    A fifth of the prompts begin alike, so that the prefix cache has something to share.
    """
    weights, kinds = zip(*_KINDS, strict=True)
    prompts = texts(numbers, 1, longest_prompt)
    beginning = next(texts(numbers, longest_prompt // 2, longest_prompt // 2))
    while True:
        (kind,) = numbers.choices(kinds, weights)
        prompt = next(prompts)
        if numbers.random() < 0.2:
            prompt = f"{beginning} {prompt}"[: 4 * longest_prompt]
        yield {
            "prompt": prompt,
            "max_tokens": numbers.randint(1, longest_output),
            **kind(numbers),
        }
