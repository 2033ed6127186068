"""The page as such: its security policy, themes, contrast, keys of the keyboard, small screens."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PATIENCE, Console

expect.set_options(timeout=PATIENCE)

CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], below) =>
    [r, g, b].map((c, i) => (c * a + below[i] * (255 - a)) / 255);
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    const color = rgba(getComputedStyle(node).backgroundColor);
    return color[3] === 255 ? color.slice(0, 3) : over(color, ground(node.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest(".unseen, option")) continue;
    const below = ground(node);
    const [light, dark] = [below, over(rgba(getComputedStyle(node).color), below)]
      .map(luminance).sort((a, b) => b - a);
    found.push([(light + 0.05) / (dark + 0.05), texts.currentNode.data.trim()]);
  }
  return found;
}"""


def ask(page: Page, text: str, *, select: bool = False) -> None:
    """Have a message answered; ``select`` its request at once, as rows leave after ten seconds."""
    page.fill("#message", text)
    page.keyboard.press("Enter")
    if select:
        page.locator(".request-id").first.click()
    expect(page.locator(".answer-status")).to_contain_text("ended")


def ground(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")  # type: ignore[no-any-return]


def width(page: Page) -> int:
    """Return the widest that anything is which scrolls the page or one of its views."""
    scrolled = "[...document.querySelectorAll('html, main, .view, .outputs')]"
    return page.evaluate(f"Math.max(...{scrolled}.map((each) => each.scrollWidth))")  # type: ignore[no-any-return]


def test_the_policy_allows_the_pages_own_files_only(console: Console) -> None:
    page = console.context.new_page()
    response = page.goto(f"{console.server.url}/console")
    assert response is not None
    policy = response.headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:;",
        "media-src data:;",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert page.locator("[style]").count() == 0


def test_light_and_dark_by_the_system_and_by_choice(console: Console) -> None:
    page = console.open()
    page.emulate_media(color_scheme="light")
    light = ground(page)
    page.emulate_media(color_scheme="dark")
    dark = ground(page)
    assert light != dark
    page.get_by_role("button", name="Light or dark").click()
    assert ground(page) == light
    page.reload()
    assert ground(page) == light
    page.keyboard.press("t")
    assert ground(page) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(console: Console, scheme: str) -> None:
    page = console.open("both")
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": 1440, "height": 900})
    page.locator("#settings [name=max_tokens]").evaluate("field => field.value = 20")
    ask(page, "Hello", select=True)
    page.locator(".token").first.focus()
    page.wait_for_selector(".icicle rect", state="attached")
    texts = page.evaluate(CONTRASTS)
    assert len(texts) > 100
    assert [(text, ratio) for ratio, text in texts if ratio < 4.5] == []


def test_the_keyboard_is_enough(console: Console) -> None:
    page = console.open("engine")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.type("Hello? Press t, e, b.")
    expect(page.locator("#message")).to_have_value("Hello? Press t, e, b.")
    page.locator("#settings [name=max_tokens]").evaluate("field => field.value = 5")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-status")).to_contain_text("5 tokens")

    # The buttons that send and stop share the focus, too.
    expect(page.locator("#send")).to_be_visible()
    page.fill("#message", "Hello")
    page.locator("#send").press("Enter")
    expect(page.locator(".answer-status").last).to_contain_text("ended")
    expect(page.locator("#send")).to_be_focused()

    # From the message back to the answer: all that has the focus shows it.
    page.locator("#message").focus()
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.evaluate("document.activeElement.outerHTML")
        if page.evaluate("document.activeElement.matches('.token')"):
            break
    expect(page.locator(".answer").last.locator(".token").first).to_be_focused()
    expect(page.get_by_role("tooltip")).to_be_visible()

    # Single keys can be switched off.
    page.keyboard.press("?")
    page.get_by_label("Shortcuts of a single key").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    page.keyboard.press("t")
    assert page.evaluate("document.body.dataset.view") == "playground"


def test_what_is_said_to_screen_readers(console: Console) -> None:
    page = console.open()
    page.evaluate("""() => {
      window.said = [];
      const announcer = document.getElementById("announcer");
      new MutationObserver(() => said.push(announcer.textContent))
        .observe(announcer, { childList: true });
    }""")
    page.fill("#settings [name=max_tokens]", "30")
    ask(page, "Tell me about the sea.")
    text = page.locator(".answer .text").last.text_content() or ""
    said = page.evaluate("said")
    assert len(said) < 20, "not every token is told"
    assert said[-1].endswith("Answer ended by max tokens or the context.")
    words = " ".join(said).split()
    assert all(word in words for word in text.split())


def test_a_phone_scrolls_in_one_direction_only(console: Console) -> None:
    page = console.open("both")
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("button", name="Settings").click()
    page.fill("#settings [name=max_tokens]", "30")
    assert width(page) == 390
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("#settings")).to_be_hidden()
    ask(page, "Hello " + "x" * 200, select=True)
    page.wait_for_selector(".icicle rect", state="attached")
    for key in ("b", "e", "p", "m", "?"):
        page.locator("body").press(key)
        assert width(page) == 390, key


def test_motion_is_left_out_for_whoever_asks(console: Console) -> None:
    page = console.open("engine")
    page.emulate_media(reduced_motion="reduce")
    page.wait_for_selector(".engine-body:not([hidden])")
    moving = """[...document.querySelectorAll("*")].filter((node) => {
      const { transitionDuration, animationName } = getComputedStyle(node);
      return animationName !== "none" || transitionDuration !== "0s";
    }).length"""
    assert page.evaluate(moving) == 0
