"""Several workers in a browser: which is sick, one alone, and what an admin does with them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import PATIENCE, Console
from tests.support.model_server import MODEL, Server, serving

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Two workers that compute nothing, and take their time for it."""
    options = ("--data-parallel-size", "2", "--mock-worker", "20ms", "--admin-api-key", "admin")
    with serving(*options) as server:
        yield server


@pytest.fixture
def workers(browser: Browser, pair: Server) -> Iterator[Console]:
    context = browser.new_context()
    console = Console(context, pair)
    yield console
    context.close()
    pair.wait_until_idle()
    assert console.complaints == []


@contextlib.contextmanager
def asked(server: Server) -> Iterator[None]:
    """Have a request computed for as long as the block lasts."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    body = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 8000}
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    with contextlib.closing(connection):
        yield


def row(page: Page, index: int | str) -> Locator:
    return page.locator(f".workers-table tr[data-index='{index}']")


def place(page: Page) -> int:
    """Return the number of the worker that the only running request is on."""
    worker = page.locator(".request[data-state=decode] .request-worker")
    expect(worker).to_have_text(re.compile(r"worker \d"))
    return int(worker.inner_text().split()[-1])


def test_a_single_worker_has_no_table(console: Console) -> None:
    page = console.open("engine", admin_key="admin")
    expect(page.locator(".worker .pill")).to_have_text("Serving")
    expect(page.locator(".panel-workers")).to_be_hidden()
    expect(page.get_by_role("button", name="Add a worker")).to_be_visible()


def test_each_worker_has_a_row_and_can_be_shown_alone(workers: Console) -> None:
    with asked(workers.server):
        look_at_each(workers.open("engine"))


def look_at_each(page: Page) -> None:
    expect(page.locator(".worker .pill")).to_have_text("2 of 2 workers run")
    expect(page.locator(".workers-table tbody tr")).to_have_count(2)
    expect(page.get_by_role("button", name="Remove worker 0")).to_be_hidden()
    busy = place(page)
    other = 1 - busy
    expect(row(page, busy).locator(".worker-running")).to_have_text("1")
    expect(row(page, other).locator(".worker-running")).to_have_text("0")
    expect(row(page, busy).locator(".worker-tokens")).not_to_have_text(re.compile("^0$"))
    # A row stays the same element from picture to picture.
    row(page, busy).evaluate("row => row.dataset.marked = 'yes'")

    names = [page.get_by_role("button", name=f"Worker {index}", exact=True) for index in (0, 1)]
    names[other].click()
    expect(names[other]).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".worker-scope")).to_contain_text(f"Only worker {other}")
    expect(page.locator(".panel-requests .left-out")).to_have_text("No requests.")
    generated = page.locator(".figure", has_text="Generated").locator(".figure-number")
    expect(generated).to_have_text("0")
    page.keyboard.press("ArrowUp" if other else "ArrowDown")
    expect(names[busy]).to_be_focused()
    page.keyboard.press("Enter")
    expect(generated).not_to_have_text("0")
    expect(page.locator(".request[data-state=decode]")).to_have_count(1)
    expect(page.locator(".panel-steps .hint")).to_contain_text(f"of worker {busy}")
    page.get_by_role("button", name="Show all workers").click()
    expect(page.locator(".worker-scope")).to_be_hidden()
    assert row(page, busy).get_attribute("data-marked") == "yes"


def test_a_lost_worker_stands_out_and_its_request_has_moved(workers: Console) -> None:
    with asked(workers.server):
        kill_the_busy_one(workers.open("engine"))


def kill_the_busy_one(page: Page) -> None:
    sick = place(page)
    pid = re.search(r"\d+", row(page, sick).locator(".worker-process").text_content() or "")
    assert pid is not None
    os.kill(int(pid[0]), signal.SIGKILL)
    lost = page.locator(".workers-table tr[data-trouble]")
    expect(lost).to_have_attribute("data-index", str(sick))
    expect(lost.locator(".pill")).to_have_text("lost")
    expect(page.locator(".worker .pill")).to_have_text("1 of 2 workers run")
    notice = page.locator(".worker-notices .notice")
    expect(notice).to_contain_text(f"Worker {sick} was lost")
    moved = page.locator(".request[data-state=decode] .request-worker")
    expect(moved).to_have_text(f"→ worker {1 - sick}")
    page.locator(".request[data-state=decode] .request-id").click()
    expect(page.locator(".request-details")).to_contain_text(f"{1 - sick}, moved once")
    expect(row(page, sick).locator(".pill")).to_have_text("running")
    expect(notice).to_contain_text("replaced")
    expect(row(page, sick)).to_contain_text("1 restart")


def test_an_admin_adds_and_removes_workers(workers: Console) -> None:
    page = workers.open("engine", admin_key="admin")
    rows = page.locator(".workers-table tbody tr")
    page.get_by_role("button", name="Add a worker").click()
    expect(row(page, 2).locator(".pill")).to_have_text("loading")
    said = page.locator(".controls [role=status]")
    expect(said).to_have_text("Worker 2 serves.")
    expect(row(page, 2).locator(".pill")).to_have_text("running")
    remove = page.get_by_role("button", name="Remove worker 2")
    remove.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Remove worker 2?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Worker 2", exact=True).click()
    remove.click()
    dialog.get_by_role("button", name="Remove").click()
    expect(said).to_have_text("Worker 2 has ended.")
    expect(rows).to_have_count(2)
    expect(page.locator(".worker-scope")).to_be_hidden()
