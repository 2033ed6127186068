"""The definition of an option, shared by Python, the command line and the environment.

:mod:`trioserve.config` lists the options themselves. Each is an attrs field made by :func:`option`;
its name gives all three spellings: ``max_num_seqs`` in Python, ``--max-num-seqs`` on the command
line and ``TRIOSERVE_MAX_NUM_SEQS`` in the environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import attrs

from trioserve.protocol.errors import InvalidRequest

PREFIX = "TRIOSERVE_"

_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_VALUE_NAMES = {str: "TEXT", int: "N", float: "X", bool: ""}
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZES = {
    **_UNITS,
    **{unit[0]: size for unit, size in _UNITS.items()},
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9},
    **{"k": 10**3, "m": 10**6, "g": 10**9},
}
"""Units of sizes. As in vLLM, a single capital letter is a power of 1024, a small one of 1000."""
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_SIZES)})")
_MAX_TYPOS = 2
"""Largest edit distance between a misspelled name and a suggestion."""
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLEANS |= {"0": False, "false": False, "no": False, "off": False}


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` closest to ``name``; None if none is close."""
    spelled = name.replace("_", "-").lower()
    slips, meant = min(
        ((_edit_distance(spelled, each.replace("_", "-").lower()), each) for each in known),
        default=(math.inf, None),
    )
    num_letters = sum(map(str.isalnum, name))
    return meant if slips <= min(_MAX_TYPOS, num_letters // 2) else None


def _edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance of ``a`` and ``b``."""
    row = list(range(len(b) + 1))
    for number, letter in enumerate(a, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(b, 1):
            before, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, before + (letter != other)),
            )
    return row[-1]


def flag_name(name: str) -> str:
    """Return ``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """Return ``TRIOSERVE_MAX_NUM_SEQS`` for ``max_num_seqs``."""
    return PREFIX + name.upper()


@attrs.frozen
class OptionGroup:
    """Group of options in help and documentation."""

    title: str
    page: str
    """Section of the docs about its options; an option may have its own (``Option.page``)."""


@attrs.frozen(kw_only=True)
class Option:
    """Definition of one option.

    ``kind`` is ``bool`` for a flag that takes ``--x`` and ``--no-x``. A ``repeatable`` option holds
    a tuple: its flag may be given several times, and its variable separates values by commas. A
    default of None means "chosen from the machine and the model".
    """

    name: str
    kind: type
    default: Any
    help: str
    group: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    repeatable: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    """Exclusive lower limit."""
    in_bytes: bool = False
    """True for a number of bytes; its text may have a unit, as in ``64MiB`` or ``2G``."""
    form: tuple[str, str] | None = None
    """Regular expression that matches the whole text, and its meaning in words."""
    secret: bool = False
    """True for a value that is never shown, such as a key."""
    common: bool = False
    """True for a common option, which the short ``--help`` shows."""
    unset: str | None = None
    """Meaning of a None or empty default, in words."""
    page: str | None = None
    """Section of the docs, as in ``lora#How many``; None for the group's."""

    @property
    def flag(self) -> str:
        """``--max-num-seqs`` for ``max_num_seqs``."""
        return flag_name(self.name)

    @property
    def environment(self) -> str:
        """``TRIOSERVE_MAX_NUM_SEQS`` for ``max_num_seqs``."""
        return environment_name(self.name)

    @property
    def value_name(self) -> str:
        """Placeholder of the value in help: the choices, or a word for the kind."""
        if self.choices is not None:
            return "{" + ",".join(self.choices) + "}"
        return self.metavar or ("BYTES" if self.in_bytes else _VALUE_NAMES[self.kind])

    @property
    def default_text(self) -> str | None:
        """Default as it would be typed, or in words; None without one."""
        if self.default is None or self.default in ((), ""):
            return self.unset
        if self.kind is bool:
            return "on" if self.default else "off"
        if self.in_bytes:
            return _with_unit(self.default)
        return f"{self.default:g}" if self.kind is float else str(self.default)

    @property
    def wanted(self) -> str:
        """Allowed values, in words that follow "must be"."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        if self.form is not None:
            return self.form[1]
        if self.repeatable and self.kind is str:
            return "text that isn't empty"
        kind = "a number of bytes, such as 512MiB or 2G," if self.in_bytes else _KINDS[self.kind]
        if self.above is not None:
            return f"{kind} above {self.above:g}" + (
                f" and at most {self.high:g}" if self.high is not None else ""
            )
        if self.high is not None:
            return f"{kind} from {self.low or 0:g} to {self.high:g}"
        return kind if self.low is None else f"{kind} of at least {self.low:g}"

    def check(self, value: Any) -> None:
        """Check a value from Python.

        Raises:
            InvalidRequest: The value isn't allowed; ``param`` is the option's name.
        """
        if value is None and self.default is None:
            return
        for item in value if self.repeatable else (value,):
            if not self._allows(item):
                raise self._refusal(item)

    def from_text(self, text: str) -> Any:
        """Convert a flag's text to a value, without a check of the limits.

        Raises:
            InvalidRequest: The text isn't a value of this kind.
        """
        try:
            if self.kind is bool:
                return _BOOLEANS[text.strip().lower()]
            if self.in_bytes and (size := _SIZE.fullmatch(text.strip())):
                return int(Decimal(size[1]) * _SIZES[size[2]])
            return self.kind(text)
        except (KeyError, ValueError):
            raise self._refusal(text) from None

    def from_variable(self, text: str) -> Any:
        """Convert an environment variable's text to a value; see :meth:`from_text`."""
        if not self.repeatable:
            return self.from_text(text)
        return tuple(self.from_text(part.strip()) for part in text.split(","))

    def _allows(self, value: Any) -> bool:
        if self.choices is not None:
            return value in self.choices
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is str:
            return isinstance(value, str) and self._has_form(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        return (whole or (self.kind is float and isinstance(value, float))) and self._in_range(
            value
        )

    def _has_form(self, text: str) -> bool:
        if self.form is not None:
            return re.fullmatch(self.form[0], text) is not None
        return bool(text) or not self.repeatable

    def _in_range(self, value: float) -> bool:
        return (
            not math.isnan(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def _refusal(self, value: object) -> InvalidRequest:
        return InvalidRequest(f"{self.name} must be {self.wanted}; got {value!r}", param=self.name)


def option(
    default: Any,
    help: str,
    *,
    group: str,
    kind: type = str,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    repeatable: bool = False,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    in_bytes: bool = False,
    form: tuple[str, str] | None = None,
    secret: bool = False,
    common: bool = False,
    unset: str | None = None,
    page: str | None = None,
) -> Any:
    """Return an attrs field that is also a flag and an environment variable."""
    metadata = {
        "kind": kind,
        "help": help,
        "group": group,
        "metavar": metavar,
        "choices": choices,
        "repeatable": repeatable,
        "low": low,
        "high": high,
        "above": above,
        "in_bytes": in_bytes,
        "form": form,
        "secret": secret,
        "common": common,
        "unset": unset,
        "page": page,
    }
    converter = _as_tuple if repeatable else None
    return attrs.field(
        default=default,
        metadata=metadata,
        validator=_check,
        converter=converter,
        repr=not secret,
    )


def _with_unit(number: int) -> str:
    """Return ``64MiB`` for ``64 << 20``: the number in the largest unit that divides it."""
    for unit, size in reversed(_UNITS.items()):
        if number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def _as_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _option_of(field: attrs.Attribute[Any]) -> Option:
    return Option(name=field.name, default=field.default, **field.metadata)


def _check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    _option_of(field).check(value)


def options_of(cls: type[attrs.AttrsInstance]) -> Iterator[Option]:
    """Yield the options of ``cls`` in the order of their definitions."""
    for field in attrs.fields(cls):
        if "help" in field.metadata:
            yield _option_of(field)


def options_from_environment(
    cls: type[attrs.AttrsInstance], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options of ``cls`` that ``environment`` sets, by name. Empty ones are unset.

    Raises:
        InvalidRequest: A text isn't a value of its option's kind; ``param`` is the option's name.
    """
    return {
        option.name: option.from_variable(environment[option.environment])
        for option in options_of(cls)
        if environment.get(option.environment)
    }


def unknown_variables(
    known_names: Sequence[str], environment: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """Return variables with the prefix of options that aren't options, with suggestions."""
    unknown = [
        name.removeprefix(PREFIX)
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in map(environment_name, known_names)
    ]
    known = [environment_name(name) for name in known_names]
    return [(PREFIX + name, closest(PREFIX + name, known)) for name in unknown]
