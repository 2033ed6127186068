"""The records of a request and of a run."""

from __future__ import annotations

import attrs


@attrs.define(kw_only=True)
class Record:
    """The result of one request. Times are seconds on trio's clock.

    ``chunks`` are the times of events with a non-empty ``choices``, even if the text is empty;
    ``first_text`` is the time of the first event with text. ``token_ids`` are there if the request
    asks for them. Token counts are the server's; None if it reports none. ``error`` is empty on
    success, and ``error_kind`` is its short name.
    """

    started: float
    chunks: list[float] = attrs.field(factory=list)
    first_text: float | None = None
    text: str = ""
    reasoning: str = ""
    """Text that the server marked as reasoning, which isn't part of ``text``."""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    error_kind: str = ""
    cancelled: bool = False
    """True if the client disconnected before the end, as planned. This isn't an error."""
    resent: bool = False
    """True if it was sent twice, because the server closed the first connection unanswered."""
    scheduled: float | None = None
    """Scheduled time; None in a closed loop. ``started`` is the actual time."""
    ended: float | None = None
    """Time of the last byte, or of the client's disconnect."""
    conversation: int = 0
    """Index of its conversation in the run, from 0."""
    turn: int = 0
    """Index of its turn in the conversation, from 0."""
    valid: bool | None = None
    """True if the answer has the requested form; None without a form, or if it was cut off."""

    def fail(self, kind: str, message: str) -> None:
        """Record an error."""
        self.error_kind = kind
        self.error = message

    def leave(self) -> None:
        """Record that the client disconnected. A failed request counts only as failed."""
        self.cancelled = not self.error


@attrs.frozen(kw_only=True)
class Run:
    """The records of a run, in the order of the requests, and its duration in seconds."""

    concurrency: int | None
    """Limit of concurrent requests; None for no limit."""
    records: list[Record]
    duration: float
    rate: float | None = None
    """Offered requests per second; None for a closed loop."""
    started: float = 0.0
    """Start time on trio's clock."""
