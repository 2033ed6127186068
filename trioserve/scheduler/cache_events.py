"""Events of the prefix cache: pages that are stored, moved and removed.

A page is identified by a hash: BLAKE2b with 8 bytes over the hash of the page before it (for the
first page: over that of its namespace, :func:`namespace_hash`) and its tokens as 64-bit integers,
little-endian. So a hash stands for all tokens from the start and is the same on every server.
Hashes are computed only while the feed has readers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import msgspec

from trioserve._util.feed import Feed
from trioserve.protocol.wire import TOKEN_BYTES, ints
from trioserve.scheduler.prefix_tree import Namespace, Node


class CacheEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A change of the prefix cache."""

    number: int = 0
    """Number of the event among those of all workers, the same for every reader. It counts up by
    one from the first reader on, so a gap means lost events.
    """
    worker: int = 0
    """Number of the worker whose cache has changed."""
    kind: Literal["stored", "moved", "removed", "cleared"]
    """The kind: a page was stored, moved to the host's memory or back, or removed; or the cache was
    cleared.
    """
    hash: int = 0
    """Hash of the page; 0 if the cache was cleared."""
    parent_hash: int | None = None
    """Hash of the page before a stored one; None for the first page of a prompt."""
    namespace: int | None = None
    """Hash of the namespace of a prompt's first page, when it is stored."""
    adapter: str = ""
    """Name of the adapter of that namespace; empty for none."""
    num_tokens: int = 0
    """Number of tokens in a stored page."""
    cache_level: int = 0
    """Place of a stored or moved page: 0 on the device, 1 in the host's memory."""


def adapter_word(number: int) -> str:
    """Return the second word of an adapter's namespaces, which no other namespace has."""
    return f"adapter {number}"


def namespace_hash(salt: str, adapter: str = "") -> int:
    """Return the hash of the namespace of requests with that salt, and that adapter by name.

    It doesn't show the salt.
    """
    return _digest((f"{salt}\0{adapter}" if adapter else salt).encode())


def prompt_hashes(namespace: int, tokens: Sequence[int], page_size: int) -> array[int]:
    """Return the hashes of the pages that a prompt can find in a prefix cache.

    They are one fewer than its pages if its last page is full, because the last token has to be
    computed.
    """
    hashes = array("Q")
    value = namespace
    for start in range(0, len(tokens) - page_size, page_size):
        value = page_hash(value, tokens[start : start + page_size])
        hashes.append(value)
    return hashes


def page_hash(parent_hash: int, tokens: Sequence[int]) -> int:
    """Return the hash of a page that holds ``tokens``, after the page with ``parent_hash``."""
    content = parent_hash.to_bytes(8, "little") + array("q", tokens).tobytes()
    return _digest(content)


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@attrs.define(eq=False)
class CacheEvents:
    """The events of one scheduler, made while ``feed`` has readers; they have no numbers yet."""

    feed: Feed[CacheEvent] = attrs.field(init=False)
    adapter_name: Callable[[int], str | None] = attrs.field(default=lambda number: None)
    """Function that returns the name of an adapter."""
    _hashes: dict[Node, int] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.feed = Feed(on_unwanted=self._hashes.clear)

    def on_stored(self, node: Node, *, on_host: bool = False) -> None:
        """Publish that ``node`` was added to the tree."""
        hash, parent = self.hash_of(node), node.parent
        assert parent is not None
        if hash is None:
            return
        count = len(node.tokens) // TOKEN_BYTES
        if parent.parent is not None:
            parent_hash = self.hash_of(parent)
            event = CacheEvent(
                kind="stored",
                hash=hash,
                parent_hash=parent_hash,
                num_tokens=count,
                cache_level=int(on_host),
            )
        else:
            _, adapter = self._names_of(parent.namespace) or ("", "")
            event = CacheEvent(
                kind="stored",
                hash=hash,
                num_tokens=count,
                cache_level=int(on_host),
                namespace=self._namespace_hash(parent.namespace),
                adapter=adapter,
            )
        self.feed.publish(event)

    def on_moved(self, node: Node, *, on_host: bool) -> None:
        """Publish that ``node`` moved to the host or back."""
        hash = self.hash_of(node)
        if hash is not None:
            self.feed.publish(CacheEvent(kind="moved", hash=hash, cache_level=int(on_host)))

    def on_removed(self, node: Node) -> None:
        """Publish that ``node`` was removed from the tree."""
        hash = self.hash_of(node)
        if hash is not None:
            del self._hashes[node]
            self.feed.publish(CacheEvent(kind="removed", hash=hash))

    def on_cleared(self) -> None:
        """Publish that the cache was cleared."""
        if self.feed.is_wanted:
            self._hashes.clear()
            self.feed.publish(CacheEvent(kind="cleared"))

    def hash_of(self, node: Node) -> int | None:
        """Return the hash of ``node``; None if no request can match it, or its adapter is gone."""
        path: list[Node] = []
        while node.parent is not None and node not in self._hashes:
            path.append(node)
            node = node.parent
        is_root = node.parent is None
        value = self._namespace_hash(node.namespace) if is_root else self._hashes[node]
        if value is None:
            return None
        for each in reversed(path):
            value = self._hashes[each] = page_hash(value, ints(each.tokens).tolist())
        return value

    def _namespace_hash(self, namespace: Namespace) -> int | None:
        names = self._names_of(namespace)
        return None if names is None else namespace_hash(*names)

    def _names_of(self, namespace: Namespace) -> tuple[str, str] | None:
        """Return the salt and the adapter's name of a namespace that a request can match."""
        salt, *more = map(str, namespace)
        if not more:
            return salt, ""
        first = more[0]
        number = first.removeprefix(adapter_word(0)[:-1])
        name = self.adapter_name(int(number)) if len(more) == 1 and number != first else None
        return None if name is None else (salt, name)
