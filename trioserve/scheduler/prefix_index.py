"""The prefixes that the workers of an engine have, in one tree over all of them.

The prefix caches report their pages (:class:`WorkerPages`), and the router the prompts that it has
placed and that aren't computed yet. So one look finds the longest prefix on each worker. It is
exact, because the tokens themselves are compared. The nodes are
:mod:`~trioserve.scheduler.prefix_runs`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import attrs

from trioserve.scheduler.prefix_runs import Floats, PageRun
from trioserve.scheduler.prefix_tree import FLUSHED, Namespace, Node


@attrs.define(eq=False)
class RunPath:
    """The way of a prompt through the runs."""

    runs: list[PageRun] = attrs.field(factory=list)
    """Runs that it has as a whole."""
    leaves_at: int = 0
    """Number of pages after which it leaves the next run; 0 if it isn't known to leave one."""


@attrs.define(eq=False)
class PrefixIndex:
    """The runs of all workers' prefixes, by namespace and size of a page."""

    _roots: dict[Hashable, PageRun] = attrs.field(init=False, factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if no prefix is known."""
        return not self._roots

    def root(self, namespace: Namespace, width: int) -> PageRun:
        """Return the root for pages of ``width`` bytes."""
        root = self._roots.get((namespace, width))
        if root is None:
            key = namespace, width
            root = self._roots[key] = PageRun(None, 0, width, bytearray(), key=key)
        return root

    def find(
        self, namespace: Namespace, page_size: int, tokens: bytes, held: Floats, coming: Floats
    ) -> RunPath:
        """Set the numbers of tokens of a prompt that each holder has, and that it will have.

        They are whole pages. As the last token has to be computed, it isn't among them.

        Returns:
            The way through the runs, for :meth:`add_coming`.
        """
        width = 4 * page_size
        run = self._roots.get((namespace, width))
        num_pages = (len(tokens) - 4) // width
        path = RunPath()
        depth = 0
        while run is not None and depth < num_pages:
            run = run.children.get(tokens[depth * width : (depth + 1) * width])
            if run is None:
                break
            common = min(run.common(tokens, depth * width), num_pages - depth)
            run.held.write(held, depth, common, page_size)
            if run.coming is not None:
                run.coming.write(coming, depth + common, 0, page_size)
            depth += common
            if depth < run.stop:
                path.leaves_at = depth if depth < num_pages else 0
                break
            path.runs.append(run)
        return path

    def add_coming(
        self,
        namespace: Namespace,
        page_size: int,
        tokens: bytes,
        holder: int,
        path: RunPath | None = None,
    ) -> ComingPrompt | None:
        """Note a prompt that ``holder`` will have computed; it may be too short for a page.

        ``path`` is that of :meth:`find`, if nothing has changed since.
        """
        width = 4 * page_size
        stop = len(tokens) // width * width
        if not stop:
            return None
        path = path or RunPath()
        run = self.root(namespace, width)
        for run in path.runs:
            run.add_coming(holder)
        while (begin := run.stop * width) < stop:
            child = run.children.get(tokens[begin : begin + width])
            if child is None:
                child = PageRun(run, run.stop, width, bytearray(memoryview(tokens)[begin:stop]))
                run.children[child.first] = child
            else:
                end = path.leaves_at or run.stop + child.common(tokens, begin)
                path.leaves_at = 0
                if end < child.stop:
                    child = child.split(end)
            run = child
            run.add_coming(holder)
        return ComingPrompt(self, holder, run)

    def tidy(self, run: PageRun) -> None:
        """Remove pages that no holder has any more: the last ones of ``run``, and of runs above."""
        while run.parent is not None and run.content and not run.children and run.coming is None:
            first, longest = run.first, max(run.held.numbers.values(), default=0)
            del run.content[longest * run.width :]
            if longest:
                return
            run = run.parent
            del run.children[first]
        if run.parent is None and not run.children:
            self._roots.pop(run.key, None)


@attrs.define(eq=False)
class ComingPrompt:
    """A prompt that a worker has been given, until :meth:`end`."""

    _index: PrefixIndex
    _holder: int
    _last: PageRun

    def end(self) -> None:
        """Note that it has been computed, or never will be."""
        run: PageRun | None = self._last
        while run is not None and run.coming is not None:
            run.coming[self._holder] -= 1
            if not run.coming.numbers:
                run.coming = None
            run = run.parent
        self._index.tidy(self._last)


@attrs.define(eq=False)
class WorkerPages:
    """The pages of one worker's prefix cache in the index.

    A page in the cache's tree knows the run that it was in. A split leaves the lower half in the
    old run, so the page is there or in a run above.
    """

    _index: PrefixIndex
    _all: int
    """Holder of all pages."""
    _on_device: int | None = None
    """Holder of those on the device; None if no others can be."""

    def on_added(self, node: Node, *, on_host: bool = False) -> None:
        """Note that ``node`` was added to the tree."""
        above = node.parent
        assert above is not None
        if above.parent is None:
            is_hidden = FLUSHED in above.namespace
            above.run = None if is_hidden else self._index.root(above.namespace, len(node.tokens))
        if above.run is None:
            return
        run = above.run.at(above.depth).follow(above.depth, node.tokens)
        node.run = run
        run.held[self._all] = node.depth - run.start
        if self._on_device is not None and not on_host:
            run.held[self._on_device] = node.depth - run.start

    def on_moved(self, node: Node, *, on_host: bool) -> None:
        """Note that the page of ``node`` was moved to the host or back."""
        if node.run is not None and self._on_device is not None:
            run = node.run.at(node.depth)
            run.held[self._on_device] = node.depth - run.start - on_host

    def on_removed(self, node: Node) -> None:
        """Note that ``node``, a leaf, was removed from the tree."""
        if node.run is None:
            return
        run = node.run.at(node.depth)
        left = node.depth - run.start - 1
        run.held[self._all] = left
        if self._on_device is not None and run.held[self._on_device] > left:
            run.held[self._on_device] = left
        if node.depth == run.stop:
            self._index.tidy(run)

    def forget(self, nodes: Iterable[Node]) -> None:
        """Remove all pages; ``nodes`` are all nodes of the tree."""
        runs: dict[PageRun, None] = {}
        for node in nodes:
            run, node.run = node.run, None
            while run is not None and run.parent is not None and run not in runs:
                runs[run] = None
                run.held[self._all] = 0
                if self._on_device is not None:
                    run.held[self._on_device] = 0
                run = run.parent
        for run in runs:
            self._index.tidy(run)
