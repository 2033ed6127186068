"""One server behind the router: its caches, its loads, and the requests that were sent to it."""

from __future__ import annotations

import bisect
import ssl
from collections import Counter, defaultdict
from collections.abc import Sequence

import attrs
import httpcore2
import trio

from trioserve.engine.cache_copy import CacheCopy
from trioserve.engine.routing.policy import WorkerLoad
from trioserve.http.router.connections import UpstreamConnections
from trioserve.load.connect import Address
from trioserve.scheduler.step_time import StepTimeModel

SETTLE = 0.1
"""Seconds after which a server's report counts a request that was sent to it, at the latest."""


@attrs.frozen(kw_only=True)
class RoutedPrompt:
    """A prompt of a request: its tokens, and the hashes of the pages that it can find."""

    num_tokens: int
    hashes: Sequence[int] = ()


@attrs.frozen(kw_only=True)
class RoutedWorker:
    """A worker of an upstream, as it matters for one request."""

    worker: int
    """Its number."""
    load: WorkerLoad
    cached: int
    """Tokens of the prompts in its cache, or on their way there."""
    on_host: int
    """Tokens behind those in the host's memory."""
    itl_target: float | None
    """Target for the gap between two tokens, in seconds."""

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts that needn't be computed."""
        return self.cached + self.on_host


@attrs.define(eq=False, kw_only=True)
class SentRequest:
    """A request on its way through one worker of an upstream."""

    worker: int
    prompts: Sequence[RoutedPrompt]
    num_computed: int
    """Tokens of its prompts that weren't cached."""
    counted_from: float
    """Time from which the upstream's reports count it."""


@attrs.define(eq=False)
class Upstream:
    """A server: what its feed tells of it, and the requests that the feed doesn't show yet.

    Args:
        address: Its address.
        connections: Connections to it.
    """

    address: Address
    connections: UpstreamConnections
    models: frozenset[str] = attrs.field(init=False, default=frozenset())
    """Names that requests may give."""
    page_size: int = attrs.field(init=False, default=0)
    """Tokens of a page."""
    copied: CacheCopy = attrs.field(init=False, factory=CacheCopy)
    """Its caches and loads."""
    out_because: str = attrs.field(init=False, default="its feed hasn't been read yet")
    """Why it gets no requests; empty while it does."""
    _sent: dict[SentRequest, None] = attrs.field(init=False, factory=dict)
    """Requests that its reports may not count yet."""
    _computing: dict[SentRequest, None] = attrs.field(init=False, factory=dict)
    """Requests whose prompts' pages aren't all cached yet."""
    _coming: defaultdict[int, Counter[int]] = attrs.field(
        init=False, factory=lambda: defaultdict(Counter)
    )
    """Hashes of pages that requests sent to it will bring, by worker."""
    _assumed: dict[int, StepTimeModel] = attrs.field(init=False, factory=dict)
    """Times of steps in place of those that workers have learned."""

    @property
    def url(self) -> str:
        """Its URL."""
        return self.address.url

    @property
    def is_up(self) -> bool:
        """True while it gets requests."""
        return not self.out_because and any(each.serves for each in self.copied.loads.values())

    def note_report(self) -> None:
        """Forget requests that the newest report counts, and pages that are cached now."""
        now = trio.current_time()
        for each in [each for each in self._sent if each.counted_from < now]:
            del self._sent[each]
        for each in [each for each in self._computing if self._has_pages_of(each)]:
            self._forget_coming(each)

    def _has_pages_of(self, sent: SentRequest) -> bool:
        """Return whether a worker has all pages of each prompt; it may not be the expected one."""
        every = self.copied.pages.values()
        last = [each.hashes[-1] for each in sent.prompts if each.hashes]
        return all(any(hash in pages for pages in every) for hash in last)

    def workers(self, prompts: Sequence[RoutedPrompt], page_size: int) -> list[RoutedWorker]:
        """Return each worker that serves, as it matters for a request.

        Args:
            prompts: The prompts of the request.
            page_size: Tokens of a page, by which their hashes were made.
        """
        return [
            self._worker(worker, prompts, page_size)
            for worker, report in self.copied.loads.items()
            if report.serves
        ]

    def _worker(self, worker: int, prompts: Sequence[RoutedPrompt], page_size: int) -> RoutedWorker:
        cached = on_host = 0
        if page_size == self.page_size:
            for prompt in prompts:
                device, host = self._cached(worker, prompt.hashes)
                cached += device * page_size
                on_host += host * page_size
        own = [each for each in self._sent if each.worker == worker]
        report = self.copied.loads[worker]
        return RoutedWorker(
            worker=worker,
            load=report.load(
                prompt_tokens=sum(each.num_computed for each in own),
                num=len(own),
                like=self._assumed.get(worker),
            ),
            cached=cached,
            on_host=on_host,
            itl_target=report.itl_target,
        )

    def _cached(self, worker: int, hashes: Sequence[int]) -> tuple[int, int]:
        """Return the pages of a prompt on a worker's device, and on its host behind those.

        Pages that another prompt will bring count as if they were on the device.
        """
        device, host = self.copied.num_cached(worker, hashes)
        coming = self._coming.get(worker, ())
        reached = bisect.bisect_left(hashes, True, key=lambda hash: hash not in coming)
        return (reached, 0) if reached > device + host else (device, host)

    def send(self, worker: int, prompts: Sequence[RoutedPrompt], num_cached: int) -> SentRequest:
        """Note that a request goes to a worker, which had that many of its tokens."""
        num_tokens = sum(each.num_tokens for each in prompts)
        sent = SentRequest(
            worker=worker,
            prompts=prompts,
            num_computed=max(num_tokens - num_cached, 1),
            counted_from=trio.current_time() + SETTLE,
        )
        self._sent[sent] = self._computing[sent] = None
        self._assumed.pop(worker, None)
        coming = self._coming[worker]
        for prompt in prompts:
            coming.update(prompt.hashes)
        return sent

    def assume(self, worker: int, times: StepTimeModel) -> None:
        """Take a worker's steps to be of these ``times``, until it gets a request."""
        self._assumed[worker] = times

    def note_answer(self, sent: SentRequest) -> None:
        """Note that the answer has begun, so that the server has taken the request in."""
        sent.counted_from = min(sent.counted_from, trio.current_time())

    def note_end(self, sent: SentRequest) -> None:
        """Note that nothing of the request is left. Idempotent."""
        self._sent.pop(sent, None)
        if sent in self._computing:
            self._forget_coming(sent)

    def _forget_coming(self, sent: SentRequest) -> None:
        del self._computing[sent]
        coming = self._coming[sent.worker]
        for prompt in sent.prompts:
            for hash in prompt.hashes:
                coming[hash] -= 1
                if not coming[hash]:
                    del coming[hash]


def open_upstream(address: Address, context: ssl.SSLContext | None) -> Upstream:
    """Return an upstream without connections so far."""
    scheme = b"https" if address.tls else b"http"
    origin = httpcore2.Origin(scheme, address.host.encode(), address.port)
    return Upstream(address, UpstreamConnections(origin, context))
