"""LoRA adapters as an engine offers them: which there are, by name, and how they come and go.

Every load has a number of its own, so that what was computed with one adapter is never taken for
another's of the same name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Annotated, Protocol

import attrs
import msgspec

from trioserve.protocol.errors import AdapterNotFound, InvalidRequest

__all__ = [
    "NO_ADAPTER",
    "Adapter",
    "Adapters",
    "Catalogue",
    "absolute",
    "check_name",
    "named_paths",
]

NO_ADAPTER = 0
"""The number of none: the model as it is."""
MAX_NAME_CHARACTERS = 512


@attrs.frozen(kw_only=True)
class Adapter:
    """One adapter that requests may name."""

    number: int
    name: str
    path: str
    """The folder that it was read from, from the root on."""


@attrs.define(eq=False)
class Catalogue:
    """The adapters that requests may name at the moment, in the order in which they came."""

    _by_name: dict[str, Adapter] = attrs.field(init=False, factory=dict)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_name.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def find(self, name: str) -> Adapter:
        """The adapter of that name.

        Raises:
            AdapterNotFound: there is none.
        """
        if name not in self._by_name:
            raise AdapterNotFound(f"no adapter {name!r} is loaded")
        return self._by_name[name]

    def add(self, adapter: Adapter) -> None:
        """Let requests name ``adapter``."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Let no request name it any more; raises as :meth:`find`."""
        adapter = self.find(name)
        del self._by_name[name]
        return adapter

    def replace(self, adapters: Sequence[Adapter]) -> None:
        """Let requests name ``adapters`` and no others."""
        self._by_name = {adapter.name: adapter for adapter in adapters}


class Adapters(Protocol):
    """What an engine needs of whoever keeps its adapters."""

    @property
    def catalogue(self) -> Catalogue:
        """Those that requests may name."""

    async def load(self, name: str, path: str) -> None:
        """As :meth:`trioserve.Engine.load_adapter`, for arguments that are in order."""

    async def unload(self, name: str) -> None:
        """As :meth:`trioserve.Engine.unload_adapter`."""


def check_name(name: str) -> None:
    """Refuse what is no name.

    Raises:
        InvalidRequest: it is empty, too long, or has characters that can't be seen.
    """
    if not (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME_CHARACTERS
        and name.isprintable()
        and name == name.strip()
    ):
        raise InvalidRequest(
            f"an adapter's name has 1 to {MAX_NAME_CHARACTERS} printable characters, no space at "
            "its ends",
            param="name",
        )


def absolute(path: str | PathLike[str]) -> str:
    """``path`` from the root on: whoever opens it may be in another folder."""
    return os.path.abspath(path)


def named_paths(modules: Sequence[str]) -> list[tuple[str, str]]:
    """Names and folders of entries ``name=path``, or of vLLM's JSON objects.

    Raises:
        InvalidRequest: an entry is neither, or a name isn't one; ``param`` is the option.
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
    """An entry as vLLM writes it; the base model's name says nothing here."""

    name: str
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None


def _named_path(module: str) -> tuple[str, str]:
    if module.startswith("{"):
        entry = msgspec.json.decode(module, type=_Module)
        return entry.name, entry.path
    name, _, path = module.partition("=")
    return name, path
