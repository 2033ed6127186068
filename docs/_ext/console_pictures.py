"""Take the pictures of ``docs/console.md``: ``python docs/_ext/console_pictures.py docs/pictures``.

A server is kept busy meanwhile. The pictures need Chromium and playwright.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

WIDE = {"width": 1360, "height": 960}
DESK = {"width": 1200, "height": 760}
PHONE = {"width": 390, "height": 844}
WATCHED = 25_000
"""Milliseconds for which it is watched before a picture, so that there are curves to be seen."""
SERVE = ["serve", "smollm2-135m", "--port", "0", "--max-num-seqs", "6"]
LOAD = (
    "--dataset chat --concurrency 9 --num-prompts 1000 --prefix-tokens 40 --input-tokens 24 "
    "--output-tokens 140 --range-ratio 0.7 --warmup 0"
)
"""More clients than sequences run, with chats that begin alike and answers of all lengths."""
SEVERAL = [*SERVE, "--data-parallel-size", "4", "--mock-worker", "15ms,20000/s"]


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start trioserve's command line for the block."""
    command = [sys.executable, "-m", "trioserve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


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


def workers(browser: Browser, url: str, folder: Path) -> None:
    """Picture four workers at work, the third of which was just killed."""
    page = open_page(browser, url, "engine", size=WIDE, dark=False)
    page.wait_for_timeout(WATCHED)
    row = page.locator(".workers-table tr[data-index='2']")
    found = re.search(r"\d+", row.locator(".worker-process").inner_text())
    assert found is not None
    os.kill(int(found[0]), signal.SIGKILL)
    page.wait_for_selector(".workers-table [data-trouble]")
    page.wait_for_timeout(600)
    clip = {"x": 0, "y": 44, "width": WIDE["width"], "height": 480}
    page.screenshot(path=folder / "console-workers.png", clip=clip)  # type: ignore[arg-type]


@contextlib.contextmanager
def server_of(serve: list[str]) -> Iterator[str]:
    """Yield the URL of a server that is started for the block."""
    with started(*serve) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]


def main(folder: Path) -> None:
    """Take all pictures into ``folder``."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        sys.exit("the pictures are taken with Chromium: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with server_of(SERVE) as url:
            playground(browser, url, folder)
            with started("bench", url, *LOAD.split()):
                engine(browser, url, folder)
        with server_of(SEVERAL) as url, started("bench", url, *LOAD.split()):
            workers(browser, url, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
