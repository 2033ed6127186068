"""Events of the prefix cache: pages that are stored, moved and removed.

A page is identified by a hash: BLAKE2b with 8 bytes over the hash of the page before it (for the
first page: over its namespace) and its tokens as 64-bit integers, little-endian. So a hash stands
for all tokens from the start and is the same in every process. Hashes are computed only while the
feed has readers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Literal, cast

import attrs
import msgspec

from trioserve._util.feed import Feed
from trioserve.scheduler.prefix_tree import FLUSHED, Node


class CacheEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A change of the prefix cache."""

    number: int
    """Number of the event. It counts up by one from the first reader on."""
    kind: Literal["stored", "moved", "removed", "cleared"]
    """The kind: a page was stored, moved to the host's memory or back, or removed; or the cache was
    cleared.
    """
    hash: int = 0
    """Hash of the page; 0 if the cache was cleared."""
    parent_hash: int | None = None
    """Hash of the page before a stored one; None for the first page of a prompt."""
    num_tokens: int = 0
    """Number of tokens in a stored page."""
    cache_level: int = 0
    """Place of a stored or moved page: 0 on the device, 1 in the host's memory."""


def page_hash(parent_hash: int, tokens: Sequence[int]) -> int:
    """Return the hash of a page that holds ``tokens``, after the page with ``parent_hash``."""
    content = parent_hash.to_bytes(8, "little") + array("q", tokens).tobytes()
    return _digest(content)


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@attrs.define(eq=False)
class CacheEvents:
    """The events of one scheduler, made while ``feed`` has readers."""

    feed: Feed[CacheEvent] = attrs.field(init=False)
    _hashes: dict[Node, int] = attrs.field(init=False, factory=dict)
    _number: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.feed = Feed(on_unwanted=self._hashes.clear)

    def on_stored(self, node: Node) -> None:
        """Publish that ``node`` was added to the tree."""
        assert node.parent is not None
        hash = self._hash_of(node)
        if hash is not None:
            is_first = node.parent.parent is None
            self._publish(
                CacheEvent(
                    number=self._number,
                    kind="stored",
                    hash=hash,
                    parent_hash=None if is_first else self._hash_of(node.parent),
                    num_tokens=len(node.key),
                )
            )

    def on_moved(self, node: Node, *, on_host: bool) -> None:
        """Publish that ``node`` moved to the host or back."""
        hash = self._hash_of(node)
        if hash is not None:
            event = CacheEvent(
                number=self._number, kind="moved", hash=hash, cache_level=int(on_host)
            )
            self._publish(event)

    def on_removed(self, node: Node) -> None:
        """Publish that ``node`` was removed from the tree."""
        hash = self._hash_of(node)
        if hash is not None:
            del self._hashes[node]
            self._publish(CacheEvent(number=self._number, kind="removed", hash=hash))

    def on_cleared(self) -> None:
        """Publish that the cache was cleared."""
        if self.feed.is_wanted:
            self._hashes.clear()
            self._publish(CacheEvent(number=self._number, kind="cleared"))

    def _publish(self, event: CacheEvent) -> None:
        self._number += 1
        self.feed.publish(event)

    def _hash_of(self, node: Node) -> int | None:
        """Return the hash of ``node``; None if it was cleared."""
        path: list[Node] = []
        while node.parent is not None and node not in self._hashes:
            path.append(node)
            node = node.parent
        if node.parent is None:
            if FLUSHED in node.key:
                return None
            value = _digest("\0".join(map(str, node.key)).encode())
        else:
            value = self._hashes[node]
        for each in reversed(path):
            value = self._hashes[each] = page_hash(value, cast(tuple[int, ...], each.key))
        return value
