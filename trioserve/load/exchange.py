"""The answer to one request, read from bytes into a record. No I/O here."""

from __future__ import annotations

import attrs
import msgspec

from trioserve.load.answer import AnswerEvents
from trioserve.load.records import Record
from trioserve.load.response import InvalidAnswer, ResponseReader

_MAX_TOLD = 500
"""Bytes of a refusal's body that the record has."""


@attrs.define(eq=False)
class Exchange:
    """Reader of one answer into ``record``; it leaves after ``max_events`` events, None for
    never.
    """

    record: Record
    max_events: int | None = None
    connection_was_used: bool = False
    """True if there was an earlier answer on the connection."""
    unanswered: bool = False
    """True if a used connection ended without a byte of this answer."""
    reusable: bool = False
    """True if the connection may be used again after the answer."""
    _response: ResponseReader = attrs.field(factory=ResponseReader)
    _answer: AnswerEvents = attrs.field(init=False)
    _begun: bool = False
    _refusal: bytes = b""

    def __attrs_post_init__(self) -> None:
        self._answer = AnswerEvents(self.record)

    def receive(self, data: bytes, now: float) -> bool:
        """Take the bytes received at ``now``, none at the connection's end; return True at the
        answer's end.
        """
        if not data and self.goes_unanswered():
            return True
        self._begun = True
        try:
            body = self._response.feed(data)
            if self._response.status == 200:
                if body:
                    events = self._answer.feed(body, now)
                    if self.max_events is not None and events >= self.max_events:
                        self.record.leave()
                        return True
            elif len(self._refusal) < _MAX_TOLD:
                self._refusal += body
        except InvalidAnswer as error:
            kind = "invalid answer" if data else "connection lost"
            self.record.fail(kind, f"not a valid answer: {error}")
            return True
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.record.fail("invalid answer", f"not a valid answer: {error}")
            return True
        if self._response.ended:
            self._finish()
        return self._response.ended

    def goes_unanswered(self) -> bool:
        """Record the connection's end, and return :attr:`unanswered`."""
        self.unanswered = self.connection_was_used and not self._begun
        return self.unanswered

    def close(self) -> None:
        """Put the text so far into the record, however the reading ended."""
        self._answer.close()

    def _finish(self) -> None:
        record = self.record
        self.reusable = self._response.reusable
        status = self._response.status
        if status != 200:
            told = self._refusal[:_MAX_TOLD].decode(errors="replace")
            record.fail(f"HTTP {status}", f"HTTP {status}" + (f": {told}" if told else ""))
        elif record.error:
            return
        elif self._response.until_close and not self._answer.complete:
            # The end of such an answer looks like the server's death.
            record.fail("connection lost", "the connection ended before the answer did")
        elif not record.chunks:
            record.fail("no tokens", "the stream held no tokens")
