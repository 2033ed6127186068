"""Work from a file of conversations in ShareGPT's format.

The file is a JSON list, or has an object per line. An object has ``conversations`` (or
``messages``), a list of ``{"from": "human", "value": ...}`` (or ``role`` and ``content``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from trioserve.load.texts import Texts
from trioserve.load.work import Conversation, Turn
from trioserve.protocol.errors import TrioserveError

_USERS = ("human", "user")
_MODELS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")

# The limit of vLLM's tool.
_FEWEST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048


class DataError(TrioserveError):
    """The file can't be used; the message is one line."""


class _Message(msgspec.Struct):
    speaker: str = msgspec.field(name="from", default="")
    value: str = ""
    role: str = ""
    content: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Message] = []
    messages: list[_Message] = []


def load_sharegpt(
    path: Path,
    texts: Texts,
    count: int,
    *,
    turns: int = 1,
    output_tokens: int | None = None,
    seed: int = 0,
) -> list[Conversation]:
    """Return ``count`` random conversations of the file; some repeat if the file has fewer.

    Each begins with a user's message. Answers have the length of those in the file, or
    ``output_tokens``. As in vLLM's benchmark, a conversation is left out if its prompt or answer
    has fewer than 4 tokens, its prompt more than 1,024, or both together more than 2,048.

    Args:
        path: The file.
        texts: Counts tokens.
        count: Number of conversations.
        turns: Most turns of each.
        output_tokens: Tokens of every answer; None for those of the file.
        seed: Seed of the order.

    Raises:
        DataError: The file can't be read, or has no usable conversation.
    """
    found = list(_read(path))
    rng = random.Random(seed)
    rng.shuffle(found)
    work: list[Conversation] = []
    for one in found:
        if len(work) == count:
            return work
        taken = _turns(one.conversations or one.messages, texts, turns, output_tokens)
        if taken:
            work.append(Conversation(turns=tuple(taken)))
    if not work:
        raise DataError(f"{path} has no conversation of a fitting length")
    return work + rng.choices(work, k=count - len(work))


def _read(path: Path) -> Iterator[_Conversation]:
    try:
        data = path.read_bytes()
        if data.lstrip()[:1] == b"[":
            yield from msgspec.json.decode(data, type=list[_Conversation])
        else:
            for line in data.splitlines():
                if line.strip():
                    yield msgspec.json.decode(line, type=_Conversation)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} isn't in ShareGPT's form: {error}") from error


def _turns(
    messages: Sequence[_Message], texts: Texts, most: int, output_tokens: int | None
) -> list[Turn]:
    """Return the first turns, each a user's message and its answer, up to one that doesn't fit."""
    taken: list[Turn] = []
    for asked, answered in zip(messages[::2], messages[1::2], strict=False):
        speakers = (asked.speaker or asked.role, answered.speaker or answered.role)
        if len(taken) == most or speakers[0] not in _USERS or speakers[1] not in _MODELS:
            break
        prompt = asked.value or asked.content
        tokens_in = texts.count(prompt)
        tokens_out = output_tokens or texts.count(answered.value or answered.content)
        if not _fits(tokens_in, tokens_out, fixed=output_tokens is not None):
            break
        taken.append(Turn(prompt=prompt, max_tokens=tokens_out))
    return taken


def _fits(tokens_in: int, tokens_out: int, *, fixed: bool) -> bool:
    long_enough = tokens_in >= _FEWEST_TOKENS and (fixed or tokens_out >= _FEWEST_TOKENS)
    return (
        long_enough and tokens_in <= _MOST_PROMPT_TOKENS and tokens_in + tokens_out <= _MOST_TOKENS
    )
