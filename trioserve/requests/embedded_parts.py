"""Embeddings and media among the parts of a conversation, and their marks in its text."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddedMedia, EmbeddingsPrompt

PART_TYPE = "prompt_embeds"
MEDIA_TYPES = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
"""Kinds of media by the types of content parts."""
PLURALS = {"image": "images", "audio": "audio clips", "video": "videos"}
"""Words for several media, by their kind."""
_SECRET = secrets.token_hex(8)
"""Part of every mark, so that no text of a client has one."""
_MARK = re.compile(f"<embeds-{_SECRET}-([0-9]+)>")


@attrs.frozen
class OtherParts:
    """The parts of a conversation that aren't text, each kind in the order of the messages."""

    embedded: tuple[EmbeddingsPrompt, ...] = ()
    media: tuple[tuple[str, Any], ...] = ()
    """Name in the request of each, and the part itself."""

    def __bool__(self) -> bool:
        return bool(self.embedded or self.media)


def take_out_parts(messages: Sequence[Any]) -> tuple[tuple[Any, ...], OtherParts]:
    """Return ``messages`` for a template, and the parts that it doesn't get.

    A mark as text is in place of embeddings. Media leave a part of their kind.
    """
    embedded: list[EmbeddingsPrompt] = []
    media: list[tuple[str, Any]] = []

    def shown(part: Any, name: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == PART_TYPE:
            given = part.get(PART_TYPE)
            is_made = isinstance(given, EmbeddingsPrompt)
            embedded.append(given if is_made else EmbeddingsPrompt(given))
            return {"type": "text", "text": f"<embeds-{_SECRET}-{len(embedded) - 1}>"}
        if isinstance(kind, str) and kind in MEDIA_TYPES:
            media.append((part.get("name") or name, part))
            return {"type": MEDIA_TYPES[kind]}
        return part

    def without(message: Any, index: int) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        name = f"messages[{index}].content"
        parts = [shown(part, f"{name}[{place}]") for place, part in enumerate(content)]
        return {**message, "content": parts}

    found = tuple(without(message, index) for index, message in enumerate(messages))
    return found, OtherParts(tuple(embedded), tuple(media))


def ids_with_marks(
    text: str,
    embedded: Sequence[EmbeddingsPrompt],
    media: Sequence[EmbeddedMedia],
    media_tokens: Mapping[str, str],
    encode: Callable[[str], list[int]],
    param: str,
) -> list[int]:
    """Return the ids of a text, with marks of its other parts in their places.

    The numbers of ``media`` follow those of ``embedded``. ``media_tokens`` are the texts that a
    template prints for media, by the kinds that ``media`` are of.
    ``param`` is the field of the request that the text comes from.

    Raises:
        InvalidRequest: The text doesn't have the place of each of them once.
    """
    tokens = [f"(?P<{kind}>{re.escape(token)})" for kind, token in media_tokens.items()]
    ids = _MarkedIds(encode, param)
    numbers: list[int] = []
    of_kind: dict[str, list[int]] = {kind: [] for kind in media_tokens}
    for index, each in enumerate(media):
        of_kind[each.kind].append(index)
    counts: Counter[str] = Counter()
    end = 0
    for match in re.finditer("|".join((_MARK.pattern, *tokens)), text):
        ids.add_text(text[end : match.start()])
        end = match.end()
        kind = match.lastgroup
        if kind is not None:
            if counts[kind] < len(of_kind[kind]):
                index = of_kind[kind][counts[kind]]
                ids.add_medium(len(embedded) + index, media[index])
            counts[kind] += 1
            continue
        numbers.append(int(match[1]))
        ids.add_ids(embedded[numbers[-1]].marks(numbers[-1]))
    ids.add_text(text[end:])
    if sorted(numbers) != list(range(len(embedded))):
        raise _not_printed(len(numbers), len(embedded), "prompt_embeds parts")
    for kind, token in media_tokens.items():
        if counts[kind] != len(of_kind[kind]):
            raise _wrong_count(counts[kind], len(of_kind[kind]), PLURALS[kind], token, param)
    return ids.all()


@attrs.define
class _MarkedIds:
    """The ids of a text whose pieces are added one after another."""

    _encode: Callable[[str], list[int]]
    _param: str
    _ids: list[int] = attrs.field(init=False, factory=list)
    _text: str = attrs.field(init=False, default="")
    """Text that isn't encoded yet, because its last tokens depend on what follows."""
    _media: list[tuple[int, EmbeddedMedia]] = attrs.field(init=False, factory=list)
    """Numbers and media whose texts are part of it."""

    def add_text(self, text: str) -> None:
        """Add a piece of text."""
        self._text += text

    def add_ids(self, ids: Sequence[int]) -> None:
        """Add ids."""
        self._encode_text()
        self._ids += ids

    def add_medium(self, number: int, medium: EmbeddedMedia) -> None:
        """Add what stands for a medium, with marks of its number."""
        if medium.text:
            self._text += medium.text
            self._media.append((number, medium))
        else:
            self.add_ids(medium.marks(number))

    def all(self) -> list[int]:
        """Return the ids."""
        self._encode_text()
        return self._ids

    def _encode_text(self) -> None:
        if not self._text:
            return
        ids = self._encode(self._text)
        if self._media:
            count = sum(medium.num_placeholders for _, medium in self._media)
            if ids.count(self._media[0][1].placeholder) != count:
                raise InvalidRequest(
                    f"{self._param} has a text that stands for embeddings of a medium",
                    param=self._param,
                )
        for number, medium in self._media:
            medium.put_marks(number, ids)
        self._ids += ids
        self._text = ""
        self._media.clear()


def _wrong_count(count: int, given: int, kind: str, token: str, param: str) -> InvalidRequest:
    if count > given:
        return InvalidRequest(
            f"{param} has the text {token!r}, which stands for {kind}, {count} times, and there "
            f"are {given}",
            param=param,
        )
    if param == "messages":
        return _not_printed(count, given, kind)
    return InvalidRequest(
        f"{param} must have the text {token!r} once for each of its {given} {kind}, and has "
        f"it {count} times",
        param=param,
    )


def _not_printed(count: int, given: int, kind: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template printed {count} of {given} {kind}", param="messages")
