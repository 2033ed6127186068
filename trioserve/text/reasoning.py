"""Separation of reasoning from the answer, for models that write ``<think>…</think>`` first.

Qwen 3, DeepSeek R1, SmolLM3 and others do. :class:`ReasoningSplitter` is pure: pieces of text in,
pieces of reasoning and of answer out, the same whatever the pieces. :func:`after_reasoning` extends
a grammar of the answer to the whole output.
"""

from __future__ import annotations

import attrs

from trioserve.protocol.lark import GAP, HEADER, TEXT, TokenOf, head, literal, nested

OPEN = "<think>"
CLOSE = "</think>"


def marks_reasoning(template: str) -> bool:
    """Return whether a chat template mentions these marks of reasoning."""
    return OPEN in template or CLOSE in template


def is_open(text: str) -> bool:
    """Return whether a continuation of ``text`` is reasoning."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


@attrs.frozen
class Split:
    """A piece of reasoning and a piece of the answer, either of which may be empty."""

    reasoning: str = ""
    answer: str = ""


@attrs.define(eq=False)
class ReasoningSplitter:
    """Splitter of one output. White space next to the marks belongs to neither side.

    Args:
        inside: whether the prompt has opened the reasoning already; some models open it once more.
            Otherwise an output that doesn't begin with the mark is all answer.
    """

    inside: bool = False
    opened: bool = attrs.field(init=False)
    """True if there is reasoning, even an empty one between its marks."""
    _at_start: bool = True
    """True while the output may still begin with the mark."""
    _begun: bool = False
    """True once something other than white space came since the last mark."""
    _past: bool = False
    """True if the reasoning has ended, or there is none."""
    _held: str = ""
    """Text that may be the beginning of a mark."""
    _space: list[str] = attrs.field(factory=list)
    """White space that counts only if more of the same side follows."""

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
        """Wait for a mark or other text; return what follows."""
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
        """Append reasoning up to its end to ``reasoning``; return what follows."""
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
    """Split ``text`` before a possible beginning of the closing mark."""
    start = text.rfind("<", max(0, len(text) - len(CLOSE) + 1))
    if start >= 0 and CLOSE.startswith(text[start:]):
        return text[:start], text[start:]
    return text, ""


def after_reasoning(answer: str, token_of: TokenOf, *, inside: bool) -> str:
    """Return the Lark grammar of an output with an answer that follows the grammar ``answer``.

    Reasoning comes first: certainly if the prompt has opened it, otherwise at the model's choice.
    """
    first = "head GAP?" if inside else f"({literal(OPEN, token_of)} head GAP?)?"
    return (
        f"{HEADER}start: {first} answer\n{head(CLOSE, token_of)}{TEXT}{GAP}"
        f"answer: {nested(answer)}\n"
    )
