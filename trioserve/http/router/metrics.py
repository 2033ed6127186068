"""The metrics of a router, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trioserve.http.router.choice import Choice
from trioserve.http.router.upstream import Upstream

_PREFIX = "trioserve_router_"
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


class RouterMetrics:
    """Counts of requests and their servers; ``render`` gives them with each server's state."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "requests",
            "Answers by server and status; the server is empty if none was reached",
            "server",
            "status",
        )
        self._choices = self._counter(
            "choices", "Requests by chosen server and reason", "server", "reason"
        )
        self._retries = self._counter(
            "retries",
            "Requests that another server got because this one gave no answer",
            "server",
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of routed prompts", "server")
        self._cached_tokens = self._counter(
            "cached_tokens",
            "Tokens of routed prompts that were cached on the server when it was chosen",
            "server",
        )
        self._gaps = self._counter(
            "feed_gaps", "Feeds that were opened again because changes were missing", "server"
        )
        self._snapshots = self._counter(
            "feed_snapshots", "Snapshots of a server's caches", "server"
        )
        self._predicted = self._histogram(
            "predicted_ttft_seconds", "Time to the first token as predicted at the choice"
        )
        self._ttft = self._histogram(
            "ttft_seconds", "Time from the request to the first bytes of the answer's body"
        )
        self._up = self._gauge("server_up", "1 if the server gets requests")
        self._pages = self._gauge(
            "cached_pages", "Pages in the server's prefix caches, as its feed tells"
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(_PREFIX + name, about, buckets=_SECONDS, registry=self._registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(_PREFIX + name, about, ["server"], registry=self._registry)

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
