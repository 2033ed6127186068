"""Checked fields of a model's JSON files, with errors that name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioserve.model_files.config import MAX_NUMBER, MAX_SIZE
from trioserve.protocol.errors import ModelLoadError


class Fields:
    """The fields of the JSON object in ``path``, each checked when it is read.

    ``defaults`` replace absent fields. An invalid field raises a ModelLoadError that names the file
    and the field.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path = path
        self.values = {**defaults, **values}

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """Return an integer from ``least`` to ``most``; null counts as absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, value)
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive number; null counts as absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, value)
        if not 0 < value <= MAX_NUMBER:  # Also refuses NaN.
            raise self.error(name, value)
        return float(value)

    def flag(self, name: str) -> bool:
        """Return the truth value; False if the field is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, value)
        return bool(value)

    def get(self, name: str) -> Any:
        """Return the field unchanged; None if it is absent."""
        return self.values.get(name)

    def error(self, name: str, value: object) -> ModelLoadError:
        """Return the error for an invalid value of the field ``name``."""
        if value is None:
            return ModelLoadError(f"{self.path} has no {name}: it is no complete configuration")
        return ModelLoadError(f"{self.path} has {name} = {value!r}, which can't be right")
