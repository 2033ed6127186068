"""Admission to the queue: limits, refusals, and the time to try again.

Waiting sequences and their tokens are limited. The limits cover queued requests and requests still
being tokenized. Until a prompt is tokenized, its lower bound counts; then its true number does, and
the request is refused if that exceeds the limit. A request in front of an empty queue is never
refused, however large it is.

Each output of a request counts with the whole prompt, as the scheduler counts it. A tenant's
requests may take half of the room in the queue that other tenants leave. The characters of all open
prompts together have a limit of their own.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from typing import Protocol

import attrs
import trio

from trioserve.protocol.errors import QueueFull
from trioserve.requests.prompt_size import characters_of
from trioserve.requests.request import Request
from trioserve.requests.tenants import TenantCounts, excess

DEFAULT_MAX_TOKENS = 2 << 20
MAX_CHARACTERS = 256 << 20
"""Characters of all open prompts together. A text stays in memory until its request has ended, and
one that is to be cut may be as long as a body of HTTP."""

WINDOW_SECONDS = 30.0
"""Time over which departures are averaged."""
_SAMPLE_SECONDS = 1.0
MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60


class QueueLoad(Protocol):
    """The queue's load, as the :class:`~trioserve.scheduler.scheduler.Scheduler` counts it."""

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for a slot."""

    @property
    def num_waiting_tokens(self) -> int:
        """The tokens of waiting sequences, prompt and output so far."""

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return the numbers of waiting sequences of ``tenant``, and of their tokens."""


def seconds_until_room(num_to_leave: float, num_left: int, seconds: float) -> int:
    """Return after how many whole seconds, 1 to 60, a client should try again.

    Args:
        num_to_leave: sequences that have to leave the queue until there is room.
        num_left: sequences that have left it.
        seconds: the time within which they did.
    """
    # If no sequence has left, the first one is expected right now.
    estimate = math.ceil(num_to_leave * seconds / max(num_left, 1))
    return min(max(estimate, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


def check_share(
    own: tuple[int, int],
    new: tuple[int, int],
    waiting: tuple[int, int],
    limits: tuple[int, int],
    recently: tuple[int, float],
) -> None:
    """Refuse what exceeds a tenant's share of the queue.

    Args:
        own: the tenant's waiting sequences, and their tokens.
        new: the sequences and tokens that are to be added.
        waiting: the waiting sequences and tokens of all tenants.
        limits: the limits of the queue.
        recently: the result of :meth:`Departures.note`.

    Raises:
        QueueFull: they exceed it.
    """
    past, past_tokens = map(excess, own, new, map(operator.sub, waiting, own), limits)
    if past > 0 or past_tokens > 0:
        option = "--max-num-queued-reqs" if past > 0 else "--max-num-queued-tokens"
        to_leave = max(past, past_tokens * own[0] / max(own[1], 1))
        raise QueueFull(
            f"{own[0]} requests with this key are waiting, with {own[1]} tokens; a key may take "
            f"half of the room in the queue that other keys leave ({option})",
            retry_after=seconds_until_room(min(to_leave, own[0]), *recently),
        )


class Departures:
    """The number of sequences that left the queue within the last half minute, or a little more.

    It is updated and read whenever a request comes, and never polls.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, total: int, now: float) -> tuple[int, float]:
        """Note that ``total`` have left so far; return how many did recently, and in what time."""
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()
        if samples and samples[0][0] < now - 2 * WINDOW_SECONDS:
            samples.popleft()
        if not samples or samples[-1][0] <= now - _SAMPLE_SECONDS:
            samples.append((now, total))
        since, before = samples[0]
        return max(total - before, 0), now - since


@attrs.define(eq=False, kw_only=True)
class Admission:
    """Counts requests on their way into the queue, and refuses those that exceed a limit.

    All its methods run on trio's thread, and none waits.
    """

    queue: QueueLoad
    max_requests: int
    max_tokens: int
    num_entering: int = 0
    """Outputs of requests that are on their way into the queue."""
    num_entering_tokens: int = 0
    num_characters: int = 0
    """Characters of the prompts of all open requests."""
    _entering_of_tenants: TenantCounts = attrs.field(factory=TenantCounts)
    _held_of_tenants: TenantCounts = attrs.field(factory=TenantCounts)
    """Open requests, and the characters of their prompts."""
    _tokens: dict[Request, int] = attrs.field(factory=dict)
    """The tokens that count for each request on its way."""
    _characters: dict[Request, int] = attrs.field(factory=dict)
    _num_entered: int = 0
    _departures: Departures = attrs.field(factory=Departures)

    def enter(self, request: Request, now: float) -> None:
        """Count ``request`` until it is admitted or rejected, and its prompt until it has ended.

        Raises:
            QueueFull: there is no room for it.
        """
        num_sequences = len(request.sequences)
        num_tokens = request.fewest_tokens * num_sequences
        characters = characters_of(request.prompt)
        if self.num_characters and self.num_characters + characters > MAX_CHARACTERS:
            raise QueueFull(
                f"the prompts of open requests have {self.num_characters} characters, and this one "
                f"has {characters}; at most {MAX_CHARACTERS} are held"
            )
        own = self._held_of_tenants.of(request.tenant)[1]
        if excess(own, characters, self.num_characters - own, MAX_CHARACTERS) > 0:
            raise QueueFull(
                f"the prompts of this key's open requests have {own} characters, and this one has "
                f"{characters}; a key may have half of those that other keys leave"
            )
        self._check(request.tenant, num_sequences, num_tokens, now)
        self._count(request, 1, num_tokens)
        self.num_characters += characters
        self._held_of_tenants.add(request.tenant, 1, characters)
        self._tokens[request] = num_tokens
        self._characters[request] = characters
        request.on_tokenized = lambda: self._on_tokenized(request)
        # The caller's task wakes up later; until then the request would count twice, here and in
        # the queue.
        request.on_admitted = lambda: self._on_admitted(request)

    def check_room(self, tenant: str = "") -> None:
        """Refuse a request of ``tenant`` if there is no room for even the smallest.

        Raises:
            QueueFull: there is none.
        """
        self._check(tenant, 1, 1, trio.current_time())

    def forget(self, request: Request) -> None:
        """Stop counting the prompt of ``request``, which has ended."""
        characters = self._characters.pop(request)
        self.num_characters -= characters
        self._held_of_tenants.add(request.tenant, -1, -characters)

    def check_integrity(self) -> None:
        """Assert that the counts are those of the requests that it knows."""
        assert self.num_entering == sum(len(request.sequences) for request in self._tokens)
        assert self.num_entering_tokens == sum(self._tokens.values())
        tenants = TenantCounts()
        for request, tokens in self._tokens.items():
            tenants.add(request.tenant, len(request.sequences), tokens)
        assert self._entering_of_tenants == tenants
        held = TenantCounts()
        for request, characters in self._characters.items():
            held.add(request.tenant, 1, characters)
        assert self._held_of_tenants == held
        assert self.num_characters == sum(self._characters.values())
        assert self._tokens.keys() <= self._characters.keys()

    def _on_tokenized(self, request: Request) -> None:
        """Count the true number of tokens of ``request``, now that its prompt is tokenized.

        Raises:
            QueueFull: The queue has no room for ``request``'s tokens.
        """
        num_sequences = len(request.sequences)
        num_tokens = len(request.prompt_ids) * num_sequences
        self._count(request, -1, -self._tokens[request])
        self._tokens[request] = 0
        try:
            self._check(request.tenant, num_sequences, num_tokens, trio.current_time())
            self._tokens[request] = num_tokens
        finally:
            self._count(request, 1, self._tokens[request])

    def _on_admitted(self, request: Request) -> None:
        """Stop counting ``request``: it is in the queue now, or was rejected."""
        self._count(request, -1, -self._tokens.pop(request))
        if request.rejection is None:
            self._num_entered += len(request.sequences)

    def _count(self, request: Request, sign: int, num_tokens: int) -> None:
        """Add or subtract (``sign``) the sequences of ``request``, and add ``num_tokens``."""
        num_sequences = sign * len(request.sequences)
        self.num_entering += num_sequences
        self.num_entering_tokens += num_tokens
        self._entering_of_tenants.add(request.tenant, num_sequences, num_tokens)

    def _check(self, tenant: str, num_sequences: int, num_tokens: int, now: float) -> None:
        # Each of the queue's numbers is a sum over all workers.
        num_waiting = self.queue.num_waiting
        waiting = self.num_entering + num_waiting
        tokens = self.num_entering_tokens + self.queue.num_waiting_tokens
        recently = self._departures.note(self._num_entered - num_waiting, now)
        too_many = waiting + num_sequences - self.max_requests
        if too_many > 0:
            outputs = f", and this one has {num_sequences} outputs" if num_sequences > 1 else ""
            raise QueueFull(
                f"{waiting} requests are waiting; the limit is {self.max_requests} "
                f"(--max-num-queued-reqs){outputs}",
                retry_after=seconds_until_room(too_many, *recently),
            )
        too_large = tokens + num_tokens - self.max_tokens
        if too_large > 0 and waiting > 0:
            to_leave = min(too_large / max(tokens / waiting, 1), waiting)
            raise QueueFull(
                f"{waiting} requests with {tokens} tokens are waiting, and this one has "
                f"{num_tokens}; the limit is {self.max_tokens} (--max-num-queued-tokens)",
                retry_after=seconds_until_room(to_leave, *recently),
            )
        if not tenant:
            return
        own = map(operator.add, self._entering_of_tenants.of(tenant), self.queue.waiting_of(tenant))
        check_share(
            tuple(own),
            (num_sequences, num_tokens),
            (waiting, tokens),
            (self.max_requests, self.max_tokens),
            recently,
        )
