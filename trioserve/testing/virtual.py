"""Deterministic runs of trio in virtual time, with an order of events drawn from a seed.

:func:`run_virtual` replaces :func:`trio.run` in tests. Its clock stands still while a task can run,
and jumps to the next deadline when none can, so a minute of waiting takes no time. Tasks that can
run at the same moment run in an order drawn from ``seed``. A run is deterministic, so a failure
repeats with the same seed::

    def test_my_app():
        for seed in range(100):
            run_virtual(my_scenario, seed=seed)

Functions given to ``trio.to_thread.run_sync`` run on trio's own thread after some virtual time, so
threads are deterministic, too. The program must use only trio's clock and seeded generators, and
must not depend on the order of a set whose objects are hashed by address.

This relies on private parts of trio; :func:`check_trio` checks them.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import trio
import trio.testing
from trio._core import _run

T = TypeVar("T")

LONGEST_THREAD = 0.02
"""Longest duration of a function in a thread, in seconds of virtual time."""

REQUIRED_LINES = (
    "if _ALLOW_DETERMINISTIC_SCHEDULING:",
    "batch.sort(key=lambda t: t._counter)",
    "_r.shuffle(batch)",
    "elif runner.clock_autojump_threshold < timeout:",
    "runner.clock._autojump()",
    'runner.instruments.call("before_task_step", task)',
    'runner.instruments.call("after_task_step", task)',
)
"""Lines of trio's event loop that determine the order of events."""


def check_trio() -> None:
    """Assert that trio still has the parts that a virtual run needs.

    Raises:
        AssertionError: A part is missing; the message says where to look.
    """
    advice = (
        f"trio {trio.__version__} has changed: see unrolled_run() in trio/_core/_run.py and "
        "trio/_core/_mock_clock.py, then trioserve/testing/virtual.py, which relies on them"
    )
    loop = inspect.getsource(_run.unrolled_run)
    for line in REQUIRED_LINES:
        assert line in loop, f"the event loop lacks {line!r}; {advice}"
    assert isinstance(getattr(_run, "_r", None), random.Random), f"_r is gone; {advice}"
    assert _run._ALLOW_DETERMINISTIC_SCHEDULING in (True, False), advice
    clock = trio.testing.MockClock(autojump_threshold=0)
    for name in ("_autojump", "_real_clock"):
        assert callable(getattr(clock, name, None)), f"MockClock.{name} is gone; {advice}"
    counter = {field.name for field in trio.lowlevel.Task.__attrs_attrs__}
    assert "_counter" in counter, f"a task's _counter is gone; {advice}"


def run_virtual(
    function: Callable[..., Awaitable[T]],
    *args: Any,
    seed: int = 0,
    instruments: Sequence[trio.abc.Instrument] = (),
    on_idle: Callable[[], None] = lambda: None,
) -> T:
    """Run ``await function(*args)`` in virtual time, with an order of events drawn from ``seed``.

    Args:
        function: The async function, as for :func:`trio.run`.
        args: Its arguments.
        seed: Seed of the order of tasks and of the duration of threads.
        instruments: As for :func:`trio.run`.
        on_idle: Called when no task can run, before time jumps. It must not raise.

    Returns:
        The result of ``function``.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    jump = clock._autojump

    def check_and_jump() -> None:
        on_idle()
        jump()

    # A constant, because a rate of 0 would still read the real clock.
    clock._real_clock = lambda: 0.0
    clock._autojump = check_and_jump  # type: ignore[method-assign]
    before = _run._r.getstate()
    with (
        mock.patch.object(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        _without_threads(random.Random(seed)),
    ):
        _run._r.seed(seed)
        try:
            return trio.run(function, *args, clock=clock, instruments=instruments)
        finally:
            _run._r.setstate(before)


@contextlib.contextmanager
def _without_threads(rng: random.Random) -> Iterator[None]:
    """Replace ``trio.to_thread.run_sync``: run functions here, after some virtual time."""

    async def run_sync(
        function: Callable[..., Any],
        *args: Any,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
        **_: Any,
    ) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        async with contextlib.AsyncExitStack() as stack:
            if limiter is not None:
                await stack.enter_async_context(limiter)
            with trio.CancelScope(shield=not abandon_on_cancel):
                await trio.sleep(rng.uniform(0, LONGEST_THREAD))
            return function(*args)

    with mock.patch.object(trio.to_thread, "run_sync", run_sync):
        yield


class CancelAtCheckpoint(trio.abc.Instrument):
    """Instrument that counts a block's checkpoints and cancels the block at one of them.

    ::

        counter = CancelAtCheckpoint(3)
        run_virtual(main, counter, instruments=[counter])

        async def main(counter):
            with counter.watch():
                ...  # left at the third checkpoint in here

    Args:
        number: Checkpoint at which to cancel, from 1; None to count only.
        when_woken: True to cancel when the wait is over and the task is about to run, so that both
            race; False to cancel when the wait has just begun.
    """

    def __init__(self, number: int | None = None, *, when_woken: bool = False) -> None:
        self.count = 0
        """Number of checkpoints in the block so far."""
        self._number = number
        self._when_woken = when_woken
        self._task: trio.lowlevel.Task | None = None
        self._scope: trio.CancelScope | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[trio.CancelScope]:
        """Count the checkpoints of the current task in the block."""
        with trio.CancelScope() as scope:
            self._scope, self._task = scope, trio.lowlevel.current_task()
            try:
                yield scope
            finally:
                self._scope = self._task = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a checkpoint of the task; cancel the block there if it is due."""
        if task is self._task:
            self.count += 1
            if not self._when_woken:
                self._cancel_if_due()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Cancel the block at the end of a checkpoint if it is due."""
        if task is self._task and self._when_woken:
            self._cancel_if_due()

    def _cancel_if_due(self) -> None:
        if self.count == self._number and self._scope is not None:
            self._scope.cancel()
