"""The sandbox in which chat templates run, as transformers defines their language.

jinja2's sandbox keeps a template from attributes that lead out of it, and from changing its
variables. It doesn't bound time or memory: :mod:`~trioserve.text.template_bounds` does that in the
server's process, and :mod:`~trioserve.text.template_child` in another one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _GenerationTag(jinja2.ext.Extension):
    """Tag ``{% generation %}``, which marks the assistant's text for training. Here it does
    nothing.
    """

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja2's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> None:
    """Refuse the conversation. Templates call this."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the present time in ``format``, as :meth:`datetime.datetime.strftime` has it."""
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, unlike the texts that models were trained with.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The language of chat templates: whitespace rules, tags, filters and functions."""

    # Nothing is evaluated while a template is compiled.
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        del self.globals["lipsum"]

    def printer(self, source: str) -> Callable[[dict[str, Any]], str]:
        """Compile ``source``, and return a function that renders it with variables."""
        template = self.from_string(source)
        return lambda variables: template.render(variables)
