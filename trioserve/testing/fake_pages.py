"""The page pool of a worker without a model: tokens in place of keys and values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve.protocol.wire import OpenSlot, ints
from trioserve.requests.embedded import FIRST_CONTENT_ID
from trioserve.testing.fake_model import EMBEDDING_WIDTH, KV_SHAPE, digests_of, embedded_token

Content = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]
"""Tokens and digests of a page."""
Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


class FakePages:
    """Pages that hold tokens, each with a digest of all tokens before it.

    Args:
        num_pages: Pages on the device, which have the first numbers.
        num_host_pages: Pages on the host.
        page_size: Tokens in a page.
    """

    def __init__(self, num_pages: int, num_host_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        size = (num_pages + num_host_pages) * page_size
        self._tokens = np.full(size, -1, dtype=np.int32)
        """[all pages * page_size]: token at each place, -1 for none."""
        self._digests = np.zeros(size, dtype=np.uint64)
        """[all pages * page_size]: digest of each place's token and all tokens before it."""

        self._left: set[int] = set()
        """Places on the host whose content was copied back."""

    def places(self, pages: list[int], length: int) -> Places:
        """Return the places of the first ``length`` tokens of a sequence with these pages."""
        position = np.arange(length)
        numbers = np.array(pages)[position // self._page_size]
        return numbers * self._page_size + position % self._page_size

    def copy(self, copies: Ints) -> None:
        """Copy pages; clear the source of a copy to the host, and leave that of one from it.

        A place that was left may still be written elsewhere, but is copied from no more.
        """
        for source, destination in copies.tolist():
            from_device, to_device = source < self._num_pages, destination < self._num_pages
            assert from_device or to_device, "a copy within the host"
            assert source not in self._left, "content is copied that has left the host"
            for column in (self._tokens, self._digests):
                pages = self._pages(column)
                pages[destination] = pages[source]
            self._left.discard(destination)
            if not from_device:
                self._left.add(source)
            elif not to_device:
                self._pages(self._tokens)[source] = -1

    def of_page(self, page: int) -> Content:
        """Return a copy of the content of ``page``, a full one on the device or the host."""
        content = self._pages(self._tokens)[page].copy(), self._pages(self._digests)[page].copy()
        assert (content[0] >= 0).all(), f"page {page} holds nothing to write elsewhere"
        return content

    def fill(self, place: int, content: Content) -> None:
        """Write ``content`` to ``place``."""
        self._pages(self._tokens)[place], self._pages(self._digests)[place] = content
        self._left.discard(place)

    def _pages(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column.reshape(-1, self._page_size)

    def tokens_of(self, opened: OpenSlot, origin: np.uint64) -> list[int]:
        """Return the tokens of a sequence that begins, with those that stand for embeddings.

        Keys and values that it brings are written; ``origin`` is its initial digest.
        """
        tokens = ints(opened.tokens).copy()
        for each in opened.embeddings:
            found = [embedded_token(row) for row in each.numbers(EMBEDDING_WIDTH)]
            tokens[each.start : each.start + len(found)] = found
        for each in opened.prefix:
            found = [embedded_token(row) for row in each.numbers(2 * math.prod(KV_SHAPE))]
            stop = each.start + len(found)
            self.write(found, self.places(ints(opened.pages).tolist(), stop), origin)
        places = self.places(ints(opened.pages).tolist(), opened.computed)
        cached = self._tokens[places]
        own = tokens[: opened.computed]
        tokens[: opened.computed] = np.where(cached >= FIRST_CONTENT_ID, cached, own)
        whole: list[int] = tokens.tolist()
        return whole

    def check_begun(self, pages: list[int], computed: int, own: set[int]) -> None:
        """Assert that a page that a new sequence shares is full.

        Others are its ``own``: copies, or those of its slot before.
        """
        place, rest = divmod(computed, self._page_size)
        assert not rest or pages[place] in own, "a part of a page is shared"

    def forget(self, places: Places) -> None:
        """Clear the places: write a token that no sequence has."""
        self._tokens[places] = -1

    def write(self, tokens: list[int], places: Places, origin: np.uint64) -> None:
        """Write ``tokens``, the last ones of a sequence, with their digests.

        ``places`` are those of all tokens of the sequence; ``origin`` is its initial digest.
        """
        start = len(places) - len(tokens)
        before = self._digests[places[start - 1]] if start else origin
        column = np.array(tokens, dtype=np.int32)
        self._tokens[places[start:]] = column
        self._digests[places[start:]] = before + digests_of(column, start)

    def read(self, places: Places, origin: np.uint64) -> list[int]:
        """Return the tokens of a sequence from its pages, and assert that the digests match."""
        tokens = self._tokens[places]
        assert np.array_equal(self._digests[places], origin + digests_of(tokens, 0)), (
            "a page was computed with another prefix, other weights or another adapter"
        )
        context: list[int] = tokens.tolist()
        return context
