"""The settings of an HTTP/2 client, of which only some are kept, and none costs much.

h2 keeps a setting under each number that a client names, of which there are 65,536, encodes answers
with a table as large as the client allows, and searches all of that table for each header.
"""

from __future__ import annotations

from h2.settings import SettingCodes, Settings

from trioserve.http.server.settings import MAX_FRAME_SIZE

MAX_HEADER_TABLE_SIZE = 4096
"""Bytes of the table that the headers of answers are encoded with; HTTP/2's default."""
_MOST = {
    SettingCodes.HEADER_TABLE_SIZE: MAX_HEADER_TABLE_SIZE,
    SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
}
_KNOWN = frozenset(int(code) for code in SettingCodes)


class ClientSettings(Settings):
    """h2's settings without unknown ones; a limit that is larger than needed is lowered."""

    def __setitem__(self, key: SettingCodes | int, value: int) -> None:
        if key in _KNOWN:
            code = SettingCodes(key)
            super().__setitem__(code, min(value, _MOST.get(code, value)))
