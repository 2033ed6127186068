"""The invariants of the prefix cache."""

from __future__ import annotations

from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import NO_PAGE


def check_prefix_cache(cache: PrefixCache) -> None:
    """Assert that the tree and the pool agree, and rule 4 of the prefix cache."""
    pool = cache.pool
    seen: set[int] = set()
    stack = list(cache.roots())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if node.parent is None:
            assert node.children, "an empty root was left behind"
            continue
        assert node.page not in seen, f"page {node.page} is published twice"
        seen.add(node.page)
        assert cache.has(node)
        if pool.is_on_host(node.page):
            assert node.page in pool.host, f"nothing is stored in place {node.page}"
            continue
        assert pool.is_kept(node.page), f"published page {node.page} is not kept"
        assert not pool.is_on_host(node.parent.page), "a page's parent is on the host"
        if node.parent.page != NO_PAGE:
            mine, parents = pool.holders(node.page), pool.holders(node.parent.page)
            assert parents >= mine, f"page {node.page} is held without its parent"
    nodes = cache.nodes()
    assert len(nodes) == len(seen), "a page is in the tree and can't be reached"
    assert seen == pool.kept() | pool.host.stored(), "a page is kept that isn't published"
    cache.priorities.check(nodes)
