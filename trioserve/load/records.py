"""What became of one request, and of all requests of a run."""

from __future__ import annotations

import attrs


@attrs.define(kw_only=True)
class Record:
    """What became of one request. Times are seconds on trio's clock.

    ``chunks`` are the times of the events with a non-empty ``choices``, even if its text is empty;
    ``first_text`` is that of the first with some text. ``token_ids`` are those that the server
    told where it was asked to. The token counts are the server's own, None where it named none.
    ``error`` is empty on success, and ``error_kind`` says in a word or two what sort it is.
    """

    started: float
    chunks: list[float] = attrs.field(factory=list)
    first_text: float | None = None
    text: str = ""
    reasoning: str = ""
    """What the server marked as reasoning, which isn't part of ``text``."""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    error_kind: str = ""
    cancelled: bool = False
    """Whether the client left before the end, as it was told to. That is no error."""
    resent: bool = False
    """Whether it was sent twice: the server closed the first connection without an answer."""
    scheduled: float | None = None
    """When it was to be sent, where a schedule says so; ``started`` is when it was."""
    ended: float | None = None
    """When the client had the last of it, or left."""
    conversation: int = 0
    """The place of its conversation in the run, from 0."""
    turn: int = 0
    """Its place in the conversation, from 0."""
    valid: bool | None = None
    """Whether the answer has the form that was asked for; None where none was, or it is cut off."""

    def fail(self, kind: str, message: str) -> None:
        """Note an error."""
        self.error_kind = kind
        self.error = message

    def leave(self) -> None:
        """Note that the client left. What has failed before that counts as failed alone."""
        self.cancelled = not self.error


@attrs.frozen(kw_only=True)
class Run:
    """One record per request, in the order of the requests, and the seconds that all took."""

    concurrency: int | None
    """Most requests at a time; None for any number."""
    records: list[Record]
    duration: float
    rate: float | None = None
    """Requests a second that were offered; None for a closed loop."""
    started: float = 0.0
    """When it began, on trio's clock."""
