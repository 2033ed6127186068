"""Which adapters the worker holds, and which it is to hold: decisions without any I/O.

Two limits: the worker holds ``most`` adapters, and sequences of ``most_together`` run at a time.
Whoever waits is looked at in the order of admission (a *pass*), and gets a place for its adapter
beside those that run and those that were given one before. Once there is no place for somebody's
adapter, nobody behind comes in with one: so those that run come to an end, however many more of
their kind arrive. What nobody in the pass has a place for makes way, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs


@attrs.frozen
class LoadAdapter:
    """The worker is to load an adapter."""

    number: int


@attrs.frozen
class UnloadAdapter:
    """The worker is to let go of one."""

    number: int


Change = LoadAdapter | UnloadAdapter


@attrs.define(eq=False)
class Residency:
    """The adapters of one scheduler, by their numbers.

    Args:
        most: how many the worker holds.
        most_together: how many different ones those that run may have; no more than ``most``.
    """

    most: int
    most_together: int
    known: set[int] = attrs.field(init=False, factory=set)
    """Those that sequences may have."""
    _present: dict[int, None] = attrs.field(init=False, factory=dict)
    """Those that the worker holds, the least recently used first."""
    _placed: dict[int, None] = attrs.field(init=False, factory=dict)
    """Those that were given a place in the last pass."""
    _asked: dict[int, None] = attrs.field(init=False, factory=dict)
    """Those that are to be brought, whether somebody waits for them or not."""

    @property
    def wants_change(self) -> bool:
        """Whether the worker lacks what it is to hold, or holds what nobody may have any more."""
        return any(each not in self._present for each in (*self._placed, *self._asked)) or any(
            each not in self.known for each in self._present
        )

    def is_present(self, number: int) -> bool:
        """Whether the worker holds it."""
        return number in self._present

    def ask(self, number: int) -> None:
        """Have it brought; from now on it is known."""
        self.known.add(number)
        self._asked[number] = None

    def forget(self, number: int) -> None:
        """No sequence has it any more, or will."""
        self.known.discard(number)
        self._asked.pop(number, None)
        self._placed.pop(number, None)

    def on_brought(self, number: int) -> None:
        """The worker has loaded it."""
        self._present[number] = None
        self._asked.pop(number, None)

    def on_failed(self, number: int) -> None:
        """The worker couldn't load it; it is tried again when somebody wants it again."""
        self._asked.pop(number, None)
        self._placed.pop(number, None)

    def on_taken(self, number: int) -> None:
        """The worker is told to let go of it: nobody comes in with it from now on."""
        del self._present[number]

    def on_worker_lost(self) -> None:
        """All that it held is to be brought to the next."""
        wanted = [number for number in reversed(self._present) if number in self.known]
        self._asked = {**dict.fromkeys(wanted), **self._asked}
        self._present.clear()

    def begin_pass(self, running: Callable[[], Collection[int]]) -> Pass:
        """Look at who waits; ``running`` gives the adapters of those that run."""
        self.clear_places()
        return Pass(self, running)

    def clear_places(self) -> None:
        """Nobody waits any more who was given a place."""
        self._placed.clear()

    def next_change(self, running: Callable[[], Collection[int]]) -> Change | None:
        """What the worker is to be told next, None if there is nothing or nothing can make way."""
        for number in self._present:
            if number not in self.known:
                return UnloadAdapter(number)
        wanted = [each for each in (*self._placed, *self._asked) if each not in self._present]
        if not wanted:
            return None
        if len(self._present) < self.most:
            return LoadAdapter(wanted[0])
        needed = {*running(), *self._placed}
        for number in self._present:
            if number not in needed:
                return UnloadAdapter(number)
        return None

    def place(self, number: int) -> None:
        """Somebody in the pass has a place for it; it was used just now."""
        self._placed[number] = None
        if number in self._present:
            del self._present[number]
            self._present[number] = None


class Pass:
    """One look at those that wait, in the order in which they may be admitted."""

    def __init__(self, residency: Residency, running: Callable[[], Collection[int]]) -> None:
        self._residency = residency
        self._running = running
        self._together: set[int] | None = None
        """Adapters of those that run and come in; None before somebody with an adapter came."""
        self._held: set[int] = set()
        """Those, and those that are brought for others."""
        self._is_full = False

    def admits(self, number: int) -> bool:
        """Whether somebody with adapter ``number``, if it isn't 0, may come in now."""
        if number == 0:
            return True
        if self._together is None:
            self._together = set(self._running()) - {0}
            self._held = set(self._together)
        if self._is_full:
            return False
        residency = self._residency
        if number not in self._held:
            if len(self._held) == residency.most:
                self._is_full = True
                return False
            self._held.add(number)
        residency.place(number)
        if not residency.is_present(number):
            return False
        if number not in self._together:
            if len(self._together) == residency.most_together:
                self._is_full = True
                return False
            self._together.add(number)
        return True
