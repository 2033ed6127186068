"""Runs: the nodes of the tree over the prefixes of all workers.

A run holds the tokens of as many pages as have no branch between them: a conversation, or the
instructions that many have in common. It is split where a new prompt leaves it. Each worker holds a
number of its pages from the start, since a cached page has all pages before it. So a page that
comes or goes changes one number.
"""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
WIDE = 16
"""Holders of a run from which their numbers are kept as a column, too."""


@attrs.define(eq=False)
class Holders:
    """Numbers by holder: of the first pages of a run that it has, or of its prompts."""

    numbers: dict[int, int] = attrs.field(factory=dict)
    _column: Floats | None = attrs.field(init=False, default=None)
    """The numbers of all holders up to the last one, once there are many."""

    def __setitem__(self, holder: int, number: int) -> None:
        """Set the number of ``holder``; 0 removes it."""
        if number:
            self.numbers[holder] = number
        else:
            self.numbers.pop(holder, None)
        if self._column is not None:
            if holder < len(self._column):
                self._column[holder] = number
            else:
                self._column = None

    def __getitem__(self, holder: int) -> int:
        return self.numbers.get(holder, 0)

    def write(self, found: Floats, start: int, most: int, page_size: int) -> None:
        """Set ``found`` of each holder to the tokens of ``start`` pages and of its own number.

        Of that, at most ``most`` count.
        """
        if len(self.numbers) < WIDE:
            for holder, number in self.numbers.items():
                found[holder] = (start + (number if number < most else most)) * page_size
            return
        if self._column is None:
            self._column = np.zeros(max(self.numbers) + 1)
            self._column[list(self.numbers)] = list(self.numbers.values())
        tokens = (start + np.minimum(self._column, most)) * page_size
        np.putmask(found[: len(tokens)], self._column > 0, tokens)


@attrs.define(eq=False)
class PageRun:
    """Pages that follow one another; the root of a namespace has none."""

    parent: PageRun | None = attrs.field(repr=False)
    start: int
    """Number of pages before it."""
    width: int
    """Bytes of a page."""
    content: bytearray
    """Tokens as on the wire."""
    key: Hashable = None
    """Key of a root in the index."""
    children: dict[bytes, PageRun] = attrs.field(init=False, factory=dict, repr=False)
    """Runs that follow, by their first page."""
    held: Holders = attrs.field(init=False, factory=Holders)
    """Pages that each holder has; a holder of a child has all."""
    coming: Holders | None = attrs.field(init=False, default=None)
    """Prompts of each holder that contain the whole run and aren't computed yet."""

    @property
    def first(self) -> bytes:
        """The first page."""
        return bytes(self.content[: self.width])

    @property
    def stop(self) -> int:
        """Number of pages up to its end."""
        return self.start + len(self.content) // self.width

    def common(self, tokens: bytes, at: int) -> int:
        """Return the number of pages that the run has in common with ``tokens`` from ``at`` on."""
        if tokens.startswith(self.content, at):
            return len(self.content) // self.width
        low, high = 1, min(len(self.content), len(tokens) - at) // self.width
        while low < high:
            middle = (low + high + 1) // 2
            begin, end = low * self.width, middle * self.width
            if self.content[begin:end] == tokens[at + begin : at + end]:
                low = middle
            else:
                high = middle - 1
        return low

    def add_coming(self, holder: int) -> None:
        """Count a prompt of ``holder`` that contains the whole run."""
        if self.coming is None:
            self.coming = Holders()
        self.coming[holder] += 1

    def at(self, depth: int) -> PageRun:
        """Return the run of page ``depth``, counted from 1, which is in this one or above."""
        run = self
        while run.start >= depth and run.parent is not None:
            run = run.parent
        return run

    def split(self, depth: int) -> PageRun:
        """Move the pages up to ``depth`` to a new run above; return that."""
        assert self.parent is not None
        count = depth - self.start
        upper = PageRun(self.parent, self.start, self.width, self.content[: count * self.width])
        self.parent.children[upper.first] = upper
        del self.content[: count * self.width]
        self.parent, self.start = upper, depth
        upper.children[self.first] = self
        held = self.held.numbers
        upper.held = Holders({each: min(pages, count) for each, pages in held.items()})
        self.held = Holders({each: pages - count for each, pages in held.items() if pages > count})
        upper.coming = self.coming and Holders(dict(self.coming.numbers))
        return upper

    def follow(self, depth: int, page: bytes) -> PageRun:
        """Return the run of the page ``page`` behind ``depth`` pages, which end in or at this one.

        It is made if necessary.
        """
        run, offset = self, (depth - self.start) * self.width
        if offset < len(self.content):
            if self.content[offset : offset + self.width] == page:
                return self
            run = self.split(depth)
        child = run.children.get(page)
        if child is None:
            if run.parent is not None and not run.children and run.coming is None:
                run.content += page
                return run
            child = run.children[page] = PageRun(run, depth, self.width, bytearray(page))
        return child
