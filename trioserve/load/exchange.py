"""The reader of one request's answer from bytes into a record, without I/O."""

from __future__ import annotations

import attrs
import msgspec

from trioserve.load.answer import AnswerEvents
from trioserve.load.records import Record
from trioserve.load.response import InvalidAnswer, ResponseReader

_MAX_SHOWN = 500
"""Most bytes of an error's body that are kept in the record."""


@attrs.define(eq=False)
class Exchange:
    """Reader of one answer into ``record``. It stops after ``max_events`` events, if not None."""

    record: Record
    max_events: int | None = None
    connection_was_used: bool = False
    """True if the connection had an earlier answer."""
    unanswered: bool = False
    """True if a used connection ended before the first byte of this answer."""
    reusable: bool = False
    """True if the connection may be used again after the answer."""
    _response: ResponseReader = attrs.field(factory=ResponseReader)
    _answer: AnswerEvents = attrs.field(init=False)
    _begun: bool = False
    _refusal: bytes = b""

    def __attrs_post_init__(self) -> None:
        self._answer = AnswerEvents(self.record)

    def receive(self, data: bytes, now: float) -> bool:
        """Take bytes received at ``now``; return True if the answer is over.

        Empty ``data`` means that the connection has ended.
        """
        if not data and self.note_connection_end():
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
            elif len(self._refusal) < _MAX_SHOWN:
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

    def note_connection_end(self) -> bool:
        """Note that the connection has ended; return :attr:`unanswered`."""
        self.unanswered = self.connection_was_used and not self._begun
        return self.unanswered

    def close(self) -> None:
        """Store the text so far in the record."""
        self._answer.close()

    def _finish(self) -> None:
        record = self.record
        self.reusable = self._response.reusable
        status = self._response.status
        if status != 200:
            shown = self._refusal[:_MAX_SHOWN].decode(errors="replace")
            record.fail(f"HTTP {status}", f"HTTP {status}" + (f": {shown}" if shown else ""))
        elif record.error:
            return
        elif self._response.until_close and not self._answer.complete:
            # Such an answer's end can't be told from a lost connection.
            record.fail("connection lost", "the connection ended before the answer did")
        elif not record.chunks:
            record.fail("no tokens", "the stream held no tokens")
