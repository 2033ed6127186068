"""``trioserve top`` without a terminal: snapshots into lines, keys into what is shown, the feed."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import pytest
import rich.console
import trio
from rich.text import Text

from tests.support.live_snapshots import NOW, hello, row, snapshot, some_rows
from tests.support.load_server import CUT, FakeServer, Script
from trioserve.cli.commands import main
from trioserve.cli.top.command import Top
from trioserve.cli.top.drawing import draw
from trioserve.cli.top.feed import SnapshotFeed
from trioserve.cli.top.glyphs import (
    ASCII,
    UNICODE,
    bar,
    count,
    duration,
    seconds,
    sparkline,
)
from trioserve.cli.top.keys import KeyReader
from trioserve.cli.top.screen import Screen
from trioserve.cli.top.view import View
from trioserve.load.remote import Remote, RemoteError
from trioserve.observability.live.schema import Counts, Pages, Rates, WorkerState

# -- drawing


def a_view(*snapshots: Any) -> View:
    view = View(url="http://127.0.0.1:8000")
    view.on_open(hello())
    for number, each in enumerate(snapshots):
        view.take(each, number)
    return view


def growing(number: int) -> Any:
    rows = some_rows()
    rows[2] = row(3, output_tokens=30 + 8 * number)
    return snapshot(number, requests=rows)


def plain(view: View, width: int, height: int | None, **more: Any) -> list[str]:
    """Return what is drawn, which must have that size."""
    lines = draw(view, width, height, more.pop("glyphs", UNICODE), **more).lines
    assert max(line.cell_len for line in lines) <= width
    assert height is None or len(lines) == height
    return [line.plain.rstrip() for line in lines]


USUAL = """\
 smollm2-135m  ok  up 1:02:09  http://127.0.0.1:8000  0.1.0  cpu
 worker       running as 4242 for 1:02:04
 generated    812 tok/s        ████   first token  61 ms, p99 1.25 s        ████
 prompts      1203 tok/s       ████   next token   9.8 ms, p99 13 ms        ████
 finished     3.1 req/s        ████   in the queue -
 device idle  12%              ▂▂▂▂   steps        98/s  9.8 ms  2.5 rows
 pages        ██████▒▒▒▒░░░░░░░░░░  300 held, 200 cached of 1000, 25% found
 requests     2 running, 1 waiting; 12.3k ended, 6 aborted, 0 failed
REQUEST            STATE          AGE PROMPT CACHED OUTPUT DONE      TOK/S PAGES
chatcmpl-1         waiting        14s    100     16      0 ░░░░░░░░    0.0     0
chatcmpl-2         prefill        24s    200     16      0 ▒▒▒▒░░░░    0.0    14
chatcmpl-3         decode         34s    300     16     62 █████░░░    8.0    21
chatcmpl-4         abort          20s    400     16     40 ███░░░░░           28

 q quit  p pause  t tasks  s sort: newest  ↑↓ scroll                   1-4 of 4"""


def test_a_snapshot_in_a_usual_terminal() -> None:
    view = a_view(*(growing(number) for number in range(5)))
    lines = plain(view, 80, 24, now=4.0)
    assert lines[:14] + lines[-1:] == USUAL.split("\n")
    assert not any(lines[14:-1])


def test_what_there_is_too_little_room_for_goes() -> None:
    view = a_view(*(growing(number) for number in range(5)))
    narrow = plain(view, 40, 24, glyphs=ASCII)
    assert narrow[2] == " generated    812 tok/s             ####"
    assert narrow[6] == " first token  61 ms, p99 1.25 s     ####"
    assert narrow[11] == "REQUEST        STATE          AGE OUTPUT"
    assert narrow[14] == "chatcmpl-3     decode         34s     62"
    assert "\n".join(narrow).isascii()
    short = plain(view, 80, 10)
    assert short[2].startswith(" pages")
    assert short[-2:] == [USUAL.split("\n")[12], USUAL.split("\n")[-1]]
    for width in (1, 2, 5, 13, 200):
        for height in (1, 2, 5, 100):
            plain(view, width, height)


def test_everything_is_there_without_a_height_but_no_keys() -> None:
    rows = [row(number) for number in range(1, 60)]
    lines = plain(a_view(snapshot(requests=rows)), 80, None)
    assert lines[-1].startswith("chatcmpl-59 ")
    assert " 812 tok/s" in lines[2]
    assert "█" not in lines[2], "one snapshot is no line"


def test_what_is_wrong_is_told_in_words() -> None:
    worker = WorkerState(
        pid=None, state="restarting", restarts=2, since=NOW, last_death="killed by \x1b[31mSIGKILL"
    )
    counts = Counts(
        **{**msgspec.structs.asdict(snapshot().counts), "preempted": 7, "tokenizing": 1},
    )
    told = snapshot(
        health="no_worker",
        paused=True,
        worker=worker,
        counts=counts,
        rates=Rates(),
        pages=Pages(total=0, free=0, cached=0, held=0, host_total=100, host_used=3),
        requests=[row(1, id="evil\x1b[2J\u202e", adapter="poet", priority=3)],
    )
    view = a_view(told)
    lines = plain(view, 120, 20, now=9.0)
    assert lines[0].startswith(
        " smollm2-135m  no_worker  scheduling is paused  no snapshot for 9 s  up "
    )
    assert lines[1] == (" worker       restarting for 0s, 2 restarts (killed by \\x1b[31mSIGKILL)")
    assert "device idle  - " in lines[5]
    assert lines[6].endswith("  0 held, 0 cached of 0, host 3 of 100")
    assert lines[7].startswith(" requests     2 running, 1 waiting, 1 tokenizing, 7 preempted; ")
    assert lines[8].endswith(" PRIORITY ADAPTER")
    assert lines[9].startswith("evil\\x1b[2J\\u202e ")
    assert lines[9].endswith("        3 poet")
    view.on_lost("http://h can't be reached: Connection refused")
    assert plain(view, 120, 20)[0].startswith(
        " smollm2-135m  lost, trying again: http://h can't be reached: Connection refused  up "
    )


def test_the_tree_of_tasks() -> None:
    view = a_view(snapshot())
    view.press("t")
    lines = plain(view, 80, 24)
    assert lines[8:13] == [
        "TASKS",
        "run_server waiting",
        "├─ Scheduler.run ready",
        "└─ listen waiting (9 more below)",
        "   └─ connection x3 waiting",
    ]
    assert "t requests" in lines[-1]
    assert lines[-1].endswith(" 1-4 of 4")


def test_no_color_is_needed() -> None:
    """Without colors, held, cached and free pages and all states are still told apart."""
    drawing = draw(a_view(growing(0), growing(1)), 80, 24, UNICODE)
    shown = {}
    for no_color in (True, False):
        console = rich.console.Console(
            file=io.StringIO(), width=80, force_terminal=True, no_color=no_color, _environ={}
        )
        with console.capture() as capture:
            console.print(drawing.text)
        shown[no_color] = capture.get()
    assert "\x1b[32m" in shown[False]
    assert "\x1b[3" not in shown[True]
    assert Text.from_ansi(shown[True]).plain == Text.from_ansi(shown[False]).plain


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (sparkline([0, 1, None, 4, 8], 6, UNICODE), " ▁▂ ▅█"),
        (sparkline([9, 0.5, 2.0], 2, ASCII, top=1.0), "=#"),
        (sparkline([0, 0], 2, UNICODE), "▁▁"),
        (sparkline([1, 2], 0, UNICODE), ""),
        ("".join(bar((1, 400), 1000, 10, UNICODE)), "█▒▒▒▒░░░░░"),
        ("".join(bar((900, 900), 1000, 10, ASCII)), "#########+"),
        ("".join(bar((5, 0), 0, 4, ASCII)), "#..."),
        (count(0), "0"),
        (count(9999), "9999"),
        (count(12345), "12.3k"),
        (count(131072), "131k"),
        (count(4_560_000), "4.6M"),
        (seconds(None), "-"),
        (seconds(0.0004), "0.4 ms"),
        (seconds(0.0614), "61 ms"),
        (seconds(0.9999), "1.00 s"),
        (seconds(250), "250 s"),
        (duration(-1), "0s"),
        (duration(753), "12:33"),
        (duration(3 * 86400 + 4 * 3600 + 12 * 60), "3d 04:12"),
    ],
)
def test_glyphs(made: str, text: str) -> None:
    assert made == text


# -- what the person wants


def test_keys_are_read_from_any_pieces() -> None:
    data = b"q\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[1;5H \x1b[24~\xc3\xa9\x00t\x1b"
    keys = ["q", "up", "down", "page up", "page down", " ", "t"]
    for size in (1, 2, 3, 100):
        reader = KeyReader()
        pieces = (data[start : start + size] for start in range(0, len(data), size))
        assert [key for piece in pieces for key in reader.feed(piece)] == keys
    assert reader.feed(b"[B") == ["down"]
    assert KeyReader().feed(b"\x1b[" + b"1" * 40) == ["[", *"1" * 40]


def test_the_lower_part_scrolls_as_far_as_it_goes() -> None:
    view = a_view(snapshot(requests=[row(number) for number in range(1, 41)]))
    page = draw(view, 80, 20, UNICODE).page
    assert page == 10
    top = []
    for key in ("up", "down", "page down", "page up", "end", "page down", "home", "k", "j"):
        view.press(key, page)
        top.append(plain(view, 80, 20)[9].split()[0].removeprefix("chatcmpl-"))
    assert top == ["1", "2", "12", "2", "31", "31", "1", "1", "2"]
    view.press("end", page)
    view.take(snapshot(1), 1)
    assert plain(view, 80, 20)[-1].endswith(" 1-4 of 4")


def test_the_requests_are_sorted_as_asked() -> None:
    view = a_view(snapshot(requests=[row(1, pages=50), row(2, output_tokens=90), row(3)]))
    orders = {}
    for _ in range(5):
        orders[view.sort] = [each.id[-1] for each in view.rows]
        view.press("s")
    assert orders == {
        "newest": ["1", "2", "3"],
        "oldest": ["3", "2", "1"],
        "prompt": ["3", "2", "1"],
        "output": ["2", "3", "1"],
        "pages": ["1", "3", "2"],
    }
    assert view.sort == "newest"


def test_while_it_is_paused_nothing_moves_and_nothing_is_missed() -> None:
    view = a_view(growing(0), growing(1))
    view.press("p")
    shown = plain(view, 80, 24)
    assert "PAUSED" in shown[0]
    for number in range(2, 6):
        view.take(growing(number), number)
    assert plain(view, 80, 24) == shown
    view.press(" ")
    assert view.snapshot == growing(5)
    assert len(view.samples) == 5
    assert plain(view, 80, 24)[11].split()[5:8] == ["70", "██████░░", "8.0"]


# -- the feed


def event(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


HELLO = event("hello", hello())


def snapshots(*numbers: int) -> Script:
    return [(0, HELLO), *((1, event("picture", growing(number))) for number in numbers)]


@attrs.define
class Server:
    """Gives each connection the next of its scripts; when there are none left, it is gone."""

    nursery: trio.Nursery
    scripts: list[Script]
    asked: list[bytes] = attrs.field(factory=list)

    async def connect(self) -> trio.abc.Stream:
        if not self.scripts:
            raise OSError("nobody there")
        server = FakeServer(self.nursery, lambda _: self.scripts.pop(0))
        return await server.connect()

    @property
    def remote(self) -> Remote:
        return Remote(connect=self.connect, host="h", url="http://h")


@pytest.mark.parametrize(
    ("status", "script", "message"),
    [
        (404, [(0, b"no")], "has no live feed: it isn't trioserve, or runs with --no-console"),
        (401, [(0, b"no")], "refuses with 401: give the right --api-key"),
        (200, [(0, b"<html>")], "http://h has no live feed$"),
        (200, [(0, event("hello", {"model": "m"}))], "snapshots of another version than 1: Object"),
        (200, [(0, HELLO), (0, event("picture", {}))], "snapshots of another version than 1: Obj"),
        (200, [(0, HELLO), (40, b":\n")], "http://h has sent nothing for 31 s"),
    ],
)
async def test_a_server_without_a_feed_is_told(
    status: int, script: Script, message: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        server = FakeServer(nursery, lambda _: script, status=status)
        remote = Remote(connect=server.connect, host="h", url="http://h")
        with pytest.raises(RemoteError, match=message):
            async with SnapshotFeed.open(remote, "/base", 1.0) as feed:
                await anext(feed)
        target = server.requests[0][0].target
        nursery.cancel_scope.cancel()
    assert target == b"/base/console/live?interval=1&nodes=0"


async def test_snapshots_are_printed_as_they_come(
    capsys: pytest.CaptureFixture[str], autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        server = Server(nursery, [snapshots(1, 2, 3), snapshots(1, 2, 3), snapshots(1, 2, 3)])
        top = Top(server.remote, "", 1.0)
        await top.print_json(once=True)
        one = capsys.readouterr().out
        with pytest.raises(RemoteError, match="has ended its feed"):
            await top.print_json(once=False)
        three = capsys.readouterr().out
        console = rich.console.Console(file=io.StringIO(), width=80, _environ={})
        await top.print_once(console)
        nursery.cancel_scope.cancel()
    assert [json.loads(line)["now"] for line in one.splitlines()] == [NOW + 2]
    assert [json.loads(line)["now"] for line in three.splitlines()] == [NOW + 1, NOW + 2, NOW + 3]
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == " smollm2-135m  ok  up 1:02:07  http://h  0.1.0  cpu"
    assert lines[-2].split()[:2] == ["chatcmpl-3", "decode"]


@attrs.define(eq=False)
class FakeScreen:
    """A screen whose person does something when something shows."""

    does: list[tuple[str, str | signal.Signals]]
    """Texts to wait for, each with the key to press then, or the signal to send."""
    shown: list[str] = attrs.field(factory=list)
    is_taken: bool = False
    _pressed: list[str] = attrs.field(factory=list)
    _came: trio.Event = attrs.field(factory=trio.Event)
    size: tuple[int, int] = (160, 24)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.is_taken = True
        try:
            yield
        finally:
            self.is_taken = False

    def show(self, text: Text) -> None:
        if not self.is_taken:
            return
        self.shown.append(text.plain)
        if self.does and self.does[0][0] in text.plain:
            _, act = self.does.pop(0)
            if isinstance(act, signal.Signals):
                signal.raise_signal(act)
                return
            self._pressed.append(act)
            self._came.set()

    async def read_keys(self) -> list[str] | None:
        await self._came.wait()
        self._came = trio.Event()
        keys, self._pressed = self._pressed, []
        return None if keys == [""] else keys

    def as_screen(self) -> Screen:
        return self  # type: ignore[return-value]


async def top(screen: FakeScreen, *scripts: Script, back_after: float = 0.0) -> int:
    """Run it over a server that is gone after the first script, until ``back_after`` seconds."""
    async with trio.open_nursery() as nursery:
        server = Server(nursery, list(scripts[:1]))

        async def come_back() -> None:
            await trio.sleep(back_after)
            server.scripts.extend(scripts[1:])

        nursery.start_soon(come_back)
        with trio.fail_after(300):
            code = await Top(server.remote, "", 1.0).run(screen.as_screen(), UNICODE)
        nursery.cancel_scope.cancel()
    assert not screen.is_taken
    assert not screen.does
    return code


async def test_a_server_that_goes_is_found_again(autojump_clock: trio.testing.MockClock) -> None:
    screen = FakeScreen([
        ("lost, trying again: http://h: the connection ended before the answer did", "t"),
        ("lost, trying again: http://h can't be reached: nobody there", "t"),
        ("up 1:02:11", "q"),
    ])  # fmt: skip
    script = [*snapshots(1, 2), (1, CUT)]
    assert await top(screen, script, snapshots(5, 6, 7, 8), back_after=10) == 0
    assert "TASKS" in "".join(screen.shown)
    assert "trying again" not in screen.shown[-1]


@pytest.mark.parametrize(
    ("act", "code"),
    [("q", 0), ("", 0), (signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
async def test_however_it_ends_the_terminal_is_given_back(
    act: str | signal.Signals, code: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A key, a terminal that is gone, or a signal."""
    assert await top(FakeScreen([("up 1:02:07", act)]), snapshots(*range(1, 9))) == code


async def test_a_server_that_is_not_there_at_first_is_a_failure() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(RemoteError, match="nobody there")):
        await top(FakeScreen([]))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--interval 0.01", "--interval must be a number from 0.1 to 10; got 0.01"),
        ("--interval soon", "--interval must be a number from 0.1 to 10; got 'soon'"),
        ("ftp://h", "URL: expected a URL such as"),
        ("--insecure", "--insecure needs a URL that begins with https://"),
    ],
)
def test_a_wrong_option_is_a_line(argv: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *argv.split()]) == 2
    assert capsys.readouterr().err.startswith(f"trioserve top: {line}")
