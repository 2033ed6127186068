"""The contents of a snapshot: counts, states and times, and never a prompt, text or key.

Times are Unix seconds, durations are seconds unless a name says otherwise, and tokens and pages are
counts. A field without a value is null.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "SCHEMA",
    "Counts",
    "Hello",
    "Latency",
    "Pages",
    "Prefix",
    "PrefixNode",
    "Quantiles",
    "Rates",
    "RequestRow",
    "Snapshot",
    "Step",
    "TaskNode",
    "WorkerRates",
    "WorkerRow",
    "WorkerState",
]

SCHEMA = 1
"""Version of the schema. It grows when a field goes or changes its meaning; new fields may come at
any time.
"""

Timeline = list[tuple[str, float]]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that don't change during a subscription."""

    model: str
    version: str
    """Version of trioserve."""
    schema: int = SCHEMA
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    """Tokens in a page of the KV cache."""
    device: str
    started: float
    """Start of the answering process."""
    front_ends: int
    """Number of processes that serve HTTP; 1 for the engine's own."""
    may_control: bool
    """True if the client may use the routes that control the server."""
    lora: list[str]
    """Adapters that are loaded."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The worker process; of several, the first that doesn't run."""

    pid: int | None
    rank_pids: tuple[int, ...] = ()
    """Process ids of its ranks behind that one, in order."""
    state: str
    """``starting``, ``running``, ``restarting`` or ``released`` (its memory was given back)."""
    restarts: int
    """Number of worker processes that were replaced, those of all workers."""
    since: float
    """Beginning of that state."""
    last_death: str | None
    """Reason of the last worker's loss."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs by their present states, and totals of finished ones."""

    tokenizing: int
    waiting: int
    running: int
    preempted: int
    streams: int
    """Open requests."""
    sessions: int
    finished_total: int
    """Finished outputs since the start, in any way; the two below are among them."""
    aborted_total: int
    errors_total: int


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache: ``free`` + ``cached`` + ``held`` are ``total``."""

    total: int
    free: int
    cached: int
    """Pages that no request holds, kept for their content."""
    held: int
    host_total: int
    """Total pages in the host's memory."""
    host_used: int


class WorkerRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the steps since the last snapshot; null in the first one."""

    generated_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    """Prompt tokens computed, and output tokens recomputed after a preemption."""
    steps_per_s: float = 0.0
    gpu_idle_share: float | None = None
    """Share of the time with work in which the device was idle."""
    step_ms: float | None = None
    batch_rows: float | None = None
    """Average number of sequences in a step."""
    cache_hit_share: float | None = None
    """Share of the tokens of sequences that got a slot which the prefix cache had."""
    draft_acceptance_share: float | None = None
    """Share of the verified draft tokens that were accepted."""


class Rates(WorkerRates, frozen=True, kw_only=True):
    """The rates of all workers together, as :class:`WorkerRates`, and of the requests."""

    requests_per_s: float = 0.0
    """Outputs that ended."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the workers."""

    index: int
    """Its number, which no other worker ever has."""
    state: str
    """``starting`` (it loads, and gets no requests yet), ``running``, ``stalled`` (a step is so
    late that it may be hung), ``draining`` (it is being removed), ``restarting`` (it was lost, and
    the next process loads), ``released`` (its memory was given back) or ``ended`` (it was lost too
    often).
    """
    device: str
    """Name of its device; empty while the first process loads."""
    pid: int | None
    """Process id; null on another host."""
    rank_pids: tuple[int, ...] = ()
    """Process ids of its ranks behind that one, in order; empty on another host."""
    host: str | None = None
    """Name of its host; null if that is the engine's."""
    restarts: int
    """Number of its processes that were replaced."""
    since: float
    """Time of its process's start or loss, whichever was last."""
    last_loss: str | None
    """Reason of its last loss."""
    running: int
    """Outputs that it computes."""
    waiting: int
    """Outputs that wait for a slot of it."""
    decode_ms: float
    """Milliseconds that a step with one more stream takes now, as its steps so far predict."""
    plan_bytes: float | None = None
    """Average size of the plans since the last snapshot, in bytes; null without any."""
    round_trip_ms: float | None = None
    """Milliseconds from the last heartbeat to its answer; null on the engine's host."""
    pages: Pages
    rates: WorkerRates


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of durations in seconds, as exact as the histogram's bounds allow."""

    p50: float
    p90: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies over the last minute, or since the first subscription if that is shorter; null
    without any.
    """

    ttft: Quantiles | None = None
    """Time to the first token."""
    itl: Quantiles | None = None
    """Time between two tokens."""
    queue: Quantiles | None = None
    """Time until the first step, of requests that ended."""
    e2e: Quantiles | None = None
    """Time from beginning to end."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Numbers of its several outputs are added up."""

    id: str
    state: str
    """State of the first output that hasn't ended: ``tokenizing`` (on its way to the queue),
    ``encoding`` (the same of a prompt with images, which are read and computed), ``waiting``,
    ``prefill``, ``decode``, ``preempted`` or ``finished``.
    """
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    computed_tokens: int
    """Tokens that have their keys and values computed now; 0 without a slot."""
    output_tokens: int
    max_tokens: int | None
    """The most tokens that the output may have; null while that is unknown."""
    outputs: int
    pages: int
    """Pages in its block tables; a page shared by outputs counts for each."""
    worker: int | None = None
    """The worker that computes it, or did last; null until it is placed on one."""
    moves: int = 0
    """Number of times that it went to another worker."""
    priority: int
    adapter: str | None
    timeline: Timeline
    """States and their beginnings, in order."""


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of pages in the prefix tree without branches."""

    id: int
    """Id of the first page, equal in all snapshots while the page stays in its place."""
    worker: int = 0
    """The worker that has the pages."""
    parent: int | None
    pages: int
    users: int
    """Sequences that hold the pages; 0 if they are only cached."""
    on_host: bool
    """True if the pages are in the host's memory."""


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A part of each worker's prefix tree: parents first, newest branches first."""

    nodes: list[PrefixNode]
    num_left_out: int
    """Pages outside of these nodes."""
    left_out_by_worker: dict[int, int] = {}
    """Pages outside of these nodes, by the worker that has them."""


class TaskNode(msgspec.Struct, frozen=True, kw_only=True):
    """Equal tasks of one nursery, and the tasks below them."""

    name: str
    state: str
    """``running``, ``ready``, ``waiting`` or ``cancelled``; empty for a process."""
    count: int = 1
    children: list[TaskNode] = []
    num_left_out: int = 0
    """Tasks below that were left out."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a worker."""

    number: int
    """Steps of this worker, this one included."""
    worker: int = 0
    at: float
    """Time of its result."""
    rows_prefill: int
    rows_decode: int
    tokens: int
    """Tokens that it computed."""
    ms: float
    idle_ms: float
    """Milliseconds before it in which the worker was idle although there was work."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine."""

    now: float
    health: str
    """``ok``, ``draining``, ``no_worker`` or ``stalled``."""
    paused: bool
    weight_version: str
    worker: WorkerState
    counts: Counts
    pages: Pages
    rates: Rates
    latency: Latency
    requests: list[RequestRow]
    """Requests, the newest first; finished ones stay for ten seconds. Past the limit, running ones
    come before waiting ones.
    """
    num_requests_left_out: int
    prefix: Prefix
    tasks: TaskNode
    steps: Annotated[list[Step], msgspec.Meta(max_length=50)]
    """The newest steps since the last snapshot, as many of each worker, oldest first."""
    workers: list[WorkerRow] = []
    """The workers by number, with those that start. The other fields are of all together."""
