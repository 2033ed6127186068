"""A browser, the real server that it visits, and pages that have to behave whatever is tested."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator

import attrs
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.support.model_server import Server, serving

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE = 60_000
"""Milliseconds: past what a busy machine needs, so that only what never comes fails."""


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    """Wait for what only the test can tell; ``page`` lives on meanwhile.

    The page's policy forbids what playwright's ``wait_for_function`` does.
    """
    deadline = time.monotonic() + PATIENCE / 1000
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("the console is tested in Chromium: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with serving("--admin-api-key", "admin", "--enable-prefix-caching") as server:
        yield server


@attrs.frozen
class Console:
    """A browser that opens pages of the console.

    What goes wrong on any of them is kept: errors of scripts, and what the security policy refused.
    """

    context: BrowserContext
    server: Server
    complaints: list[str] = attrs.field(factory=list)
    addresses: set[str] = attrs.field(factory=set)

    def open(self, view: str = "playground", *, key: str = "secret", admin_key: str = "") -> Page:
        """Return a page that has been given keys, once it has read the list of models."""
        page = self.context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._listen(message.type, message.text))
        page.on("request", lambda request: self.addresses.add(request.url))
        page.add_init_script(
            f"sessionStorage.setItem('trioserve.api-key', {key!r});"
            f"sessionStorage.setItem('trioserve.admin-key', {admin_key!r});"
        )
        page.goto(f"{self.server.url}/console#{view}")
        page.wait_for_selector("#model-choice option", state="attached")
        return page

    def _listen(self, kind: str, text: str) -> None:
        # Chromium itself reports every answer that isn't a success.
        if kind == "error" and not text.startswith("Failed to load resource"):
            self.complaints.append(text)


@pytest.fixture
def console(browser: Browser, server: Server) -> Iterator[Console]:
    """Pages that share nothing with other tests', and must raise no error and visit no stranger."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    console = Console(context, server)
    yield console
    context.close()
    assert console.complaints == []
    assert [url for url in console.addresses if not url.startswith(f"{server.url}/")] == []
