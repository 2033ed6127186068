"""The live picture in a browser, of the real engine: it moves, heals, and costs nothing unseen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal

from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.conftest import PATIENCE, Console, wait_until
from tests.support.model_server import serving

expect.set_options(timeout=PATIENCE)

COUNTING = "1 2 3 4 5 6 7 8 9 10 11 12"


def complete(page: Page, *, max_tokens: int = 8000) -> None:
    """Have the model count, and wait until it does."""
    page.get_by_text("Completion", exact=True).click()
    fields = {"temperature": 0, "max_tokens": max_tokens}
    for name, value in fields.items():
        # Beside the engine there is little room, and settings are folded away.
        page.locator(f"#settings [name={name}]").evaluate(f"field => field.value = '{value}'")
    page.fill("#prompt", COUNTING)
    page.keyboard.press("Control+Enter")
    wait_until(page, lambda: num_tokens(page) > 3)


def num_tokens(page: Page) -> int:
    return page.locator(".token").count()


def num_feeds_left(console: Console) -> int:
    """Return how many feeds were open and are no more, as the server's log has it."""
    lines = [json.loads(line) for line in console.server.log().splitlines() if line[:1] == "{"]
    return sum(line.get("path") == "/console/live" for line in lines)


def wait_for_feeds_left(page: Page, console: Console, number: int) -> None:
    wait_until(page, lambda: num_feeds_left(console) >= number)


def test_figures_and_requests_move(console: Console) -> None:
    page = console.open("both")
    complete(page)
    decode = page.locator(".lane", has_text="Decode")
    expect(decode.locator(".lane-number")).to_have_text("1")
    generated = page.locator(".figure", has_text="Generated").locator(".figure-number")
    expect(generated).not_to_have_text(re.compile(r"^[0\u2013]$"))
    row = page.locator(".request[data-state=decode]")
    before = row.locator(".request-tokens").inner_text()
    expect(row.locator(".request-tokens")).not_to_have_text(before)
    expect(row.locator(".bars rect.bar-decode")).to_have_count(1)
    expect(page.locator(".steps g").first).to_be_attached()

    row.locator(".request-id").click()
    details = page.locator(".request-details")
    expect(details.locator("tbody")).to_contain_text("decode")
    expect(details.get_by_role("button", name="Abort")).to_be_hidden()
    page.click("#stop")
    expect(page.locator(".request-line .state-abort")).to_be_visible()
    expect(details).to_contain_text("abort")
    expect(page.locator(".spark-line").first).to_have_attribute("d", re.compile("L"))


def test_the_share_of_accepted_drafts_is_told(browser: Browser) -> None:
    drafts = json.dumps({"method": "suffix", "adaptive": False})
    context = browser.new_context()
    with serving("--speculative-config", drafts) as server, contextlib.closing(context):
        console = Console(context, server)
        page = console.open("both")
        generated = page.locator(".figure", has_text="Generated")
        expect(generated).to_contain_text("rows a step")
        expect(generated).not_to_contain_text("of drafts")
        complete(page)
        expect(generated).to_contain_text(re.compile(r"rows a step, (?!0\s)[\d.]+\s% of drafts"))
        page.click("#stop")
        server.wait_until_idle()
        assert console.complaints == []


def test_pages_and_the_prefix_tree_tell_what_is_kept(console: Console) -> None:
    page = console.open("both")
    complete(page, max_tokens=40)
    expect(page.locator("#send")).to_be_visible()
    numbers = page.locator(".panel-pages .legend-number")
    expect(numbers.nth(0)).to_have_text("0")
    expect(numbers.nth(1)).not_to_have_text("0")
    runs = page.locator(".icicle .run-cached")
    expect(runs.first).to_be_attached()
    page.locator(".icicle").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".panel-prefix .hint")).to_contain_text("cached")


def test_the_tree_of_tasks_opens_and_closes_with_keys(console: Console) -> None:
    page = console.open("engine")
    tree = page.get_by_role("tree")
    items = tree.get_by_role("treeitem")
    expect(tree).to_contain_text("cheduler")
    items.first.focus()
    before = items.count()
    page.keyboard.press("ArrowLeft")
    expect(items).to_have_count(1)
    expect(items.first).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("ArrowRight")
    expect(items.first).to_have_attribute("aria-expanded", "true")
    assert items.count() >= before - 5  # tasks come and go
    page.keyboard.press("ArrowDown")
    expect(items.nth(1)).to_be_focused()


def test_an_admin_controls_and_others_look(console: Console) -> None:
    page = console.open("engine")
    expect(page.get_by_text("Read-only.")).to_be_visible()
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    page.get_by_role("button", name="Enter the admin key").click()
    page.fill("#admin-key", "admin")
    page.keyboard.press("Enter")
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    expect(page.locator(".worker .pill")).to_have_text("Paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".worker .pill")).to_have_text("Serving")
    page.get_by_role("button", name="Empty the cache").click()
    expect(page.locator(".controls [role=status]")).to_contain_text("freed")

    page.goto(f"{console.server.url}/console#both")
    complete(page)
    row = page.locator(".request[data-state=decode]")
    row.locator(".request-id").click()
    page.get_by_role("button", name="Abort").click()
    expect(page.locator(".answer-status")).to_contain_text("aborted by the server")
    console.server.wait_until_idle()


def test_no_admin_key_is_asked_for_where_the_server_has_none(console: Console) -> None:
    console.context.route("**/is_paused", lambda route: route.fulfill(status=403))
    page = console.open("engine")
    expect(page.get_by_text("Read-only: the server has no admin key.")).to_be_visible()
    expect(page.get_by_role("button", name="Enter the admin key")).to_have_count(0)
    page.keyboard.press("k")
    expect(page.locator("#api-key")).to_be_visible()
    expect(page.locator("#admin-key")).to_be_hidden()


def test_a_killed_worker_is_seen_and_the_answer_goes_on(console: Console) -> None:
    page = console.open("both")
    complete(page)
    facts = page.locator(".worker-facts")
    expect(facts).to_contain_text("0 restarts")
    pid = re.search(r"process (\d+)", facts.inner_text())
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGKILL)
    expect(facts).to_contain_text("1 restart")
    expect(page.locator(".notice-restart")).to_contain_text("was lost")
    expect(page.locator(".worker [data-worker=running]")).to_be_visible()
    expect(page.locator(".spark-restarts line").first).to_be_attached()
    expect(facts).not_to_contain_text(f"process {pid[1]}")
    told = num_tokens(page)
    wait_until(page, lambda: num_tokens(page) > told + 5)
    expect(page.locator(".answer .notice")).to_be_hidden()
    page.click("#stop")
    console.server.wait_until_idle()


def test_it_reads_only_what_is_looked_at(console: Console) -> None:
    page = console.open("playground")
    feed = page.locator("#feed")
    assert not any("/console/live" in url for url in console.addresses)
    left = num_feeds_left(console)
    page.keyboard.press("e")
    expect(feed).to_have_attribute("data-feed", "live")
    page.keyboard.press("p")
    expect(feed).to_have_attribute("data-feed", "off")
    wait_for_feeds_left(page, console, left + 1)

    page.keyboard.press("e")
    expect(feed).to_have_attribute("data-feed", "live")
    hide = "Object.defineProperty(document, 'visibilityState', {value: '%s', configurable: true})"
    for state, name in (("hidden", "off"), ("visible", "live")):
        page.evaluate(hide % state + "; document.dispatchEvent(new Event('visibilitychange'))")
        expect(feed).to_have_attribute("data-feed", name)
    wait_for_feeds_left(page, console, left + 2)

    page.close()
    wait_for_feeds_left(console.context.new_page(), console, left + 3)


def test_it_comes_back_to_a_server_that_was_away(console: Console) -> None:
    page = console.open("engine")
    feed = page.locator("#feed")
    expect(feed).to_have_attribute("data-feed", "live")
    is_full = False

    def refuse(route: Route) -> None:
        if is_full:
            route.fulfill(status=429, json={"error": {"message": "too many watch"}})
        else:
            route.abort()

    page.route("**/console/live?*", refuse)
    page.keyboard.press("p")
    page.keyboard.press("e")
    expect(feed).to_have_text("Cut off: trying again")
    expect(feed).to_have_attribute("data-feed", "lost")
    expect(page.locator(".engine-body")).to_have_attribute("data-stale", "")
    is_full = True
    expect(feed).to_have_text("too many watch: trying again")
    page.unroute("**/console/live?*")
    expect(feed).to_have_attribute("data-feed", "live")
    expect(page.locator(".engine-body")).not_to_have_attribute("data-stale", "")
