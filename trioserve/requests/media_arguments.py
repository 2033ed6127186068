"""Arguments of a request for the media in its prompt, laid over those of the server's options.

Their bounds are checked where the prompt is made. The model's processor knows their names and
values: :mod:`.media.processors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import msgspec

from trioserve.config.media import (
    PROCESSOR_ARGUMENTS,
    PROCESSOR_EXAMPLE,
    READING_ARGUMENTS,
    READING_EXAMPLE,
    FrameSampling,
)
from trioserve.protocol.errors import InvalidRequest

MAX_ARGUMENTS = 64
MAX_ARGUMENT_BYTES = 16 << 10
"""Most bytes of all arguments of a field, as JSON."""
MAX_ARGUMENT_DEPTH = 4
"""Most lists and objects in one another, that of the field included."""
MAX_SHOWN_NAMES = 8
MAX_SHOWN_CHARACTERS = 64


@attrs.frozen(kw_only=True)
class MediaArguments:
    """Arguments of a request for its media: false if there are none.

    Attributes:
        processor: Arguments of the model's processor (``mm_processor_kwargs``).
        reading: Frames that are taken of videos (``media_io_kwargs``).
    """

    processor: Mapping[str, Any] = attrs.field(factory=dict)
    reading: Mapping[str, Any] = attrs.field(factory=dict)

    def __bool__(self) -> bool:
        return bool(self.processor or self.reading)

    def for_kind(self, kind: str) -> MediaArguments:
        """Return those that count for media of a kind."""
        return self if kind == "video" else attrs.evolve(self, reading={})

    @property
    def param(self) -> str:
        """Name of the field that an error about them is about."""
        return PROCESSOR_ARGUMENTS if self.processor else READING_ARGUMENTS

    def __str__(self) -> str:
        """Return the fields, and the names of the processor's arguments, for errors."""
        if not self.processor:
            return READING_ARGUMENTS
        fields = f"{PROCESSOR_ARGUMENTS} ({shown_names(self.processor)})"
        return f"{fields} and {READING_ARGUMENTS}" if self.reading else fields


NO_ARGUMENTS = MediaArguments()


def shown_names(names: Iterable[str]) -> str:
    """Return names of arguments for an error, no more of them than can be read there."""
    found = sorted(names)
    cut = [name[:MAX_SHOWN_CHARACTERS] for name in found[:MAX_SHOWN_NAMES]]
    return ", ".join([*cut, "…"] if len(found) > MAX_SHOWN_NAMES else cut)


def as_processor_arguments(given: object) -> dict[str, Any]:
    """Return ``mm_processor_kwargs`` as JSON values of their own.

    Raises:
        InvalidRequest: They aren't an object of JSON values, or beyond a bound.
    """
    return _as_arguments(PROCESSOR_ARGUMENTS, given, PROCESSOR_EXAMPLE)


def as_reading_arguments(given: object) -> dict[str, Any]:
    """Return ``media_io_kwargs`` as JSON values of their own.

    Raises:
        InvalidRequest: They aren't those of videos, or beyond a bound.
    """
    found = _as_arguments(READING_ARGUMENTS, given, READING_EXAMPLE)
    FrameSampling().with_arguments(found)
    return found


def _as_arguments(field: str, given: object, example: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _refuse(field, f"must be an object, as in {example}; got {type(given).__name__}")
    if len(given) > MAX_ARGUMENTS:
        raise _refuse(field, f"has {len(given)} arguments: at most {MAX_ARGUMENTS} are read")
    num_values = 0
    for name, value in given.items():
        if not isinstance(name, str) or not name.isprintable():
            raise _refuse(field, "must have names that are printable strings")
        num_values += _check_value(field, name, value, MAX_ARGUMENT_BYTES - num_values)
    try:
        encoded = msgspec.json.encode(dict(given))
    except (TypeError, ValueError) as error:  # such as text that isn't Unicode
        raise _refuse(field, f"can't be written as JSON: {error}") from None
    if len(encoded) > MAX_ARGUMENT_BYTES:
        raise _refuse(
            field, f"has {len(encoded)} bytes as JSON: at most {MAX_ARGUMENT_BYTES} are read"
        )
    found: dict[str, Any] = msgspec.json.decode(encoded)
    return found


def _check_value(field: str, name: str, value: object, most: int) -> int:
    """Return the number of values in an argument, which isn't nested too deeply, and is JSON.

    Raises:
        InvalidRequest: It isn't so, or there are more than ``most``.
    """
    level: list[object] = [value]
    count = 1
    for _ in range(MAX_ARGUMENT_DEPTH):
        below: list[object] = []
        for each in level:
            if not _is_json(each):
                raise _refuse(field, f"has {name} with a value that isn't JSON")
            below += _items(each)
            if count + len(below) > most:
                raise _refuse(
                    field,
                    f"has more values, with those of {name}, than {MAX_ARGUMENT_BYTES} bytes of "
                    "JSON, the most that are read",
                )
        count += len(below)
        level = below
    if level:
        raise _refuse(
            field,
            f"is nested too deeply in {name}: at most {MAX_ARGUMENT_DEPTH} levels are read",
        )
    return count


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**64  # what msgspec writes
    return value is None or isinstance(value, (str, list, tuple))


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _refuse(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}", param=field)
