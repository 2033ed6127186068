"""Synthetic work: given lengths, shared prefixes, chats, structured outputs.

All is drawn from a seed, so the same arguments give the same requests.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.load.texts import Texts
from trioserve.load.work import Cancel, Conversation, Turn


@attrs.frozen(kw_only=True)
class Lengths:
    """Numbers of tokens of a prompt and its answer, drawn as in vLLM's ``RandomDataset``.

    The distribution is uniform from ``floor(n * (1 - range_ratio))`` to ``ceil(n * (1 +
    range_ratio))``, at least 1.

    Raises:
        ValueError: A length is below 1, or ``range_ratio`` isn't from 0 to below 1.
    """

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0

    def __attrs_post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1 or not 0 <= self.range_ratio < 1:
            raise ValueError("lengths are at least 1, and a range ratio is from 0 to below 1")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return one pair of lengths: input tokens and output tokens."""
        return self._around(self.input_tokens, rng), self._around(self.output_tokens, rng)

    def _around(self, tokens: int, rng: random.Random) -> int:
        low = max(math.floor(tokens * (1 - self.range_ratio)), 1)
        high = math.ceil(tokens * (1 + self.range_ratio))
        return rng.randint(low, high)


def random_prompts(
    texts: Texts, count: int, lengths: Lengths, *, prefix_tokens: int = 0, seed: int = 0
) -> list[Conversation]:
    """Return ``count`` prompts of random words after a common prefix of ``prefix_tokens``."""
    return shared_prefixes(texts, count, lengths, groups=1, prefix_tokens=prefix_tokens, seed=seed)


def shared_prefixes(
    texts: Texts, count: int, lengths: Lengths, *, groups: int, prefix_tokens: int, seed: int = 0
) -> list[Conversation]:
    """Return ``count`` prompts that begin with one of ``groups`` prefixes, in rotation.

    ``lengths`` are those of the text after the prefix.
    """
    rng = random.Random(seed)
    prefixes = [texts.make(prefix_tokens, rng) if prefix_tokens else "" for _ in range(groups)]
    work = []
    for number in range(count):
        tokens_in, tokens_out = lengths.draw(rng)
        prompt = texts.make(tokens_in, rng, prefixes[number % groups])
        work.append(_single_turn(Turn(prompt=prompt, max_tokens=tokens_out)))
    return work


def fixed_prompt(prompt: str, count: int, output_tokens: int) -> list[Conversation]:
    """Return the same prompt ``count`` times, which a prefix cache makes cheap."""
    return [_single_turn(Turn(prompt=prompt, max_tokens=output_tokens))] * count


def chats(
    texts: Texts,
    count: int,
    lengths: Lengths,
    *,
    turns: int,
    system_tokens: int = 0,
    pause: float = 0.0,
    seed: int = 0,
) -> list[Conversation]:
    """Return ``count`` conversations of ``turns`` turns, each sent with all turns before it.

    ``lengths`` are those of one turn's message and answer, ``system_tokens`` that of a common
    system message. ``pause`` is the mean of the exponentially distributed seconds between turns.
    """
    rng = random.Random(seed)
    system = texts.make(system_tokens, rng) if system_tokens else None
    work = []
    for _ in range(count):
        conversation = []
        for number in range(turns):
            tokens_in, tokens_out = lengths.draw(rng)
            message = {"role": "user", "content": texts.make(tokens_in, rng)}
            first = [{"role": "system", "content": system}] if system and not number else []
            conversation.append(
                Turn(
                    messages=(*first, message),
                    max_tokens=tokens_out,
                    pause=rng.expovariate(1 / pause) if pause and number else 0.0,
                )
            )
        work.append(Conversation(turns=tuple(conversation)))
    return work


_CITIES = ("Paris", "Lagos", "Lima", "Osaka", "Oslo", "Quito", "Cairo", "Perth", "Turin", "Kyiv")
_TASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "Describe the city of {} as JSON with its name, country and population.",
        {"name": "string", "country": "string", "population": "integer"},
    ),
    (
        "Invent the weather in {} as JSON with a temperature, a wind speed and a word for the sky.",
        {"temperature": "number", "wind_speed": "number", "sky": ["clear", "cloudy", "rain"]},
    ),
    (
        "Book a train to {} as JSON with the hour, the class and whether a bicycle comes.",
        {"hour": "integer", "class": ["first", "second"], "bicycle": "boolean"},
    ),
)


def structured(
    count: int, output_tokens: int, *, schema: Mapping[str, Any] | None = None, seed: int = 0
) -> list[Conversation]:
    """Return ``count`` requests for JSON by ``schema``, or by one of three schemas in rotation.

    An answer that isn't cut off is valid if it is JSON.
    """
    rng = random.Random(seed)
    work = []
    for number in range(count):
        question, properties = _TASKS[number % len(_TASKS)]
        wanted = _object_schema(properties) if schema is None else schema
        if schema is not None:
            question = "Write a JSON object about {} that follows the schema."
        named = {"name": f"answer{number % len(_TASKS)}", "schema": wanted, "strict": True}
        turn = Turn(
            prompt=question.format(rng.choice(_CITIES)),
            max_tokens=output_tokens,
            fields={"response_format": {"type": "json_schema", "json_schema": named}},
            form=_is_json,
        )
        work.append(_single_turn(turn))
    return work


def _object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {
        name: {"type": kind} if isinstance(kind, str) else {"enum": kind}
        for name, kind in properties.items()
    }
    return {
        "type": "object",
        "properties": kinds,
        "required": list(kinds),
        "additionalProperties": False,
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def with_cancellations(
    work: Iterable[Conversation],
    *,
    rate: float,
    seconds: tuple[float, float] | None = None,
    events: tuple[int, int] | None = None,
    seed: int = 0,
) -> list[Conversation]:
    """Return ``work`` with some requests that the client cancels.

    Args:
        work: The conversations.
        rate: Probability that a request is cancelled, from 0 to 1.
        seconds: Range of seconds after which the client disconnects, drawn uniformly.
        events: Range of events after which the client disconnects, drawn uniformly.
        seed: Seed of the draws.

    Raises:
        ValueError: Neither ``seconds`` nor ``events`` is given, or both are.
    """
    if (seconds is None) == (events is None):
        raise ValueError("a client leaves after a time or after a number of events")
    rng = random.Random(seed)

    def leave(turn: Turn) -> Turn:
        if rng.random() >= rate:
            return turn
        if seconds is not None:
            return attrs.evolve(turn, cancel=Cancel(seconds=rng.uniform(*seconds)))
        assert events is not None
        return attrs.evolve(turn, cancel=Cancel(events=rng.randint(*events)))

    return [Conversation(turns=tuple(map(leave, one.turns))) for one in work]


def repeated(work: Sequence[Conversation], count: int) -> list[Conversation]:
    """Return ``count`` conversations by repeating ``work``."""
    return list(itertools.islice(itertools.cycle(work), count))


def _single_turn(turn: Turn) -> Conversation:
    return Conversation(turns=(turn,))
