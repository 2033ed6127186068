"""``trioserve top``: the live feed on a full screen, or printed to a file or a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import attrs
import rich.console
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.cli.output import writing
from trioserve.cli.remote import remote_of
from trioserve.cli.top.drawing import draw
from trioserve.cli.top.feed import SnapshotFeed
from trioserve.cli.top.glyphs import Glyphs
from trioserve.cli.top.options import TopOptions
from trioserve.cli.top.screen import Screen, glyphs_of
from trioserve.cli.top.view import View
from trioserve.load.remote import Remote, RemoteError

_RETRY = 1.0
"""Seconds between two attempts to reach a lost server."""
_TICK = 1.0
"""Seconds after which the screen is drawn again without a new snapshot."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


async def run_top(options: TopOptions) -> int:
    """Show the server until the user quits, and return the exit code.

    With ``json``, print snapshots as lines instead, and with ``once`` only one. Without a terminal,
    print one as text.

    Raises:
        RemoteError: The server can't be reached, or has no live feed.
        UsageError: An option isn't allowed.
    """
    remote, address = remote_of(options)
    top = Top(remote, address.base_path.removesuffix("/v1"), options.interval)
    console = rich.console.Console(highlight=False)
    at_a_terminal = sys.stdin.isatty() and console.is_terminal and not console.is_dumb_terminal
    if options.json:
        await top.print_json(once=options.once)
    elif options.once or not at_a_terminal:
        await top.print_once(console)
    else:
        return await top.run(Screen(sys.stdin, console), glyphs_of(console))
    return 0


@attrs.define(eq=False)
class Top:
    """One run of the command, for one server."""

    remote: Remote
    base_path: str
    interval: float
    view: View = attrs.field(init=False)
    page: int = 10
    """Number of lines of the screen's lower part, which scrolls."""
    exit_code: int = 0
    left: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.view = View(url=self.remote.url)

    def open(self) -> contextlib.AbstractAsyncContextManager[SnapshotFeed]:
        return SnapshotFeed.open(self.remote, self.base_path, self.interval)

    async def print_json(self, *, once: bool) -> None:
        """Print each snapshot as a line; with ``once`` only the second: the first has no rates."""
        async with self.open() as feed:
            number = 0
            async for shown in feed:
                number += 1
                if once and number == 1:
                    continue
                line = shown.data.decode()
                if not line.isprintable():
                    line = json.dumps(json.loads(line))  # ASCII only
                with writing():
                    print(line, flush=True)
                if once:
                    return
        raise RemoteError(f"{self.remote.url} has ended its feed")

    async def print_once(self, console: rich.console.Console) -> None:
        """Print the second snapshot in full; the first has no rates."""
        async with self.open() as feed:
            self.view.on_open(feed.hello)
            async for shown in feed:
                self.view.take(shown.snapshot, trio.current_time())
                if self.view.samples:
                    break
        now = trio.current_time()
        drawing = draw(self.view, console.width, None, glyphs_of(console), now=now)
        with writing():
            for line in drawing.lines:
                line.rstrip()
                console.print(line, soft_wrap=True)

    async def run(self, screen: Screen, glyphs: Glyphs) -> int:
        """Draw the screen until the user quits, and return the exit code."""
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:

                def redraw() -> None:
                    self._draw(screen, glyphs)

                await nursery.start(self._watch, redraw)
                with screen.active(), trio.open_signal_receiver(*_SIGNALS) as signals:
                    redraw()
                    nursery.start_soon(self._handle_signals, signals, screen, redraw)
                    nursery.start_soon(self._handle_keys, screen, redraw)
                    nursery.start_soon(_repeat, redraw)
                    await self.left.wait()
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        if failure is not None:
            raise failure
        return self.exit_code

    def _draw(self, screen: Screen, glyphs: Glyphs) -> None:
        width, height = screen.size
        now = trio.current_time()
        drawing = draw(self.view, width, height, glyphs, now=now, interval=self.interval)
        self.page = drawing.page
        screen.show(drawing.text)

    async def _watch(
        self, redraw: Callable[[], None], *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Receive snapshots. Errors of the server are raised only before the first one."""
        while True:
            try:
                async with self.open() as feed:
                    self.view.on_open(feed.hello)
                    async for shown in feed:
                        first = self.view.snapshot is None
                        self.view.take(shown.snapshot, trio.current_time())
                        if first:
                            task_status.started()
                        redraw()
                raise RemoteError(f"{self.remote.url} has ended its feed")
            except RemoteError as error:
                if self.view.snapshot is None:
                    raise
                self.view.on_lost(str(error))
                redraw()
            await trio.sleep(_RETRY)

    async def _handle_keys(self, screen: Screen, redraw: Callable[[], None]) -> None:
        while not self.view.quit:
            keys = await screen.read_keys()
            if keys is None:
                break
            for key in keys:
                self.view.press(key, self.page)
            redraw()
        self.left.set()

    async def _handle_signals(
        self, signals: AsyncIterator[int], screen: Screen, redraw: Callable[[], None]
    ) -> None:
        async for number in signals:
            if number == signal.SIGTSTP:
                screen.restore()
                os.kill(os.getpid(), signal.SIGSTOP)
                screen.take()  # SIGCONT resumed the process
            elif number in (signal.SIGTERM, signal.SIGHUP):
                self.exit_code = 128 + number
                self.left.set()
            elif number == signal.SIGINT:
                self.left.set()
            redraw()


async def _repeat(redraw: Callable[[], None]) -> None:
    while True:
        await trio.sleep(_TICK)
        redraw()
