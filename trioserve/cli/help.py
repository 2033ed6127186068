"""The text of ``--help`` and ``--help=NAME``."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from trioserve.config.options import PREFIX, Option

ALL = "all"
"""NAME for all options."""

_FLAG = "--help="
_MOST_CLOSE = 5


def topic_of(words: Sequence[str]) -> str | None:
    """Return NAME of the first ``--help=NAME`` on a command line; None without one."""
    for word in words:
        if word == "--":
            break
        if word.startswith(_FLAG):
            return word.removeprefix(_FLAG)
    return None


def plain_name(text: str) -> str:
    """Return a flag, a variable or a Python name in one spelling: ``max-num-seqs``."""
    return text.lstrip("-").replace("_", "-").lower()


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the flags in ``known`` that contain ``name`` or have a similar name."""
    import difflib  # used for a wrong name alone

    flags = {plain_name(flag): flag for flag in known}
    plain = plain_name(name).removeprefix(plain_name(PREFIX))
    close = [each for each in flags if plain and plain in each]
    close += difflib.get_close_matches(plain, flags, n=_MOST_CLOSE)
    return [flags[each] for each in dict.fromkeys(close)][:_MOST_CLOSE]


class Formatter(argparse.HelpFormatter):
    """A formatter like argparse's that wraps every long line, but never within a flag."""

    @property
    def width(self) -> int:
        """Number of columns of a line."""
        return self._width

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and textwrap.fill(heading, self._width))

    def _format_usage(self, *arguments: Any) -> str:
        usage = super()._format_usage(*arguments)
        return _filled(usage, self._width, "", "  ") + "\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(text, width, "").splitlines()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return _filled(text, width, indent)

    def invocation(self, action: argparse.Action) -> str:
        """Return the flags of ``action`` with its value, in lines broken at spaces and commas."""
        indent = self._current_indent
        lines = [""]
        for piece in re.findall(r"[^ ,]+[ ,]*", super()._format_action_invocation(action)):
            if lines[-1] and indent + len(lines[-1] + piece.rstrip()) > self._width:
                lines.append(" " * 4)
            lines[-1] += piece
        return f"\n{' ' * indent}".join(line.rstrip() for line in lines)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return self.invocation(action)


@attrs.frozen(kw_only=True)
class Topic:
    """One argument of a command in ``--help=NAME``."""

    action: argparse.Action
    option: Option | None
    """The option; None for other arguments, such as MODEL."""
    variable: str | None
    """Its environment variable; None if it has none."""
    page: str
    """Section of the docs; see ``Option.page``."""

    @property
    def names(self) -> set[str]:
        """Plain names of the argument."""
        names = {self.action.dest, *self.action.option_strings, self.variable or ""}
        return {plain_name(name) for name in names if name}

    def text(self, formatter: Formatter) -> str:
        """Return the help of the argument."""
        text = self.option.help if self.option is not None else str(self.action.help)
        facts = [
            _filled(f"{name + ':':<10}{fact}", formatter.width, "  ", " " * 12)
            for name, fact in self._facts()
        ]
        invocation = formatter.invocation(self.action)
        filled = _filled(text, formatter.width, "  ")
        return "\n\n".join([invocation, filled, "\n".join(facts)]) + "\n"

    def _facts(self) -> Iterable[tuple[str, str]]:
        option = self.option
        several = option is not None and option.repeatable
        if self.variable is not None:
            commas = ", with commas between several values" if several else ""
            yield "variable", self.variable + commas
        if option is not None:
            if option.kind is not bool or self.variable is not None:
                yield "value", option.wanted
            if option.default_text is not None:
                yield "default", option.default_text
        path, _, heading = self.page.partition("#")
        yield "docs", f'docs/{path}.md, "{heading}"'


def _filled(text: str, width: int, indent: str, hanging: str | None = None) -> str:
    return textwrap.fill(
        text,
        max(width, len(hanging or indent) + 8),
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_on_hyphens=False,
    )
