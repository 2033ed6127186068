"""Counters that are updated as events happen. A scrape reads gauges from the engine instead."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
import numpy.typing as npt
import trio
from prometheus_client import CollectorRegistry, generate_latest

from trioserve.observability.metrics.counters import DEFAULT_PREFIX, MetricCounters, Watched
from trioserve.observability.metrics.exposition import Exposition
from trioserve.protocol.errors import WorkerLost
from trioserve.requests.request import Finish, FinishReason, Request, Sequence, State

MAX_ERROR_CODES = 100
"""The most error codes that are counted separately."""
OTHER = "other"

_STAGES = {
    State.WAITING: "waiting",
    State.PREFILL: "prefill",
    State.DECODE: "decode",
    State.PREEMPTED: "waiting",
}


def _stage(state: State, request: Request) -> str:
    """Return the stage of an output that finished in ``state``, one of ``ABORT_STAGES``."""
    if state in _STAGES:
        return _STAGES[state]
    return "preparing" if request.prompt_ids else "tokenizing"


class Metrics(MetricCounters):
    """The counters of one engine, and the registry that exposes them.

    Each engine has a registry of its own, so two engines in one program don't meet. The hooks
    (``observe_*``, ``request_finished``) neither block nor fail; times are seconds.

    Args:
        model_name: the label of that name.
        prefix: what the metrics' names begin with, before a colon.
    """

    def __init__(self, model_name: str, prefix: str = DEFAULT_PREFIX) -> None:
        super().__init__(model_name, prefix)
        self._interrupted_at: float | None = None
        """Time at which a worker was lost, until one of its requests gets a token again."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(Exposition(self))

    def watch(self, engine: Watched) -> None:
        """Read the gauges from ``engine`` at every scrape."""
        self.watched = engine

    def watch_connections(self, connections: Sized) -> None:
        """Count an HTTP server's open connections at every scrape."""
        self.connections = connections

    def observe_step(self, num_tokens: int) -> None:
        """Count a step that prefilled and sampled ``num_tokens`` tokens together."""
        self.iteration_tokens.observe(num_tokens)

    def observe_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Record that ``sequence`` got ``num_tokens`` tokens at ``now``, before its times are
        updated.
        """
        request = sequence.request
        if self._interrupted_at is not None:
            self._went_on(request, self._interrupted_at, now)
        if request.times.first_token is None:
            self.time_to_first_token.observe(now - request.times.arrived)
            self._count_prompt(request)
        last = sequence.last_token
        if last is not None:
            self.inter_token_latency.observe((now - last) / num_tokens, num_tokens)
        self.generation_tokens += num_tokens

    def observe_gaps(self, gaps: npt.NDArray[np.float64]) -> None:
        """Count tokens that came so many seconds after the last one of their sequences."""
        self.inter_token_latency.observe_all(gaps)
        self.generation_tokens += len(gaps)

    def _count_prompt(self, request: Request) -> None:
        """Count the computed prompt of ``request``."""
        num_tokens = len(request.prompt_ids)
        self.prompt_tokens += num_tokens
        self.cached_prompt_tokens += request.num_cached_tokens
        self.request_prefill_tokens.observe(num_tokens - request.num_cached_tokens)

    def request_finished(self, request: Request, sequence: Sequence, finish: Finish) -> None:
        """Record the end of ``sequence``; ``request.times`` is complete.

        The prompt is counted with the last of the request's sequences.
        """
        ended = all(sibling.delivered for sibling in request.sequences)
        if request.rejection is not None and finish.reason is FinishReason.ERROR:
            self.num_rejected += ended
            return
        self.finished[finish.reason.value] += 1
        if finish.reason is FinishReason.ABORT and sequence.finished_in is not None:
            self.aborts[_stage(sequence.finished_in, request)] += 1
        num_tokens = len(sequence.output_ids)
        self.request_generation_tokens.observe(num_tokens)
        first, last = request.times.first_token, sequence.last_token
        if num_tokens > 1 and first is not None and last is not None:
            self.time_per_output_token.observe((last - first) / (num_tokens - 1))
            if last > first:
                self.tokens_per_second.observe((num_tokens - 1) / (last - first))
        if ended:
            self._request_ended(request, finish)

    def _request_ended(self, request: Request, finish: Finish) -> None:
        times, params = request.times, request.params
        if times.first_token is None and finish.reason in (FinishReason.LENGTH, FinishReason.STOP):
            # The request was for its prompt only.
            self._count_prompt(request)
        self.request_prompt_tokens.observe(len(request.prompt_ids))
        self.request_n.observe(params.n)
        if params.max_tokens is not None:
            self.request_max_tokens.observe(params.max_tokens)
        longest = max(len(sequence.output_ids) for sequence in request.sequences)
        self.request_most_generation_tokens.observe(longest)
        self.e2e_latency.observe_span(times.arrived, times.finished)
        self.queue_time.observe_span(times.queued, times.first_scheduled)
        self.prefill_time.observe_span(times.first_scheduled, times.first_token)
        self.decode_time.observe_span(times.first_token, times.last_token)
        self.inference_time.observe_span(times.first_scheduled, times.last_token)

    def observe_texts(self, count: int, num_tokens: int, reason: str, seconds: float) -> None:
        """Record the end of a request for the vectors of ``count`` texts.

        Args:
            count: the number of texts; each counts as an output.
            num_tokens: the tokens of all texts together.
            reason: the reason of the end: ``stop`` if all vectors are there, ``abort`` or
                ``error``.
            seconds: the time since its arrival.
        """
        self.finished[reason] += count
        self.e2e_latency.observe(seconds)
        self.request_n.observe(count)
        if reason == FinishReason.STOP.value:
            self.prompt_tokens += num_tokens
            self.request_prompt_tokens.observe(num_tokens)

    def observe_grammar(self, kind: str, outcome: str, seconds: float) -> None:
        """Record that the worker compiled a grammar, or had it already.

        Args:
            kind: a :class:`~trioserve.protocol.grammar.Grammar`'s kind.
            outcome: ``ok``, ``refused`` or ``timeout``.
            seconds: the time it took.
        """
        self.grammars[kind, outcome] += 1
        self.grammar_seconds.observe(seconds)

    def worker_lost(self, loss: WorkerLost) -> None:
        """Record the loss of a worker; running requests wait for the next one."""
        self.worker_losses[loss.reason] += 1
        statistics = self.statistics()
        has_work = statistics is not None and statistics.scheduler.num_waiting > 0
        if has_work and self._interrupted_at is None:
            self._interrupted_at = trio.current_time()

    def _went_on(self, request: Request, interrupted_at: float, now: float) -> None:
        """Record a request's first token after the loss of a worker, if it was running then."""
        self._interrupted_at = None
        if request.times.queued is not None and request.times.queued <= interrupted_at:
            self.interruption_seconds.observe(now - interrupted_at)

    def worker_replaced(self, seconds: float) -> None:
        """Record that the next worker is attached, ``seconds`` after the loss of the last one."""
        self.replacement_seconds.observe(seconds)

    def observe_error(self, code: str) -> None:
        """Record an HTTP request that was answered with an error, or ended by one."""
        known = code in self.http_errors or len(self.http_errors) < MAX_ERROR_CODES
        self.http_errors[code if known else OTHER] += 1

    def observe_response(self, method: str, route: str, status: int) -> None:
        """Record the end of an HTTP request; ``route`` is a known path or one word for all
        others.
        """
        self.http_responses[method, route, status] += 1

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, of the type ``CONTENT_TYPE_LATEST``."""
        return generate_latest(self.registry)
