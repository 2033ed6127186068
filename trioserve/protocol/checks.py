"""Validators and converters of the fields that a caller gives. Each error names the field."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.protocol.errors import InvalidRequest

MAX_COUNT = 2**31 - 1
"""The largest number of tokens that a message to the worker can carry."""
MAX_LOGIT_BIAS = 1024
MAX_IDS = 1 << 20
"""Entries in a list of token ids: more than any vocabulary has."""


def refuse(param: str, value: object, wanted: str) -> InvalidRequest:
    """Return the error that says what ``param`` must be."""
    return InvalidRequest(f"{param} must be {wanted}, got {value!r}", param=param)


def number(low: float, high: float, wanted: str) -> Any:
    """Return a validator: a finite number from ``low`` to ``high``."""

    def check(_: object, attribute: attrs.Attribute[float], value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(attribute.name, value, wanted)
        if not (math.isfinite(value) and low <= value <= high):
            raise refuse(attribute.name, value, wanted)

    return check


def positive_number(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    """Validate a finite number above 0."""
    number(0.0, math.inf, "a number above 0")(_, attribute, value)
    if value == 0:
        raise refuse(attribute.name, value, "a number above 0")


def integer(low: int, wanted: str, *, high: int = MAX_COUNT) -> Any:
    """Return a validator: an integer from ``low`` to ``high``."""

    def check(_: object, attribute: attrs.Attribute[int], value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise refuse(attribute.name, value, wanted)
        if not low <= value <= high:
            raise refuse(attribute.name, value, wanted)

    return check


def one_of(choices: Sequence[str]) -> Any:
    """Return a validator: one of the strings ``choices``."""

    def check(_: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in choices:
            raise refuse(attribute.name, value, f"one of {', '.join(choices)}")

    return check


def boolean(_: object, attribute: attrs.Attribute[bool], value: bool) -> None:
    """Validate true or false."""
    if not isinstance(value, bool):
        raise refuse(attribute.name, value, "true or false")


def as_strings(name: str, value: Any, *, most: int, longest: int) -> tuple[str, ...]:
    """Return a converter to a tuple of strings: one string or several, empty ones left out.

    It refuses more than ``most`` strings, and strings longer than ``longest`` characters.
    """
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise refuse(name, value, "a string or a list of strings")
    strings = (value,) if isinstance(value, str) else tuple(value)
    for string in strings:
        if not isinstance(string, str):
            raise refuse(name, string, "a string or a list of strings")
        if len(string) > longest:
            wanted = f"strings of at most {longest} characters"
            raise refuse(name, f"{len(string)} characters", wanted)
    if len(strings) > most:
        raise refuse(name, f"{len(strings)} strings", f"at most {most} strings")
    return tuple(string for string in strings if string)


def as_ids(name: str, value: Any, *, most: int = MAX_IDS) -> tuple[int, ...]:
    """Return a converter of a list of token ids, at most ``most`` of them."""
    if value is not None and not isinstance(value, Iterable):
        raise refuse(name, value, "a list of token ids")
    ids = () if value is None else tuple(value)
    if len(ids) > most:
        raise refuse(name, f"{len(ids)} ids", f"at most {most} token ids")
    if (
        set(map(type, ids)) <= {int}
        and 0 <= min(ids, default=0) <= max(ids, default=0) <= MAX_COUNT
    ):
        return ids  # a check of each id would take a tenth of a second
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_COUNT:
            raise refuse(name, item, "a list of token ids")
    return tuple(map(int, ids))


def as_id_set(name: str, value: Any) -> tuple[int, ...]:
    """Convert ``value``, a list of token ids, to a sorted tuple without duplicates."""
    return tuple(sorted(set(as_ids(name, value))))


def as_bias(value: Mapping[Any, float] | None) -> dict[int, float]:
    """Convert a map of token ids, which may be strings, to numbers from -100 to 100."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", value, "a map of token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise refuse("logit_bias", f"{len(value)} entries", f"at most {MAX_LOGIT_BIAS} entries")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        try:
            token = int(key) if isinstance(key, str) else int(operator.index(key))
        except (TypeError, ValueError):
            raise refuse("logit_bias", key, "a map with token ids as keys") from None
        if (
            isinstance(amount, bool)
            or not isinstance(amount, (int, float))
            or not -100 <= amount <= 100
        ):
            wanted = f"a map with values from -100 to 100 (key {key!r})"
            raise refuse("logit_bias", amount, wanted)
        if token < 0:
            raise refuse("logit_bias", key, "a map with token ids as keys")
        bias[token] = float(amount)
    return bias
