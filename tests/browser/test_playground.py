"""The playground in a browser, over the real server: chat, completion, and what goes wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import PATIENCE, Console, wait_until

expect.set_options(timeout=PATIENCE)

COUNTING = "1 2 3 4 5 6 7 8 9 10 11 12"
"""Text that the model repeats until a limit ends it."""

LENGTHS = """() => {
  window.lengths = [];
  const look = () => {
    const text = document.querySelector(".answer[aria-busy] > .text");
    if (text) lengths.push(text.textContent.length);
  };
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
}"""
"""Notes how long the answer is whenever it changes, until it is at its end."""


def ask(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.keyboard.press("Enter")


def setting(page: Page, name: str, value: str) -> None:
    page.fill(f"#settings [name={name}]", value)


def wait_for_the_end(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()


def sent(page: Page, path: str, act: Any) -> dict[str, Any]:
    """Return the body of the request that ``act`` leads to."""
    with page.expect_request(f"**{path}") as request:
        act()
    body = request.value.post_data
    assert body is not None
    return json.loads(body)  # type: ignore[no-any-return]


def test_a_chat_streams_and_goes_on(console: Console) -> None:
    page = console.open()
    setting(page, "max_tokens", "60")
    setting(page, "temperature", "0")
    setting(page, "system", "You are a poet.")
    page.evaluate(LENGTHS)
    ask(page, "Write about the sea.")
    wait_for_the_end(page)
    lengths = page.evaluate("lengths")
    assert len(set(lengths)) > 10, "it comes in parts"
    assert lengths == sorted(lengths)
    status = page.locator(".answer-status")
    expect(status).to_contain_text("60 tokens · first after")
    expect(status).to_contain_text("tokens/s · ended by max tokens")

    answer = page.locator(".answer .text").last.text_content()
    body = sent(page, "/v1/chat/completions", lambda: ask(page, "Go on."))
    assert body["messages"] == [
        {"role": "system", "content": "You are a poet."},
        {"role": "user", "content": "Write about the sea."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Go on."},
    ]
    wait_for_the_end(page)
    assert page.locator(".turn").count() == 4


def test_messages_are_edited_and_answers_made_anew(console: Console) -> None:
    page = console.open()
    setting(page, "max_tokens", "4")
    for text in ("One", "Two"):
        ask(page, text)
        wait_for_the_end(page)
    last = page.get_by_role("button", name="Regenerate").last
    body = sent(page, "/v1/chat/completions", last.click)
    assert [message["content"] for message in body["messages"]][-1] == "Two"
    wait_for_the_end(page)
    assert page.locator(".turn").count() == 4

    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.type("Three")
    body = sent(page, "/v1/chat/completions", lambda: page.keyboard.press("Enter"))
    assert body["messages"] == [{"role": "user", "content": "Three"}]
    wait_for_the_end(page)
    assert page.locator(".turn").count() == 2


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stopping_ends_the_request_at_the_server(console: Console, how: str) -> None:
    page = console.open()
    page.get_by_text("Completion", exact=True).click()
    setting(page, "temperature", "0")
    setting(page, "max_tokens", "8000")
    page.fill("#prompt", COUNTING)
    page.keyboard.press("Control+Enter")
    wait_until(page, lambda: page.locator(".token").count() > 5)
    assert console.server.metrics()["trioserve:num_requests_running"] == 1
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press(how)
    console.server.wait_until_idle()
    expect(page.locator(".answer-status")).to_contain_text("stopped")
    wait_for_the_end(page)


def test_every_control_reaches_the_request(console: Console) -> None:
    page = console.open()
    values: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 40,
        "max_tokens": 3,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
    }
    for name, value in values.items():
        setting(page, name, str(value))
    setting(page, "stop", "END\n\\n\\n")
    setting(page, "alternatives", "2")
    body = sent(page, "/v1/chat/completions", lambda: ask(page, "Hello"))
    expected = {**values, "stop": ["END", "\n\n"], "logprobs": True, "top_logprobs": 2}
    assert {name: body[name] for name in expected} == expected
    wait_for_the_end(page)
    expect(page.locator(".answer .notice")).to_be_hidden()

    # A slider writes its number, and what is empty isn't sent.
    page.get_by_label("Temperature, slider").focus()
    page.keyboard.press("Home")
    for name in values:
        if name not in ("temperature", "max_tokens"):
            setting(page, name, "")
    setting(page, "alternatives", "0")
    body = sent(page, "/v1/chat/completions", lambda: ask(page, "Hello"))
    assert body.keys() == {
        *("model", "messages", "temperature", "max_tokens", "stop"),
        *("stream", "stream_options"),
    }
    assert body["temperature"] == 0
    wait_for_the_end(page)


def test_tokens_tell_their_probabilities(console: Console) -> None:
    page = console.open()
    setting(page, "max_tokens", "6")
    setting(page, "temperature", "0")
    ask(page, "What is the capital of France?")
    wait_for_the_end(page)
    table = page.get_by_role("tooltip")
    tokens = page.locator(".token")
    assert tokens.count() == 6
    tokens.nth(2).hover()
    expect(table.locator("tbody tr")).to_have_count(5)
    # The first of a greedy answer's alternatives is the token itself.
    expect(table.locator("tbody tr").first).to_have_class("chosen")
    expect(table.locator("caption")).to_contain_text("%")
    page.mouse.move(0, 0)
    expect(table).to_be_hidden()

    tokens.first.focus()
    expect(table).to_be_visible()
    shown = table.inner_text()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tokens.nth(1)).to_have_attribute("aria-describedby", "alternatives")
    expect(table).not_to_have_text(shown)
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()
    page.keyboard.press("Escape")
    expect(table).to_be_hidden()


def test_a_raw_completion(console: Console) -> None:
    page = console.open()
    page.keyboard.press("m")
    setting(page, "max_tokens", "12")
    setting(page, "temperature", "0")
    page.fill("#prompt", COUNTING)
    body = sent(page, "/v1/completions", lambda: page.keyboard.press("Control+Enter"))
    assert (body["prompt"], body["logprobs"]) == (COUNTING, 5)
    wait_for_the_end(page)
    text = page.locator(".answer .text").last.text_content() or ""
    assert text.strip()
    assert page.locator(".token").count() == 12

    go_on = page.get_by_role("button", name="Go on from here")
    assert sent(page, "/v1/completions", go_on.click)["prompt"] == COUNTING + text
    wait_for_the_end(page)
    page.get_by_role("button", name="Copy as curl").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl -N '{console.server.url}/v1/completions'")
    assert "secret" not in command


def test_a_refusal_names_the_field_and_what_it_may_be(console: Console) -> None:
    page = console.open()
    setting(page, "top_p", "1.5")
    ask(page, "Hello")
    notice = page.locator(".answer .notice")
    expect(notice).to_contain_text("top_p")
    expect(notice).to_contain_text("1.0")
    field = page.locator("#settings [name=top_p]")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#top_p-error")).to_have_text("expected float <= 1.0, got 1.5")
    setting(page, "top_p", "")
    setting(page, "max_tokens", "2")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer-status")).to_contain_text("2 tokens")
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_a_refused_message_is_taken_back(console: Console) -> None:
    page = console.open()
    setting(page, "max_tokens", "2")
    ask(page, "First")
    wait_for_the_end(page)
    setting(page, "top_p", "1.5")
    ask(page, "Hello")
    expect(page.locator(".answer .notice").last).to_contain_text("top_p")
    expect(page.locator("#message")).to_have_value("Hello")
    setting(page, "top_p", "")
    body = sent(page, "/v1/chat/completions", lambda: ask(page, "Hello again"))
    contents = [message["content"] for message in body["messages"]]
    assert (contents[0], contents[2:]) == ("First", ["Hello again"])
    wait_for_the_end(page)
    assert page.locator(".turn").count() == 4


def test_a_worker_that_restarts_is_told(console: Console) -> None:
    page = console.open()
    unwell = json.dumps({"status": "no_worker"})
    page.route("**/health", lambda route: route.fulfill(status=503, body=unwell))
    page.route("**/v1/chat/completions", lambda route: None)  # It never answers.
    ask(page, "Hello")
    expect(page.locator(".answer [role=status]")).to_contain_text("worker is being restarted")
    page.unroute("**/health")
    expect(page.locator(".answer [role=status]")).to_be_empty()
    page.click("#stop")
    expect(page.locator(".answer-status")).to_contain_text("stopped")


def test_improbable_tokens_are_underlined_on_demand(console: Console) -> None:
    page = console.open()
    chunk = {"choices": [{"delta": {"content": "odd"}, "logprobs": {"content": [
        {"token": "odd", "logprob": -9, "top_logprobs": []}
    ]}}]}  # fmt: skip
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    ask(page, "Hello")
    wait_for_the_end(page)
    token = page.locator(".token")
    page.mouse.move(0, 0)
    expect(token).to_have_css("box-shadow", "none")
    page.get_by_label("Underline improbable tokens").check()
    expect(token).not_to_have_css("box-shadow", "none")


def test_what_the_model_writes_stays_text(console: Console) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt;"
    page = console.open()

    def answer(route: Route) -> None:
        logprob = {"token": text, "logprob": -1, "top_logprobs": [{"token": text, "logprob": -1}]}
        choice = {"delta": {"content": text}, "logprobs": {"content": [logprob]}}
        data = json.dumps({"id": text, "choices": [choice]})
        plain = json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": text}]})
        body = f"data: {data}\n\ndata: {plain}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    ask(page, text)
    wait_for_the_end(page)
    assert page.locator(".answer .text").last.text_content() == text * 2
    page.locator(".token").hover()
    expect(page.get_by_role("tooltip").locator("caption")).to_contain_text("<img")
    expect(page.locator(".answer-status")).to_contain_text("<script>")
    assert page.locator("main img, main script, main b, .alternatives img").count() == 0


def test_a_key_is_asked_for_and_kept_for_the_tab_only(console: Console) -> None:
    page = console.context.new_page()
    page.goto(f"{console.server.url}/console")
    dialog = page.locator("#access")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("This server wants an API key.")
    page.fill("#api-key", "wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    page.fill("#api-key", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("smollm2-135m")
    expect(dialog).to_be_hidden()
    setting(page, "max_tokens", "2")
    ask(page, "Hello")
    expect(page.locator(".answer-status")).to_contain_text("2 tokens")
    kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href].join()")
    assert "secret" not in kept
    other = console.context.new_page()
    other.goto(f"{console.server.url}/console")
    expect(other.locator("#access")).to_be_visible()
