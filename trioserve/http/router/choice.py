"""The choice of a server for a request, by the policy of an engine's workers.

The workers of all servers are compared, each with its own cache and load. The request goes to the
server of the best one, whose own router sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trioserve.engine.routing.policy import KnownPrefix, Loads, Policy
from trioserve.http.router.upstream import RoutedPrompt, RoutedWorker, Upstream


@attrs.frozen(kw_only=True)
class Choice:
    """A server for a request, and why."""

    upstream: Upstream
    worker: int
    reason: str
    """``only``: no other one is there. ``sticky``: it has the session. ``cached``: none has more
    of the prompt. ``quicker``: one that has more would take longer. ``load``: none has any of it.
    """
    num_cached: int = 0
    """Tokens of the prompts that its cache has, or will have."""
    ttft: float | None = None
    """Predicted seconds to the first token; None if nothing is known of its steps."""


@attrs.frozen(kw_only=True)
class RoutedRequest:
    """A request, as far as the choice depends on it."""

    prompts: Sequence[RoutedPrompt]
    page_size: int = 0
    """Tokens of a page, by which hashes were made; 0 without hashes."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(each.num_tokens for each in self.prompts)


def choose(
    policy: Policy, upstreams: Sequence[Upstream], request: RoutedRequest, *, sticky: bool = False
) -> Choice | None:
    """Return the choice among ``upstreams``; None if none of their workers serves.

    Args:
        policy: The policy.
        upstreams: The servers that may be chosen.
        request: The request.
        sticky: True if the only one is that which has the request's session.
    """
    places = [
        (upstream, worker)
        for upstream in upstreams
        for worker in upstream.workers(request.prompts, request.page_size)
    ]
    if not places:
        return None
    workers = [worker for _, worker in places]
    loads = Loads.of([each.load for each in workers], workers[0].itl_target)
    num_tokens = max(request.num_tokens, 1)
    prefix = _prefix_of(workers, num_tokens)
    index = 0 if len(workers) == 1 else policy.choose(loads, num_tokens, prefix)
    upstream, worker = places[index]
    most = max(each.num_cached for each in workers)
    if len(upstreams) == 1:
        reason = "sticky" if sticky else "only"
    elif most == 0:
        reason = "load"
    else:
        reason = "cached" if worker.num_cached == most else "quicker"
    known = worker.load.model.is_known
    return Choice(
        upstream=upstream,
        worker=worker.worker,
        reason=reason,
        num_cached=worker.num_cached,
        ttft=float(loads.ttfts(num_tokens, prefix)[index]) if known else None,
    )


def _prefix_of(workers: Sequence[RoutedWorker], num_tokens: int) -> KnownPrefix:
    """Return what the workers have; the last token is computed in any case."""
    known = np.minimum([each.num_cached for each in workers], num_tokens - 1.0)
    cached = np.minimum([each.cached for each in workers], known)
    return KnownPrefix(cached=cached, on_host=known - cached)
