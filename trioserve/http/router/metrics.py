"""The metrics of a router, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trioserve.http.router.choice import Choice
from trioserve.http.router.upstream import Upstream

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


class RouterMetrics:
    """Counts of requests and their servers; ``render`` gives them with each server's state."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "trioserve_router_requests",
            "Answers by server and status; the server is empty if none was reached",
            ["server", "status"],
            registry=registry,
        )
        self._choices = Counter(
            "trioserve_router_choices",
            "Requests by chosen server and reason",
            ["server", "reason"],
            registry=registry,
        )
        self._retries = Counter(
            "trioserve_router_retries",
            "Requests sent to another server because this one failed before its answer",
            ["server"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "trioserve_router_prompt_tokens",
            "Tokens of routed prompts",
            ["server"],
            registry=registry,
        )
        self._cached_tokens = Counter(
            "trioserve_router_cached_tokens",
            "Tokens of routed prompts that were cached on the server when it was chosen",
            ["server"],
            registry=registry,
        )
        self._predicted = Histogram(
            "trioserve_router_predicted_ttft_seconds",
            "Time to the first token as predicted at the choice",
            buckets=_SECONDS,
            registry=registry,
        )
        self._ttft = Histogram(
            "trioserve_router_ttft_seconds",
            "Time from the choice to the first bytes of the answer's body",
            buckets=_SECONDS,
            registry=registry,
        )
        self._gaps = Counter(
            "trioserve_router_feed_gaps",
            "Feeds that were opened again because changes were missing",
            ["server"],
            registry=registry,
        )
        self._snapshots = Counter(
            "trioserve_router_feed_snapshots",
            "Snapshots of a server's caches",
            ["server"],
            registry=registry,
        )
        self._up = Gauge(
            "trioserve_router_server_up",
            "1 if the server gets requests",
            ["server"],
            registry=registry,
        )
        self._pages = Gauge(
            "trioserve_router_cached_pages",
            "Pages in the server's prefix caches, as its feed tells",
            ["server"],
            registry=registry,
        )

    def watch(self, upstreams: Sequence[Upstream]) -> None:
        """Show the state of ``upstreams`` at each scrape."""
        for each in upstreams:
            self._up.labels(each.url).set_function(_up(each))
            self._pages.labels(each.url).set_function(_pages(each))

    def count_choice(self, choice: Choice, num_tokens: int) -> None:
        """Count a choice for a request with prompts of ``num_tokens``."""
        url = choice.upstream.url
        self._choices.labels(url, choice.reason).inc()
        self._prompt_tokens.labels(url).inc(num_tokens)
        self._cached_tokens.labels(url).inc(choice.num_cached)
        if choice.ttft is not None:
            self._predicted.observe(choice.ttft)

    def count_answer(self, url: str, status: int) -> None:
        """Count an answer, of the server at ``url`` or of the router itself."""
        self._requests.labels(url, str(status)).inc()

    def count_first_bytes(self, seconds: float) -> None:
        """Count the time to the first bytes of an answer."""
        self._ttft.observe(seconds)

    def count_retry(self, url: str) -> None:
        """Count a request that is sent to another server than that at ``url``."""
        self._retries.labels(url).inc()

    def count_gap(self, url: str) -> None:
        """Count a gap in the feed of the server at ``url``."""
        self._gaps.labels(url).inc()

    def count_snapshot(self, url: str) -> None:
        """Count a snapshot of the server at ``url``."""
        self._snapshots.labels(url).inc()

    def render(self) -> bytes:
        """Return all metrics."""
        return prometheus_client.generate_latest(self._registry)


def _up(upstream: Upstream) -> Callable[[], float]:
    return lambda: float(upstream.is_up)


def _pages(upstream: Upstream) -> Callable[[], float]:
    return lambda: float(sum(map(len, upstream.copied.pages.values())))
