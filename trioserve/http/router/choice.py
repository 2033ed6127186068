"""The choice of a server for a request, by the policy of an engine's workers.

The workers of all servers are compared, each with its own cache and load. The request goes to the
server of the best one, whose own router sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.engine.routing.policy import Policy, predicted_ttft
from trioserve.http.router.upstream import RoutedPrompt, Upstream


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
        (upstream, worker, load)
        for upstream in upstreams
        for worker, load in upstream.loads(request.prompts, request.page_size)
    ]
    if not places:
        return None
    loads = [load for _, _, load in places]
    index = 0 if len(loads) == 1 else policy.choose(loads, request.num_tokens)
    upstream, worker, load = places[index]
    most = max(each.num_cached for each in loads)
    if len(upstreams) == 1:
        reason = "sticky" if sticky else "only"
    elif most == 0:
        reason = "load"
    else:
        reason = "cached" if load.num_cached == most else "quicker"
    known = load.model.is_known
    return Choice(
        upstream=upstream,
        worker=worker,
        reason=reason,
        num_cached=load.num_cached,
        ttft=predicted_ttft(load, request.num_tokens) if known else None,
    )
