"""A parser of HTTP/1.1 responses, without I/O. It takes bytes in any pieces.

It reads a head, then a body that is chunked, has a given length, or ends with the connection. h11
costs several times as much, and on a small machine the client takes time from the server. Tests
compare this reader with h11.
"""

from __future__ import annotations

import re

import attrs

MAX_HEAD_BYTES = 64 << 10
_MAX_LINE_BYTES = 4096

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_UNTIL_CLOSE = -1


class InvalidAnswer(Exception):
    """The bytes aren't a valid response."""


@attrs.define(eq=False)
class ResponseReader:
    """One response. ``status`` is 0 until the head has been read."""

    status: int = 0
    headers: dict[bytes, bytes] = attrs.field(factory=dict)
    """Headers by lower-case name; the last of several with one name."""
    ended: bool = False
    reusable: bool = False
    """True if the connection may be used for another request after this one."""
    _rest: bytes = b""
    """Bytes of an incomplete head, or of an incomplete line between chunks."""
    _left: int = 0
    """Number of bytes still to come of the body or the current chunk."""
    _chunked: bool = False
    _line: str = "size"
    """Kind of the next line between chunks: ``size``, the ``end`` of a chunk, or a ``trailer``."""

    @property
    def until_close(self) -> bool:
        """True if the connection's end is the body's end, so truncation can't be detected."""
        return self._left == _UNTIL_CLOSE

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in ``data``. Empty ``data`` means that the connection has ended.

        Raises:
            InvalidAnswer: The response is invalid or incomplete.
        """
        if not data:
            self._end_of_connection()
            return b""
        if not self.status:
            data = self._read_head(self._rest + data)
            if not self.status:
                return b""
        if self._chunked:
            return self._read_chunks(data)
        return self._read_plain(data)

    def _end_of_connection(self) -> None:
        if not self.status or not self.until_close:
            raise InvalidAnswer("the connection ended before the answer did")
        self.ended = True

    def _read_head(self, data: bytes) -> bytes:
        """Read the head, after interim (1xx) heads, from ``data``; return the rest."""
        while True:
            end = re.search(rb"\r?\n\r?\n", data)
            if end is None:
                if len(data) > MAX_HEAD_BYTES:
                    raise InvalidAnswer("the head is too long")
                self._rest = data
                return b""
            head, data = data[: end.start()], data[end.end() :]
            lines = [line.rstrip(b"\r") for line in head.split(b"\n")]
            status = _STATUS_LINE.fullmatch(lines[0])
            if status is None:
                raise InvalidAnswer(f"no HTTP/1.1 status line: {lines[0][:80]!r}")
            if not status[2].startswith(b"1"):
                break
        self._rest = b""
        self._note_headers(lines[1:])
        self.status = int(status[2])
        self._choose_framing(persistent=status[1] == b"1")
        return data

    def _note_headers(self, lines: list[bytes]) -> None:
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name.strip():
                raise InvalidAnswer(f"no header: {line[:80]!r}")
            self.headers[name.strip().lower()] = value.strip()

    def _choose_framing(self, *, persistent: bool) -> None:
        connection = self.headers.get(b"connection", b"").lower()
        self.reusable = b"close" not in connection and (persistent or b"keep-alive" in connection)
        if self.headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._chunked = True
        elif b"transfer-encoding" in self.headers:
            raise InvalidAnswer(f"unknown encoding: {self.headers[b'transfer-encoding']!r}")
        elif self.status in (204, 304):
            self.ended = True
        elif b"content-length" in self.headers:
            length = self.headers[b"content-length"]
            if not _LENGTH.fullmatch(length):
                raise InvalidAnswer(f"no length: {length[:80]!r}")
            self._left = int(length)
            self.ended = self._left == 0
        else:
            self._left = _UNTIL_CLOSE
            self.reusable = False

    def _read_plain(self, data: bytes) -> bytes:
        if self.until_close:
            return data
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self.ended = True
        if len(body) < len(data):
            # With more bytes than announced, the state of the connection is unknown.
            self.reusable = False
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        if self._rest:
            data, self._rest = self._rest + data, b""
        parts: list[bytes] = []
        place, size = 0, len(data)
        while place < size:
            if self.ended:
                self.reusable = False
                break
            if self._left:
                part = data[place : place + self._left]
                self._left -= len(part)
                place += len(part)
                parts.append(part)
                continue
            end = data.find(b"\n", place)
            if end < 0:
                self._rest = data[place:]
                if len(self._rest) > _MAX_LINE_BYTES:
                    raise InvalidAnswer("a line between chunks is too long")
                break
            self._take_line(data[place:end])
            place = end + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_line(self, line: bytes) -> None:
        """Take a line between chunks, without its line feed."""
        if self._line == "end":
            if line != b"\r":
                raise InvalidAnswer("a chunk is longer than it says")
            self._line = "size"
        elif self._line == "trailer":
            self.ended = line in (b"", b"\r")
        else:
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise InvalidAnswer(f"no size of a chunk: {line[:80]!r}")
            self._left = int(size[1], 16)
            self._line = "end" if self._left else "trailer"
