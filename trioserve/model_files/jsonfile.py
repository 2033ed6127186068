"""Readers of the JSON files in a model's folder, with errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trioserve.protocol.errors import ModelLoadError


def read_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file is absent and not required.

    Raises:
        ModelLoadError: The file is missing, unreadable, or not a JSON object.
    """
    if not required and not path.exists():
        return {}
    if not path.exists():
        raise ModelLoadError(f"{path} is missing: fetch the model's folder again")
    return parse_object(read_file(path), path)


def read_array(path: Path) -> list[Any]:
    """Return the array in a JSON file.

    Raises:
        ModelLoadError: The file is unreadable, or not a JSON array.
    """
    value = _parse(read_file(path), path)
    if not isinstance(value, list):
        raise ModelLoadError(f"{path} is damaged: not a JSON array; fetch it again")
    return value


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file. A device or a pipe might never end.

    Raises:
        ModelLoadError: The file can't be read.
    """
    if not path.is_file():
        raise ModelLoadError(f"{path} can't be read: it is no file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror}") from error


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``data``, the content of ``path``.

    Raises:
        ModelLoadError: ``data`` isn't a JSON object.
    """
    value = _parse(data, path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is damaged: not a JSON object; fetch it again")
    return value


def _parse(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ModelLoadError(f"{path} is damaged: nested too deeply; fetch it again") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is damaged: no JSON ({error}); fetch it again") from error
