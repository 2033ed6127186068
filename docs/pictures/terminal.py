"""Draws ``top.svg`` and ``top-workers.svg``: what ``trioserve top`` shows of a server in use.

Run ``python docs/pictures/terminal.py`` where trioserve is installed. It takes a minute and needs
no model: the workers compute nothing and say a fixed text. One of four is killed.
"""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import rich.console
import trio

from trioserve.cli.remote import remote_of
from trioserve.cli.remote_options import RemoteOptions
from trioserve.cli.top.drawing import draw
from trioserve.cli.top.feed import SnapshotFeed
from trioserve.cli.top.glyphs import UNICODE
from trioserve.cli.top.view import View
from trioserve.load.remote import Remote

WIDTH, HEIGHT = 100, 22
PICTURES = 25
CLIENTS_PER_WORKER = 7
SERVE = (
    *("serve", "smollm2-135m", "--port", "0", "--mock-worker", "12ms,20000/s"),
    *("--log-level", "warning"),
)
WORDS = ("keeper", "lighthouse", "wrote", "down", "what", "sea", "had", "brought", "night")


def main() -> None:
    draw_server("top", workers=1)
    draw_server("top-workers", workers=4)


def draw_server(name: str, *, workers: int) -> None:
    command = [sys.executable, "-m", "trioserve", *SERVE, "--data-parallel-size", str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            view = trio.run(use_and_watch, server.stdout.readline().split()[-1], workers)
        finally:
            server.terminate()
    view.url = "http://127.0.0.1:8000"
    Path(__file__).with_name(f"{name}.svg").write_text(svg(view))


async def use_and_watch(url: str, workers: int) -> View:
    remote, _ = remote_of(RemoteOptions(url=url))
    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS_PER_WORKER * workers):
            nursery.start_soon(ask_again_and_again, remote, number)
        view = await watch(remote)
        nursery.cancel_scope.cancel()
    return view


async def ask_again_and_again(remote: Remote, number: int) -> None:
    chance = random.Random(number)
    await trio.sleep(chance.uniform(0, 4))
    while True:
        words = chance.choices(WORDS, k=chance.choice((40, 400, 1500)))
        body = {
            "model": "smollm2-135m",
            "prompt": " ".join(words),
            "max_tokens": chance.randrange(100, 500),
            "stream": True,
        }
        async with remote.events("/v1/completions", body) as events:
            async for _ in events:
                pass
        await trio.sleep(chance.uniform(0, 1))


async def watch(remote: Remote) -> View:
    """Watch for a while; the third of several workers is killed just before the end."""
    view = View(url=remote.url)
    async with SnapshotFeed.open(remote, "", 0.5) as feed:
        view.on_open(feed.hello)
        async for shown in feed:
            view.take(shown.snapshot, trio.current_time())
            if len(view.samples) == PICTURES:
                break
            if view.workers and len(view.samples) == PICTURES - 1:
                pid = view.workers[2].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
    return view


def svg(view: View) -> str:
    console = rich.console.Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor"
    )
    drawing = draw(view, WIDTH, HEIGHT, UNICODE, now=view.received or 0.0)
    console.print(drawing.text, no_wrap=True, crop=True)
    picture = console.export_svg(title="trioserve top", unique_id="top")
    # Fonts from elsewhere: a page of ours loads nothing from another host.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


if __name__ == "__main__":
    main()
