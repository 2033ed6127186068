"""What a picture of an engine holds: counts, states and times, and never a prompt, text or key.

Times are Unix seconds, durations seconds unless a name says otherwise, tokens and pages counts. A
field that isn't known, or that nothing happened for, is null.
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
    "WorkerState",
]

SCHEMA = 1
"""Grows when a field goes or changes its meaning; new fields may come at any time."""

Timeline = list[tuple[str, float]]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What doesn't change while somebody watches."""

    model: str
    version: str
    """Of trioserve."""
    schema: int = SCHEMA
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    """Tokens in a page of the KV cache."""
    device: str
    started: float
    """When the process that answers began to serve."""
    front_ends: int
    """Processes that do HTTP; 1 where the engine's own does."""
    may_control: bool
    """Whether whoever watches may use the routes that control the server."""
    lora: list[str]
    """The adapters that are loaded."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The worker process."""

    pid: int | None
    state: str
    """``starting``, ``running``, ``restarting`` or ``released`` (its memory was given back)."""
    restarts: int
    """Workers that were replaced."""
    since: float
    """When it came to that state."""
    last_death: str | None
    """Why the last one was lost."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs by their states now, and of those that ended how they did."""

    tokenizing: int
    waiting: int
    running: int
    preempted: int
    streams: int
    """Requests that are open."""
    sessions: int
    finished_total: int
    """Since the start, however they ended; the two below are among them."""
    aborted_total: int
    errors_total: int


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache: ``free`` + ``cached`` + ``held`` are ``total``."""

    total: int
    free: int
    cached: int
    """Nobody holds them; they are kept for what they contain."""
    held: int
    host_total: int
    """Places for pages in the host's memory."""
    host_used: int


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What was done since the last picture; the first one has nothing to tell."""

    generated_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    """Tokens that were computed and not just generated; after a preemption of the output, too."""
    requests_per_s: float = 0.0
    """Outputs that ended."""
    steps_per_s: float = 0.0
    gpu_idle_share: float | None = None
    """Of the time in which there was something to compute, the part in which the worker waited."""
    step_ms: float | None = None
    batch_rows: float | None = None
    """Sequences in a step, on average."""
    cache_hit_share: float | None = None
    """Of the tokens of sequences that got a slot, the part that was found in the prefix cache."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of durations in seconds, as exact as the bounds of the metric's histogram allow."""

    p50: float
    p90: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Over the last minute, or since somebody watches if that is less; null if there were none."""

    ttft: Quantiles | None = None
    """Until the first token."""
    itl: Quantiles | None = None
    """From one token to the next."""
    queue: Quantiles | None = None
    """Until the first step, of requests that ended."""
    e2e: Quantiles | None = None
    """From beginning to end."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request. What several outputs of one prompt have is counted together."""

    id: str
    state: str
    """``tokenizing`` (on its way to the queue), ``waiting``, ``prefill``, ``decode``, ``preempted``
    or ``finished``: that of the first output that hasn't ended."""
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those that were found in the prefix cache."""
    computed_tokens: int
    """Those whose keys and values are there now; 0 without a slot."""
    output_tokens: int
    max_tokens: int | None
    """Most tokens that the output may have; null while that isn't known."""
    outputs: int
    pages: int
    """In its block tables; one that outputs share counts for each."""
    priority: int
    adapter: str | None
    timeline: Timeline
    """States and when they began, in order."""


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of pages in the prefix tree, each the only one behind the page before it."""

    id: int
    """Of its first page; the same from picture to picture while that stays where it is."""
    parent: int | None
    pages: int
    users: int
    """Sequences that hold them; 0 if they are only cached."""
    on_host: bool
    """Whether they are in the host's memory."""


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix tree, as much of it as was asked for: parents first, newest branches first."""

    nodes: list[PrefixNode]
    num_left_out: int
    """Pages that are in no node."""


class TaskNode(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of one nursery that look alike, and those below them."""

    name: str
    state: str
    """``running``, ``ready``, ``waiting`` or ``cancelled``; empty for a process."""
    count: int = 1
    children: list[TaskNode] = []
    num_left_out: int = 0
    """Tasks below that weren't looked at."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the worker."""

    number: int
    at: float
    """When its result came."""
    rows_prefill: int
    rows_decode: int
    tokens: int
    """That it computed."""
    ms: float
    idle_ms: float
    """That the worker waited before, while there was something to compute."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment."""

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
    """The newest first; those that have ended stay for ten seconds. Where there are more than were
    asked for, those that run come before those that wait."""
    num_requests_left_out: int
    prefix: Prefix
    tasks: TaskNode
    steps: Annotated[list[Step], msgspec.Meta(max_length=50)]
    """Those since the last picture, the newest of them, oldest first."""
