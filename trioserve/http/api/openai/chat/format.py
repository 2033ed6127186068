"""What the served model's chat template says of tools and reasoning, and what the options do."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from trioserve.config import ServerConfig
from trioserve.text.reasoning import CLOSE, OPEN, marks_reasoning
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tool_parsers import FAMILIES, Family, family_of_template


@attrs.frozen(kw_only=True)
class ChatFormat:
    """How chats with the served model are written."""

    tokenizer: Tokenizer
    template: str
    """The template's text, empty where the model has none."""
    variables: frozenset[str]
    """The names that the template looks at."""
    family: Family | None
    """How it writes tool calls; None if that isn't known."""
    reasons: bool
    """Whether answers may begin with reasoning."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ServerConfig) -> ChatFormat:
        """The format of a model, by its template or by what the options say."""
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
        """Whether the template prints tools."""
        return "tools" in self.variables

    def marks(self, *, with_tools: bool) -> Collection[str]:
        """The marks that have to be seen in an answer's text."""
        marks = [OPEN, CLOSE] if self.reasons else []
        if with_tools and self.family is not None:
            marks.extend(self.family.parser.markers)
        return marks

    def hides_marks(self, *, with_tools: bool) -> bool:
        """Whether some of the marks are special tokens, which a text is usually without."""
        special = self.tokenizer.special_ids
        marks = self.marks(with_tools=with_tools)
        return any(self.tokenizer.token_of(mark) in special for mark in marks)
