"""Options of other servers on a command line, by the tables of docs/from-*.md.

An option without effect here is taken out of the command line. Any other one is explained.
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
"""Names of the servers, by the names of their tables."""

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_SWITCHED_ON = ("on", "auto")
_MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_WHY_NOT = re.compile(r"not (?:needed|there)(?: yet)?(?:, with intent)?(?:[:;] )?")


@attrs.frozen(kw_only=True)
class Equivalent:
    """Row of a table: options of another server, and their equivalent here."""

    server: str
    flags: tuple[str, ...]
    here: str
    """The equivalent, in Markdown."""
    accepts: str | list[str] = ""
    """Values with which the options have no effect here; see the data file."""

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
class Foreign:
    """Option on a command line that its command doesn't have."""

    flag: str
    values: tuple[str, ...] = ()
    is_taken: bool = False
    """True for an option without effect, which the command ignores."""

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


def without_foreign(
    arguments: Sequence[str], own: Collection[str], *, has_tables: bool
) -> tuple[list[str], list[Foreign]]:
    """Return the command line without options that have no effect, and all foreign options.

    Args:
        arguments: the words behind the command's name.
        own: the command's options.
        has_tables: whether options of other servers may be among them.
    """
    left: list[str] = []
    found: list[Foreign] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            left += [word, *words]
            break
        if not _is_flag(word) or word.partition("=")[0] in own:
            left.append(word)
            continue
        found.append(_foreign(word, words) if has_tables else Foreign(word.partition("=")[0]))
    return left, found


def told(foreign: Foreign) -> str:
    """Return a line that says why an option has no effect."""
    row = next(_rows(foreign.flag))
    reason = _WHY_NOT.sub("", row.text_for(foreign.flag).removeprefix("use "), count=1)
    return f"{foreign} changes nothing here" + (f": {reason}" if reason else "")


def explained(foreign: Sequence[Foreign], own: Collection[str], *, has_tables: bool) -> str:
    """Return the equivalents of these options, in one line each if there are several.

    If several tables have an option, the one with the most of these options counts. Without
    tables, only options of the command with a similar name are suggested.
    """
    rows = [list(_rows(each.flag)) if has_tables else [] for each in foreign]
    counts = Counter(server for each in rows for server in {row.server for row in each})
    lines = []
    for each, candidates in zip(foreign, rows, strict=True):
        row = max(candidates, key=lambda row: counts[row.server], default=None)
        lines.append(_explained(each, row, own))
    if len(lines) == 1:
        return f"unknown: {lines[0]}"
    return "".join([f"{len(lines)} options are unknown", *(f"\n  {line}" for line in lines), "\n"])


def _explained(foreign: Foreign, row: Equivalent | None, own: Collection[str]) -> str:
    if row is not None:
        return f"{foreign} ({SERVERS[row.server]}): {row.text_for(_known(foreign.flag))}"
    meant = closest(foreign.flag, own)
    return foreign.flag + (f"; did you mean {meant}?" if meant else "")


def _is_flag(word: str) -> bool:
    """Return whether argparse takes ``word`` for an option."""
    name = word.partition("=")[0]
    return name.startswith("-") and len(name) > 1 and " " not in name and not _NUMBER.match(name)


def _known(flag: str) -> str:
    """Return the flag as tables spell it: with dashes, and without what follows a dot."""
    return flag.partition(".")[0].replace("_", "-") if flag.startswith("--") else flag


def _rows(flag: str) -> Iterator[Equivalent]:
    known = _known(flag)
    return (row for row in equivalents() if known in row.flags)


def _foreign(word: str, rest: list[str]) -> Foreign:
    """Return the option ``word`` with its values, which are taken from ``rest``."""
    flag, has_value, value = word.partition("=")
    row = next(_rows(flag), None)
    accepts = row.accepts if row is not None else ""
    values = (value,) if has_value else tuple(_values(accepts, rest))
    return Foreign(flag, values, _changes_nothing(accepts, values))


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
    """Yield an option's values, taken from the words behind it."""
    most = {"": 0, "flag": 0, "values": len(rest)}.get(str(accepts), 1)
    while most and rest and not _is_flag(rest[0]) and rest[0] != "--":
        if accepts == "optional" and rest[0] not in (*_SWITCHED_ON, "off"):
            return
        yield rest.pop(0)
        most -= 1
