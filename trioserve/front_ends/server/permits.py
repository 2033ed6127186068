"""Concurrency permits of limited keys, which all front ends share."""

from __future__ import annotations

from collections import Counter

from trioserve.protocol.errors import EngineError


class FrontEndPermits:
    """The permits of one front end.

    Args:
        permits: open requests of each limited key, of all front ends.
        most: limit of the open requests of one key.
    """

    def __init__(self, permits: Counter[str], most: int) -> None:
        self._permits = permits
        self._most = most
        self._keys: dict[int, str] = {}

    async def take_permit(self, number: int, key: str) -> bool:
        """Return whether one more request of ``key`` may be open; if so it has that number."""
        if number in self._keys:
            raise EngineError(f"there is a permit of the number {number}")
        if self._permits[key] >= self._most:
            return False
        self._permits[key] += 1
        self._keys[number] = key
        return True

    def leave(self, number: int) -> None:
        """Give back the permit of that number, if there is one."""
        key = self._keys.pop(number, None)
        if key is not None:
            self._permits[key] -= 1

    def leave_all(self) -> None:
        """Give back all permits, because the front end is gone."""
        for number in list(self._keys):
            self.leave(number)
