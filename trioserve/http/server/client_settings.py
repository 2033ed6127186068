"""HTTP/2 settings of a client, bounded in number and in cost.

h2 stores every setting that a client sends, out of 65,536 possible numbers. It encodes answers with
a header table as large as the client allows, and searches the whole table for each header.
"""

from __future__ import annotations

from h2.settings import SettingCodes, Settings

from trioserve.http.server.settings import MAX_FRAME_SIZE

MAX_HEADER_TABLE_SIZE = 4096
"""Size in bytes of the header table that encodes answers; HTTP/2's default."""
_MOST = {
    SettingCodes.HEADER_TABLE_SIZE: MAX_HEADER_TABLE_SIZE,
    SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
}
_KNOWN = frozenset(int(code) for code in SettingCodes)


class ClientSettings(Settings):
    """h2's settings without unknown ones; limits larger than needed are lowered."""

    def __setitem__(self, key: SettingCodes | int, value: int) -> None:
        if key in _KNOWN:
            code = SettingCodes(key)
            super().__setitem__(code, min(value, _MOST.get(code, value)))
