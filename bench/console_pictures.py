"""The pictures of ``docs/console.md``: ``python -m bench.console_pictures docs/pictures``.

They are taken of a server that is kept busy, in the Chromium that is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from bench.servers import MODEL

WIDE = {"width": 1360, "height": 960}
DESK = {"width": 1200, "height": 760}
PHONE = {"width": 390, "height": 844}
CLIENTS = 9
WATCHED = 25_000
"""Milliseconds for which it is watched before a picture, so that there are curves to be seen."""
SUBJECTS = ("the sea", "a lighthouse", "winter", "an old clock", "bread", "a long journey")
STYLES = ("as a letter", "for children", "in short sentences", "as a dialogue")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Yield a server's address, for as long as the block lasts."""
    command = [sys.executable, "-m", "trioserve", "serve", MODEL, "--port", "0"]
    command += ["--max-num-seqs", "6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    """Have clients ask the server one thing after the other, until the block is left."""
    stop = threading.Event()
    clients = [threading.Thread(target=_ask, args=(url, i, stop)) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def _ask(url: str, number: int, stop: threading.Event) -> None:
    draw = random.Random(number)
    system = "You are a writer of short and vivid texts. " * draw.choice((1, 4))
    while not stop.wait(draw.uniform(0, 2)):
        text = f"Write about {draw.choice(SUBJECTS)}, {draw.choice(STYLES)}."
        roles = {"system": system, "user": text}
        body = {
            "messages": [{"role": role, "content": said} for role, said in roles.items()],
            "max_tokens": draw.choice((60, 120, 240)),
            "seed": draw.randrange(1000),
        }
        data = json.dumps({"model": MODEL, **body}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
        with urllib.request.urlopen(request) as response:
            response.read()


def open_page(browser: Browser, url: str, view: str, *, size: dict[str, int], dark: bool) -> Page:
    """Return a page of the console."""
    options: dict[str, Any] = {"color_scheme": "dark" if dark else "light", "viewport": size}
    page = browser.new_context(**options).new_page()
    page.goto(f"{url}/console#{view}")
    page.wait_for_selector("#model-choice option", state="attached")
    return page


def playground(browser: Browser, url: str, folder: Path) -> None:
    """Picture an answer, and the alternatives of one of its tokens."""
    page = open_page(browser, url, "playground", size=DESK, dark=False)
    for name, value in {"temperature": "0.4", "max_tokens": "120", "seed": "2"}.items():
        page.fill(f"#settings [name={name}]", value)
    page.fill("#settings [name=system]", "You answer in two or three sentences.")
    page.get_by_label("Underline improbable tokens").check()
    for question in ("Why is the sky blue?", "And why is it red in the evening?"):
        page.fill("#message", question)
        page.keyboard.press("Enter")
        page.wait_for_selector("#send:not([hidden])")
    page.locator(".turn").last.locator(".rare-1, .rare-0").nth(1).hover()
    page.screenshot(path=folder / "console-playground.png")


def engine(browser: Browser, url: str, folder: Path) -> None:
    """Picture the engine at work, and again after its worker was killed."""
    page = open_page(browser, url, "engine", size=WIDE, dark=True)
    phone = open_page(browser, url, "engine", size=PHONE, dark=False)
    page.wait_for_timeout(WATCHED)
    phone.screenshot(path=folder / "console-phone.png")
    phone.close()
    page.locator(".request[data-state=decode] .request-id").last.click()
    page.wait_for_timeout(1000)
    page.screenshot(path=folder / "console-engine.png")

    found = re.search(r"process (\d+)", page.locator(".worker-facts").inner_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    page.wait_for_selector(".notice-restart:not([hidden])")
    page.wait_for_selector("[data-worker=running]")
    page.wait_for_timeout(6000)
    clip = {"x": 0, "y": 44, "width": WIDE["width"], "height": 270}
    page.screenshot(path=folder / "console-restart.png", clip=clip)  # type: ignore[arg-type]


def main(folder: Path) -> None:
    """Take all pictures into ``folder``."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        sys.exit("the pictures are taken with Chromium: apt install chromium")
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        playground(browser, url, folder)
        with busy(url):
            engine(browser, url, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
