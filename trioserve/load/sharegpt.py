"""Work from a file of conversations in ShareGPT's form.

A JSON list, or a line of JSON for each: objects with ``conversations`` (or ``messages``), a list of
``{"from": "human", "value": ...}`` (or ``role`` and ``content``).
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
    """The file of work can't be used; one line says why."""


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

    Each begins with a user's message. Requested answers are as long as those in the file, or
    ``output_tokens`` long. Conversations are left out as in vLLM's tool: a prompt or an answer of
    fewer than 4 tokens, a prompt of more than 1,024, both together of more than 2,048.

    Args:
        path: the file.
        texts: counts tokens.
        count: the number of conversations.
        turns: the most turns of each.
        output_tokens: the length of every answer; None for the file's.
        seed: the seed of the order.

    Raises:
        DataError: the file can't be read, or has no usable conversation.
    """
    found = list(_read(path))
    chooser = random.Random(seed)
    chooser.shuffle(found)
    work: list[Conversation] = []
    for one in found:
        if len(work) == count:
            return work
        taken = _turns(one.conversations or one.messages, texts, turns, output_tokens)
        if taken:
            work.append(Conversation(turns=tuple(taken)))
    if not work:
        raise DataError(f"{path} has no conversation of a fitting length")
    return work + chooser.choices(work, k=count - len(work))


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
    """Return the first pairs of a user's message and its answer; none if the first doesn't fit."""
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
