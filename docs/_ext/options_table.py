"""A table of every option of :mod:`trioserve.config`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from trioserve.config import GROUPS, EngineConfig, ServerConfig
from trioserve.config.options import Option, options_of
from trioserve.config.router import RouterConfig


def table_lines() -> Iterator[str]:
    """Yield a Markdown section with a table for every group of options."""
    options = [option for cls in (EngineConfig, ServerConfig) for option in options_of(cls)]
    for name, group in GROUPS.items():
        yield f"## {group.title}"
        yield ""
        yield from _table(option for option in options if option.group == name)
        yield ""


def router_lines() -> Iterator[str]:
    """Yield a table of the options that only a router has."""
    return _table(options_of(RouterConfig))


def _table(options: Iterable[Option]) -> Iterator[str]:
    yield "| Option | Default | Meaning |"
    yield "| --- | --- | --- |"
    yield from map(_row, options)


def _row(option: Option) -> str:
    flag = f"`{option.flag}`"
    if option.kind is bool:
        flag += f", `{option.flag.replace('--', '--no-', 1)}`"
    default = option.default_text or ""
    if default and option.unset is None:
        default = f"`{default}`"
    meaning = _meaning(option)
    if option.page is not None:
        meaning += f" See {_link(option.page)}."
    cells = (f"{flag}<br>`{option.environment}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _meaning(option: Option) -> str:
    text = option.help[0].upper() + option.help[1:] + "."
    if option.kind is bool or (
        option.kind is str and option.choices is None and option.form is None
    ):
        return text
    return f"{text} {option.wanted[0].upper()}{option.wanted[1:]}."


def _link(page: str) -> str:
    """Return the Markdown link to a section; ``page`` is ``Option.page``."""
    name, _, heading = page.partition("#")
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}]({'' if name == 'options' else f'{name}.md'}#{anchor})"
