"""Embeddings among the parts of a conversation, and their marks in its text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddingsPrompt

PART_TYPE = "prompt_embeds"
_SECRET = secrets.token_hex(8)
"""Part of every mark, so that no text of a client has one."""
_MARK = re.compile(f"<embeds-{_SECRET}-([0-9]+)>")


def without_embeddings(
    messages: Sequence[Any],
) -> tuple[tuple[Any, ...], tuple[EmbeddingsPrompt, ...]]:
    """Return ``messages`` with marks as text in place of embeddings, and the embeddings."""
    found: list[EmbeddingsPrompt] = []

    def marked(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != PART_TYPE:
            return part
        given = part.get(PART_TYPE)
        found.append(given if isinstance(given, EmbeddingsPrompt) else EmbeddingsPrompt(given))
        return {"type": "text", "text": f"<embeds-{_SECRET}-{len(found) - 1}>"}

    def without(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        return {**message, "content": [marked(part) for part in content]}

    return tuple(map(without, messages)), tuple(found)


def ids_with_marks(
    text: str, given: Sequence[EmbeddingsPrompt], encode: Callable[[str], list[int]]
) -> list[int]:
    """Return the ids of a conversation's text, with the marks of ``given`` in their places.

    Raises:
        InvalidRequest: The chat template didn't print each of them once.
    """
    texts = _MARK.split(text)
    numbers = list(map(int, texts[1::2]))
    if sorted(numbers) != list(range(len(given))):
        raise InvalidRequest(
            f"the chat template printed {len(numbers)} of {len(given)} prompt_embeds parts",
            param="messages",
        )
    ids = encode(texts[0]) if texts[0] else []
    for number, following in zip(numbers, texts[2::2], strict=True):
        ids += given[number].marks(number)
        ids += encode(following) if following else []
    return ids
