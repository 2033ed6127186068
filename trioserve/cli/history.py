"""The input history of chats, in a file.

Each line is one message as JSON, because a message may have line breaks. readline's format can't
hold them, and its two implementations don't read each other's files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import attrs

MAX_ENTRIES = 1000
MAX_CHARACTERS = 10_000
"""Most characters of a message that is kept. Longer ones are usually pasted."""


def history_path(given: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the path ``given``, else ``$TRIOSERVE_HISTORY``, else the user's default.

    The result is None for the word ``off``, or without a home folder.
    """
    named = given or environment.get("TRIOSERVE_HISTORY")
    if named:
        return None if named == "off" else Path(named)
    state = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # The XDG standard ignores relative paths.
        return Path(state) / "trioserve" / "chat_history"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".local" / "state" / "trioserve" / "chat_history"
    return None


@attrs.define(eq=False)
class History:
    """The history in the file ``path``, which only its owner may read; None for no history.

    A line that can't be written is dropped, and the chat goes on.
    """

    path: Path | None

    def read(self) -> list[str]:
        """Return the newest ``MAX_ENTRIES``, oldest first. A file of twice as many is shortened."""
        if self.path is None:
            return []
        try:
            lines = self.path.read_text("utf-8", "replace").splitlines()
        except OSError:
            return []
        if len(lines) > 2 * MAX_ENTRIES:
            self._rewrite(lines[-MAX_ENTRIES:])
        entries = (_entry(line) for line in lines[-MAX_ENTRIES:])
        return [entry for entry in entries if entry is not None]

    def append(self, entry: str) -> None:
        """Append ``entry``, unless it is longer than ``MAX_CHARACTERS``."""
        if self.path is None or len(entry) > MAX_CHARACTERS:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Two chats may append at the same time, so each line is one write.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, json.dumps(entry).encode() + b"\n")
            finally:
                os.close(descriptor)

    def _rewrite(self, lines: list[str]) -> None:
        assert self.path is not None
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
            os.replace(part, self.path)


def _entry(line: str) -> str | None:
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, str):
            return entry
    return None
