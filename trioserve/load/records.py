"""The records of one request and of a run's requests."""

from __future__ import annotations

import attrs


@attrs.define(kw_only=True)
class Record:
    """The result of one request. Times are seconds on trio's clock.

    ``chunks`` are the times of the events with a non-empty ``choices``, even if its text is empty;
    ``first_text`` is the time of the first one with text. ``token_ids`` are reported by the server
    on request. The token counts are the server's own, None without them. ``error`` is empty on
    success, and ``error_kind`` is a short name of its kind.
    """

    started: float
    chunks: list[float] = attrs.field(factory=list)
    first_text: float | None = None
    text: str = ""
    reasoning: str = ""
    """Text that the server marked as reasoning; it isn't part of ``text``."""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    error_kind: str = ""
    cancelled: bool = False
    """True if the client left before the end, as planned. This isn't an error."""
    resent: bool = False
    """True if it was sent twice: the server closed the first connection without an answer."""
    scheduled: float | None = None
    """Scheduled time, if there is a schedule; ``started`` is the real one."""
    ended: float | None = None
    """Time of the last byte, or of the client's departure."""
    conversation: int = 0
    """Index of its conversation in the run, from 0."""
    turn: int = 0
    """Index in the conversation, from 0."""
    valid: bool | None = None
    """True if the answer has the requested form; None without one, or if the answer is cut off."""

    def fail(self, kind: str, message: str) -> None:
        """Record an error."""
        self.error_kind = kind
        self.error = message

    def leave(self) -> None:
        """Record that the client left. A request that has failed before counts only as failed."""
        self.cancelled = not self.error


@attrs.frozen(kw_only=True)
class Run:
    """One record per request, in the order of the requests, and the run's duration in seconds."""

    concurrency: int | None
    """Limit of requests at a time; None for none."""
    records: list[Record]
    duration: float
    rate: float | None = None
    """Offered requests a second; None for a closed loop."""
    started: float = 0.0
    """Start on trio's clock."""
