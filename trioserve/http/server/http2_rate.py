"""HTTP/2 rate limiter, which reads frame headers before h2 parses the frames.

Some frames cost the sender nothing and advance no request: pings, settings, priorities, resets,
empty pieces of a body. A client has a budget of such frames, refilled over time. A client that
exhausts it is cut off. Two things are refused at their first byte, since h2 would collect them
whole before it checks: a frame that is too long, and a head in ever more pieces.
"""

from __future__ import annotations

from h2.errors import ErrorCodes

from trioserve.http.server.settings import MAX_FRAME_SIZE, MAX_HEAD_SIZE

BURST = 500
"""Useless frames that a client may send at once."""
_PER_SECOND = 100.0
_WINDOWS_PER_DATA_FRAME = 4
"""Window updates that a client may send for each piece of a body sent to it."""
_PREFACE_SIZE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
_HEADER_SIZE = 9
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 4, 8, 9
_MAX_SETTINGS_SIZE = 6 * 64
"""Bytes of a settings frame: 6 for each setting. HTTP/2 has a dozen settings."""
_END_STREAM = 0x1
_END_HEADERS = 0x4
_PADDED = 0x8


class FrameRefused(Exception):
    """Error: the connection has to end. ``code`` is HTTP/2's error code."""

    def __init__(self, code: ErrorCodes, message: str) -> None:
        super().__init__(message)
        self.code = code


class Http2RateLimiter:
    """Limiter of one connection, from the client's preface on. Bytes and times in, errors out."""

    def __init__(self) -> None:
        self._to_skip = _PREFACE_SIZE
        self._header = bytearray()
        self._head_size = 0
        """Bytes of the head that is being received in pieces; 0 if there is none."""
        self._stock: float = BURST
        self._refilled_at = 0.0
        self._window_updates = BURST

    def read(self, data: bytes, now: float) -> None:
        """Check the next bytes, received at ``now`` seconds.

        Raises:
            FrameRefused: a limit is exceeded.
        """
        position = 0
        while position < len(data):
            if self._to_skip:
                step = min(self._to_skip, len(data) - position)
                self._to_skip -= step
            else:
                step = min(_HEADER_SIZE - len(self._header), len(data) - position)
                self._header += data[position : position + step]
                if len(self._header) == _HEADER_SIZE:
                    self._begin_frame(now)
            position += step

    def charge(self, now: float) -> None:
        """Charge one useless frame to the budget.

        Raises:
            FrameRefused: the budget is exhausted.
        """
        refill = max(0.0, now - self._refilled_at) * _PER_SECOND
        self._stock = min(BURST, self._stock + refill) - 1
        self._refilled_at = now
        if self._stock < 0:
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "too many frames without use")

    def note_data_sent(self) -> None:
        """Note that a piece of a body was sent, which a client answers with window updates."""
        self._window_updates = min(self._window_updates + _WINDOWS_PER_DATA_FRAME, 1 << 20)

    def _begin_frame(self, now: float) -> None:
        length = int.from_bytes(self._header[:3], "big")
        kind, flags = self._header[3], self._header[4]
        self._header.clear()
        self._to_skip = length
        if length > MAX_FRAME_SIZE:
            raise FrameRefused(ErrorCodes.FRAME_SIZE_ERROR, "a frame is too long")
        if kind == _SETTINGS and length > _MAX_SETTINGS_SIZE:
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "too many settings")
        if kind in (_HEADERS, _CONTINUATION):
            self._note_head(kind, flags, length, now)
        elif kind == _WINDOW_UPDATE:
            self._window_updates -= 1
            if self._window_updates < 0:
                raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "too many window updates")
        elif kind != _DATA or flags & _PADDED or not (length or flags & _END_STREAM):
            self.charge(now)

    def _note_head(self, kind: int, flags: int, length: int, now: float) -> None:
        if kind == _CONTINUATION:
            self.charge(now)
        self._head_size += length
        if self._head_size > MAX_HEAD_SIZE:
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "a request's head is too large")
        if flags & _END_HEADERS:
            self._head_size = 0
