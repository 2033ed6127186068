"""The disk of workers without a model, and the memory that they share: contents of pages by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trioserve.testing.fake_pages import Content, FakePages


@attrs.define(eq=False)
class FakeDisk:
    """Pages outside workers: on disk, where they outlive them, and in memory that several share."""

    contents: dict[str, dict[bytes, Content]] = attrs.field(factory=dict)
    """Contents of pages by the weights that computed them and by their keys."""
    memories: dict[str, tuple[str, dict[bytes, Content]]] = attrs.field(init=False, factory=dict)
    """Weights, and contents by key, of the pages in each shared memory that isn't read yet."""
    _num_exported: int = attrs.field(init=False, default=0)
    max_pages: int = 1 << 30
    """The most pages for the same weights; the oldest are deleted for new ones."""

    def of(self, weights: str) -> dict[bytes, Content]:
        """Return the pages that were computed with ``weights``, by their keys."""
        return self.contents.setdefault(weights, {})

    def write(
        self, weights: str, pages: FakePages, arguments: dict[str, Any]
    ) -> tuple[list[bool], list[bytes]]:
        """Answer the call ``write_pages``."""
        kept = self.of(weights)
        for key, place in zip(arguments["keys"], arguments["places"], strict=True):
            kept[key] = pages.of_page(place)
        removed = list(kept)[: max(len(kept) - self.max_pages, 0)]
        for key in removed:
            del kept[key]
        return [True] * len(arguments["keys"]), removed

    def read(self, weights: str, pages: FakePages, arguments: dict[str, Any]) -> int:
        """Answer the call ``read_pages``."""
        num_read = 0
        for key, place in zip(arguments["keys"], arguments["places"], strict=True):
            content = self.of(weights).get(key)
            if content is None:
                break
            pages.fill(place, content)
            num_read += 1
        return num_read

    def export_pages(self, weights: str, pages: FakePages, arguments: dict[str, Any]) -> bytes:
        """Answer the call ``export_pages``; a message is a name of memory, too."""
        self._num_exported += 1
        name = arguments.get("memory", f"message {self._num_exported}")
        contents = map(pages.of_page, arguments["pages"])
        self.memories[name] = weights, dict(zip(arguments["keys"], contents, strict=True))
        return b"" if "memory" in arguments else str(name).encode()

    def import_pages(self, weights: str, pages: FakePages, arguments: dict[str, Any]) -> int:
        """Answer the call ``import_pages``."""
        name = arguments.get("memory") or arguments["content"].decode()
        state, contents = self.memories.pop(name, (weights, {}))
        if state != weights:
            return 0
        num_read = 0
        for key, place in zip(arguments["keys"], arguments["places"], strict=False):
            if key not in contents:
                break
            pages.fill(place, contents[key])
            num_read += 1
        return num_read

    def calls(self, weights: str, pages: FakePages) -> dict[str, Callable[[Any], Any]]:
        """Return the functions that answer a worker's calls, by name."""
        return {
            "list_pages": lambda _: {"folder": weights, "keys": b"".join(self.of(weights))},
            "write_pages": lambda arguments: self.write(weights, pages, arguments),
            "read_pages": lambda arguments: self.read(weights, pages, arguments),
            "export_pages": lambda arguments: self.export_pages(weights, pages, arguments),
            "import_pages": lambda arguments: self.import_pages(weights, pages, arguments),
            "delete_pages": lambda _: self.of(weights).clear(),
        }
