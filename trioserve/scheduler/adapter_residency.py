"""Decisions about the adapters that the worker holds, without any I/O.

Two limits hold: the worker holds ``most`` adapters, and running sequences use at most
``most_together`` different ones. Waiting sequences are looked at in the order of admission, in a
*pass*. Each gets a place for its adapter, beside the adapters of running sequences and those that
got a place before it. Once there is no place for a sequence's adapter, no sequence behind it that
uses an adapter is admitted. So the running sequences come to an end even if more with their
adapters keep arriving. Adapters without a place in the pass are unloaded to make room, the least
recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs


@attrs.frozen
class LoadAdapter:
    """A decision: the worker loads an adapter."""

    number: int


@attrs.frozen
class UnloadAdapter:
    """A decision: the worker unloads an adapter."""

    number: int


Change = LoadAdapter | UnloadAdapter


@attrs.define(eq=False)
class Residency:
    """The adapters of one scheduler, by number.

    Args:
        most: Number of adapters that the worker can hold.
        most_together: Number of different adapters of running sequences; at most ``most``.
    """

    most: int
    most_together: int
    known: set[int] = attrs.field(init=False, factory=set)
    """Adapters that sequences may use."""
    load_seconds: float = attrs.field(init=False, default=0.0)
    """Time for which the last adapter was loaded."""
    _present: dict[int, None] = attrs.field(init=False, factory=dict)
    """Adapters that the worker holds, the least recently used first."""
    _placed: dict[int, None] = attrs.field(init=False, factory=dict)
    """Adapters that got a place in the last pass."""
    _asked: dict[int, None] = attrs.field(init=False, factory=dict)
    """Adapters to be loaded even if no sequence waits for them."""

    @property
    def wants_change(self) -> bool:
        """True if the worker lacks an adapter that it has to hold, or holds a forgotten one."""
        return any(each not in self._present for each in (*self._placed, *self._asked)) or any(
            each not in self.known for each in self._present
        )

    def is_present(self, number: int) -> bool:
        """Return True if the worker holds the adapter."""
        return number in self._present

    def ask(self, number: int) -> None:
        """Make an adapter known and have it loaded."""
        self.known.add(number)
        self._asked[number] = None

    def forget(self, number: int) -> None:
        """Forget an adapter that no sequence uses any more."""
        self.known.discard(number)
        self._asked.pop(number, None)
        self._placed.pop(number, None)

    def on_loaded(self, number: int, seconds: float = 0.0) -> None:
        """Note that the worker has loaded an adapter in so many seconds."""
        self.load_seconds = seconds
        self._present[number] = None
        self._asked.pop(number, None)

    def on_failed(self, number: int) -> None:
        """Note that the worker couldn't load an adapter; the next sequence with it causes another
        try.
        """
        self._asked.pop(number, None)
        self._placed.pop(number, None)

    def on_unload(self, number: int) -> None:
        """Note that the worker is told to unload an adapter; no sequence with it is admitted until
        it is loaded again.
        """
        del self._present[number]

    def on_worker_lost(self) -> None:
        """Have the next worker load all adapters that the lost one held."""
        wanted = [number for number in reversed(self._present) if number in self.known]
        self._asked = {**dict.fromkeys(wanted), **self._asked}
        self._present.clear()

    def begin_pass(self, running: Callable[[], Collection[int]]) -> Pass:
        """Begin a pass over the waiting sequences; ``running`` gives the adapters in use."""
        self.clear_places()
        return Pass(self, running)

    def clear_places(self) -> None:
        """Take all places back, because no sequence waits any more."""
        self._placed.clear()

    def next_change(self, running: Callable[[], Collection[int]]) -> Change | None:
        """Return the next change for the worker; None if there is nothing to do or nothing to
        unload.
        """
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
        """Give the adapter a place and mark it as just used."""
        self._placed[number] = None
        if number in self._present:
            del self._present[number]
            self._present[number] = None


class Pass:
    """A pass over the waiting sequences, in the order in which they may be admitted."""

    def __init__(self, residency: Residency, running: Callable[[], Collection[int]]) -> None:
        self._residency = residency
        self._running = running
        self._together: set[int] | None = None
        """Adapters of running and admitted sequences; None until the first sequence with an
        adapter.
        """
        self._held: set[int] = set()
        """Adapters in use, and those that got a place in this pass."""
        self._is_full = False

    def admits(self, number: int) -> bool:
        """Return True if a sequence with this adapter may be admitted now; 0 is no adapter."""
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
