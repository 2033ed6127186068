"""Which requests of limited keys a front end has open, so that all front ends share the limit."""

from __future__ import annotations

from collections import Counter


class FrontEndPermits:
    """Those of one front end.

    Args:
        seats: requests that are open of each limited key, of all front ends.
        most: how many may be, of one key.
    """

    def __init__(self, permits: Counter[str], most: int) -> None:
        self._permits = permits
        self._most = most
        self._keys: dict[int, str] = {}

    async def take_permit(self, number: int, key: str) -> bool:
        """Return whether one more request of ``key`` may be open; if so it has that number."""
        if self._permits[key] >= self._most:
            return False
        self._permits[key] += 1
        self._keys[number] = key
        return True

    def leave(self, number: int) -> None:
        """The request of that number is over, if it had a seat."""
        key = self._keys.pop(number, None)
        if key is not None:
            self._permits[key] -= 1

    def leave_all(self) -> None:
        """The front end is gone."""
        for number in list(self._keys):
            self.leave(number)
