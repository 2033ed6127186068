"""Options of other servers on a command line, by the tables of docs/from-*.md.

An option without effect here is ignored. For any other one, an error names the equivalent.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from importlib import resources

import attrs

from trioserve.config.options import closest

SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "llama-cpp": "llama.cpp"}
"""Names of the servers, by their tables' names."""

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_SWITCHED_ON = ("on", "auto")
_MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_WHY_NOT = re.compile(r"not (?:needed|there)(?: yet)?(?:, with intent)?(?:[:;] )?")


@attrs.frozen(kw_only=True)
class Equivalent:
    """A row of a table: options of another server, and their equivalent here."""

    server: str
    flags: tuple[str, ...]
    here: str
    """The equivalent in Markdown."""
    accepts: str | list[str] = ""
    """Values with which the options are ignored; see equivalents.toml."""

    def text_for(self, flag: str) -> str:
        """Return the equivalent of ``flag`` as plain text."""
        text = _MARKDOWN_LINK.sub(r"\1", self.here).removeprefix("the same: ")
        own, _, _ = text.partition(";")
        names = re.findall(r"`(--[^`]+)`", own)
        if len(names) == len(self.flags) > 1 and own == ", ".join(f"`{name}`" for name in names):
            text = names[self.flags.index(flag)]
        text = text.replace("`", "")
        return text if _WHY_NOT.match(text) else f"use {text}"


@attrs.frozen
class UnknownOption:
    """An option on a command line that the command doesn't have."""

    flag: str
    values: tuple[str, ...] = ()
    is_ignored: bool = False
    """True if the option has no effect here, so the command ignores it."""

    def __str__(self) -> str:
        return " ".join((self.flag, *self.values))


@functools.cache
def equivalents() -> tuple[Equivalent, ...]:
    """Return the rows of all tables."""
    data = resources.files("trioserve.cli").joinpath("equivalents.toml").read_text("utf-8")
    return tuple(
        Equivalent(
            server=server,
            flags=tuple(row["flags"]),
            here=row["here"],
            accepts=row.get("accepts", ""),
        )
        for server, rows in tomllib.loads(data).items()
        for row in rows
    )


def without_unknown(
    arguments: Sequence[str], own: Collection[str], *, has_tables: bool
) -> tuple[list[str], list[UnknownOption]]:
    """Return the command line without unknown options, and the unknown options.

    Args:
        arguments: The words after the command's name.
        own: The command's options.
        has_tables: True if options of other servers may be among them.
    """
    left: list[str] = []
    found: list[UnknownOption] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            left += [word, *words]
            break
        if not _is_flag(word) or word.partition("=")[0] in own:
            left.append(word)
            continue
        found.append(
            _unknown_option(word, words) if has_tables else UnknownOption(word.partition("=")[0])
        )
    return left, found


def ignored_text(unknown: UnknownOption) -> str:
    """Return a line that says why an option is ignored."""
    row = next(_rows(unknown.flag))
    reason = _WHY_NOT.sub("", row.text_for(unknown.flag).removeprefix("use "), count=1)
    return f"{unknown} changes nothing here" + (f": {reason}" if reason else "")


def explanation(unknown: Sequence[UnknownOption], own: Collection[str], *, has_tables: bool) -> str:
    """Return the equivalents of unknown options, in one line each if there are several.

    If several tables have an option, the table with the most of these options is used. Without
    tables, only options of the command with a similar name are suggested.
    """
    rows = [list(_rows(each.flag)) if has_tables else [] for each in unknown]
    counts = Counter(server for each in rows for server in {row.server for row in each})
    lines = []
    for each, candidates in zip(unknown, rows, strict=True):
        row = max(candidates, key=lambda row: counts[row.server], default=None)
        lines.append(_explained(each, row, own))
    if len(lines) == 1:
        return f"unknown: {lines[0]}"
    return "".join([f"{len(lines)} options are unknown", *(f"\n  {line}" for line in lines), "\n"])


def _explained(unknown: UnknownOption, row: Equivalent | None, own: Collection[str]) -> str:
    if row is not None:
        return f"{unknown} ({SERVERS[row.server]}): {row.text_for(_known(unknown.flag))}"
    meant = closest(unknown.flag, own)
    return unknown.flag + (f"; did you mean {meant}?" if meant else "")


def _is_flag(word: str) -> bool:
    """Return True if argparse parses ``word`` as an option."""
    name = word.partition("=")[0]
    return name.startswith("-") and len(name) > 1 and " " not in name and not _NUMBER.match(name)


def _known(flag: str) -> str:
    """Return the flag as in the tables: with dashes, without the part after a dot."""
    return flag.partition(".")[0].replace("_", "-") if flag.startswith("--") else flag


def _rows(flag: str) -> Iterator[Equivalent]:
    known = _known(flag)
    return (row for row in equivalents() if known in row.flags)


def _unknown_option(word: str, rest: list[str]) -> UnknownOption:
    """Return the option ``word``; its values are removed from ``rest``."""
    flag, has_value, value = word.partition("=")
    row = next(_rows(flag), None)
    accepts = row.accepts if row is not None else ""
    values = (value,) if has_value else tuple(_values(accepts, rest))
    return UnknownOption(flag, values, _changes_nothing(accepts, values))


def _changes_nothing(accepts: str | list[str], values: Sequence[str]) -> bool:
    match accepts:
        case list():
            return len(values) == 1 and values[0] in accepts
        case "flag":
            return not values
        case "value":
            return len(values) == 1
        case "values":
            return bool(values)
        case "optional":
            return not values or values[0] in _SWITCHED_ON
    return False


def _values(accepts: str | list[str], rest: list[str]) -> Iterator[str]:
    """Yield an option's values, and remove them from ``rest``, the words after it."""
    most = {"": 0, "flag": 0, "values": len(rest)}.get(str(accepts), 1)
    while most and rest and not _is_flag(rest[0]) and rest[0] != "--":
        if accepts == "optional" and rest[0] not in (*_SWITCHED_ON, "off"):
            return
        yield rest.pop(0)
        most -= 1
