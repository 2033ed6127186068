"""Format of chats with the served model, by its chat template and the server's options."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from trioserve.config import ServerConfig
from trioserve.text.reasoning import CLOSE, OPEN, marks_reasoning
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tool_parsers import FAMILIES, Family, family_of_template


@attrs.frozen(kw_only=True)
class ChatFormat:
    """Format of chats with the served model."""

    tokenizer: Tokenizer
    template: str
    """Text of the template, empty if the model has none."""
    variables: frozenset[str]
    """Names of the variables that the template reads."""
    family: Family | None
    """Syntax of its tool calls; None if that isn't known."""
    reasons: bool
    """True if answers may begin with reasoning."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> ChatFormat:
        """Return the format of a model, from its template and the options."""
        template = tokenizer.chat_template
        source = "" if template is None else template.source
        variables = frozenset[str]() if template is None else template.variables
        if config.tool_call_parser == "auto":
            family = family_of_template(source, knows_tools="tools" in variables)
        else:
            family = FAMILIES.get(config.tool_call_parser)
        if config.reasoning_parser == "auto":
            reasons = marks_reasoning(source)
        else:
            reasons = config.reasoning_parser == "think"
        return cls(
            tokenizer=tokenizer,
            template=source,
            variables=variables,
            family=family,
            reasons=reasons,
        )

    @property
    def knows_tools(self) -> bool:
        """True if the template prints tools."""
        return "tools" in self.variables

    def marks(self, *, with_tools: bool) -> Collection[str]:
        """Return the marks that have to be visible in an answer's text."""
        marks = [OPEN, CLOSE] if self.reasons else []
        if with_tools and self.family is not None:
            marks.extend(self.family.parser.markers)
        return marks

    def hides_marks(self, *, with_tools: bool) -> bool:
        """Return whether some marks are special tokens, which a text usually leaves out."""
        special = self.tokenizer.special_ids
        marks = self.marks(with_tools=with_tools)
        return any(self.tokenizer.token_of(mark) in special for mark in marks)
