"""Names and folders of LoRA adapters, from options and callers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from typing import Annotated

import msgspec

from trioserve.protocol.errors import InvalidRequest

MAX_NAME_CHARACTERS = 512


def check_name(name: str) -> None:
    """Check an adapter's name.

    Raises:
        InvalidRequest: The name is empty, too long, or has unprintable characters.
    """
    if not (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME_CHARACTERS
        and name.isprintable()
        and name == name.strip()
    ):
        raise InvalidRequest(
            f"an adapter's name has 1 to {MAX_NAME_CHARACTERS} printable characters, without "
            "spaces at its ends",
            param="name",
        )


def absolute(path: str | PathLike[str]) -> str:
    """Return the absolute ``path``, because the worker may run in another folder."""
    return os.path.abspath(path)


def named_paths(modules: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and folders in entries ``name=path``, or in vLLM's JSON objects.

    Raises:
        InvalidRequest: An entry or a name is invalid; ``param`` is the option.
    """
    named = []
    for module in modules:
        try:
            name, path = _named_path(module)
            check_name(name)
        except (InvalidRequest, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"lora_modules: {error}", param="lora_modules") from error
        named.append((name, absolute(path)))
    return named


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """Entry in vLLM's form; the base model's name is ignored."""

    name: str
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None


def _named_path(module: str) -> tuple[str, str]:
    if module.startswith("{"):
        entry = msgspec.json.decode(module, type=_Module)
        return entry.name, entry.path
    name, _, path = module.partition("=")
    return name, path
