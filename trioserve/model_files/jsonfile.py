"""JSON files of a model's folder, read with errors that a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trioserve.errors import ModelLoadError

__all__ = ["parse_object", "read_object"]


def read_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; an absent file that isn't required is an empty one.

    Raises:
        ModelLoadError: the file is missing, unreadable, no JSON, or no object.
    """
    if not required and not path.exists():
        return {}
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing: fetch the model's folder again") from None
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror}") from error
    return parse_object(data, path)


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in ``data``, which was read from ``path``.

    Raises:
        ModelLoadError: it is no JSON, or no object.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelLoadError(f"{path} is damaged: no JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is damaged: not a JSON object; fetch it again")
    return value
