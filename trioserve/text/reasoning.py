"""Separation of reasoning from the answer, for models that write ``<think>…</think>`` first.

Qwen 3, DeepSeek R1, SmolLM3 and others do. :class:`ReasoningSplitter` splits pieces of text without
I/O, and its result doesn't depend on where the pieces are cut. :func:`after_reasoning` extends a
grammar of the answer to the whole output.
"""

from __future__ import annotations

import attrs

from trioserve.protocol.lark import GAP, HEADER, TEXT, TokenOf, head, literal, nested

OPEN = "<think>"
CLOSE = "</think>"


def marks_reasoning(template: str) -> bool:
    """Return True if a chat template contains the tags of reasoning."""
    return OPEN in template or CLOSE in template


def is_open(text: str) -> bool:
    """Return True if a continuation of ``text`` is reasoning."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


@attrs.frozen
class Split:
    """A piece of reasoning and a piece of the answer; either may be empty."""

    reasoning: str = ""
    answer: str = ""


@attrs.define(eq=False)
class ReasoningSplitter:
    """Splitter of one output. White space next to the tags belongs to neither part.

    Args:
        inside: True if the prompt already ends with the opening tag; some models write it again.
            Otherwise an output that doesn't begin with the tag is all answer.
    """

    inside: bool = False
    opened: bool = attrs.field(init=False)
    """True if there is reasoning, even if it is empty."""
    _at_start: bool = True
    """True while the output may still begin with the opening tag."""
    _begun: bool = False
    """True once other text than white space came since the last tag."""
    _past: bool = False
    """True if the reasoning has ended, or there is none."""
    _held: str = ""
    """Text that may be the beginning of a tag."""
    _space: list[str] = attrs.field(factory=list)
    """White space that is kept only if more of the same part follows."""

    @opened.default
    def _opened_already(self) -> bool:
        return self.inside

    def feed(self, text: str) -> Split:
        """Split the next piece."""
        if self._past and self._begun:
            return Split(answer=text)
        text, self._held = self._held + text, ""
        reasoning: list[str] = []
        if self._at_start:
            text = self._begin(text)
        if self.inside and not self._at_start:
            text = self._reason(text, reasoning)
        return Split("".join(reasoning), self._answer(text) if self._past else "")

    def finish(self) -> Split:
        """Return the held-back text at the end of the output."""
        text, self._held = "".join(self._space) + self._held, ""
        self._space.clear()
        if self.inside:
            return Split(reasoning=text if self._begun else text.lstrip())
        self._past = True
        return Split(answer=text)

    def _begin(self, text: str) -> str:
        """Skip to the opening tag or other text; return the text from there on."""
        stripped = text.lstrip()
        if not stripped:
            self._space.append(text)
            return ""
        if OPEN.startswith(stripped) and stripped != OPEN:
            self._space.append(text[: len(text) - len(stripped)])
            self._held = stripped
            return ""
        self._at_start = False
        text = "".join(self._space) + text
        self._space.clear()
        if stripped.startswith(OPEN):
            self.inside = self.opened = True
            return stripped[len(OPEN) :]
        self._past = self._begun = not self.inside
        return text

    def _reason(self, text: str, reasoning: list[str]) -> str:
        """Append reasoning up to the closing tag to ``reasoning``; return the text after it."""
        end = text.find(CLOSE)
        inner = text if end < 0 else text[:end]
        if end < 0:
            inner, self._held = _without_part_of_mark(inner)
        if not self._begun:
            inner = inner.lstrip()
            self._begun = bool(inner)
        visible = inner.rstrip()
        if visible:
            reasoning.extend((*self._space, visible))
            self._space.clear()
        if end < 0:
            self._space.append(inner[len(visible) :])
            return ""
        self._space.clear()
        self.inside, self._past, self._begun = False, True, False
        return text[end + len(CLOSE) :]

    def _answer(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text


def _without_part_of_mark(text: str) -> tuple[str, str]:
    """Split ``text`` before a possible beginning of the closing tag."""
    start = text.rfind("<", max(0, len(text) - len(CLOSE) + 1))
    if start >= 0 and CLOSE.startswith(text[start:]):
        return text[:start], text[start:]
    return text, ""


def after_reasoning(answer: str, token_of: TokenOf, *, inside: bool) -> str:
    """Return the Lark grammar of an output with an answer that follows the grammar ``answer``.

    Reasoning comes first. It is optional unless the prompt has opened it (``inside``).
    """
    first = "head GAP?" if inside else f"({literal(OPEN, token_of)} head GAP?)?"
    return (
        f"{HEADER}start: {first} answer\n{head(CLOSE, token_of)}{TEXT}{GAP}"
        f"answer: {nested(answer)}\n"
    )
