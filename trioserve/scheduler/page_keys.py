"""The keys of pages outside a worker's memory: on disk, or on their way to another worker.

A key is a hash of the tokens from the prompt's start to the page's end, and of the namespace. What
else a page's content depends on, such as the weights, the workers know
(:mod:`gpu.loading.page_transfers`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from trioserve.protocol.wire import ints
from trioserve.requests.embedded import FIRST_CONTENT_ID
from trioserve.scheduler.prefix_tree import Namespace, Node

KEY_BYTES = 16
_SALT = os.urandom(16)
"""Part of the keys of pages with embeddings, whose ids mean the same in this process only."""


def key_of(node: Node) -> bytes:
    """Return the key of a page of the prefix tree."""
    unknown: list[Node] = []
    key: bytes | None = None
    while node.parent is not None and key is None:
        key = node.key_outside
        if key is None:
            unknown.append(node)
            node = node.parent
    if key is None:
        key = _root_key(node.namespace)
    for each in reversed(unknown):
        key = each.key_outside = _next_key(key, each.tokens)
    return key


def keys_after(
    namespace: Namespace, last: Node | None, pages: Iterator[bytes]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and tokens of the pages that follow ``last``; None stands for the root.

    ``pages`` are the tokens of each page, as on the wire.
    """
    key = _root_key(namespace) if last is None else key_of(last)
    for tokens in pages:
        key = _next_key(key, tokens)
        yield key, tokens


def _root_key(namespace: Namespace) -> bytes:
    return _hash("\0".join(map(str, namespace)).encode())


def _next_key(parent: bytes, tokens: bytes) -> bytes:
    salt = _SALT if ints(tokens).max() >= FIRST_CONTENT_ID else b""
    return _hash(parent + tokens + salt)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
