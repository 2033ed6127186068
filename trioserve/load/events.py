"""A parser of server-sent events, without I/O. It takes bytes in any pieces."""

from __future__ import annotations

import attrs

from trioserve.load.response import InvalidAnswer

MAX_EVENT_BYTES = 16 << 20


@attrs.frozen
class Event:
    """One event. The default name is ``message``."""

    name: str
    data: bytes


@attrs.define(eq=False)
class EventReader:
    """Parser of one body's events, by the HTML standard. It ignores ids and comments."""

    _rest: bytearray = attrs.field(factory=bytearray)
    _name: str = "message"
    _data: list[bytes] = attrs.field(factory=list)
    _num_bytes: int = 0

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that ``data`` completes.

        Raises:
            InvalidAnswer: An event is longer than :data:`MAX_EVENT_BYTES`.
        """
        searched = len(self._rest)
        self._rest += data
        end = self._rest.rfind(b"\n", searched)
        lines = [] if end < 0 else bytes(self._rest[:end]).split(b"\n")
        del self._rest[: end + 1]
        events = []
        for line in lines:
            event = self._take_line(line.removesuffix(b"\r"))
            if event is not None:
                events.append(event)
        if len(self._rest) + self._num_bytes > MAX_EVENT_BYTES:
            raise InvalidAnswer("an event is too long")
        return events

    def _take_line(self, line: bytes) -> Event | None:
        if not line:
            event = Event(self._name, b"\n".join(self._data)) if self._data else None
            self._name, self._data, self._num_bytes = "message", [], 0
            return event
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._num_bytes += len(line)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None
