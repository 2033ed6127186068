"""Images and audio in the playground, over the real server with a model that reads images."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Locator, Page, Route, expect

from tests.browser.conftest import PATIENCE, Console
from tests.support.model_server import Server, serving
from tests.support.tiny_media import make_media_model, png
from tests.support.tiny_speech import wav

expect.set_options(timeout=PATIENCE)

OPTIONS = ("--device", "cpu", "--num-gpu-blocks-override", "64")
HAND_OVER = """(place, [kind, name, type, others]) => {
  const data = new DataTransfer();
  data.items.add(new File(["pixels"], name, { type }));
  for (const other of others) data.setData(other, "text");
  const init = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent(kind, { ...init, clipboardData: data })
    : new DragEvent(kind, { ...init, dataTransfer: data });
  place.dispatchEvent(event);
  return event.defaultPrevented;
}"""
"""Drops or pastes a file; returns whether the page took it from the browser."""


def file(name: str, data: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": data}


def part(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def attach(page: Page, *files: FilePayload) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach images").click()
    chooser.value.set_files(list(files))


def last_message(page: Page, act: Any) -> Any:
    """Return the last message that ``act`` sends."""
    with page.expect_request("**/v1/chat/completions") as request:
        act()
    return json.loads(request.value.post_data or "")["messages"][-1]


def written(page: Page) -> Locator:
    """Return the images of the message that is being written."""
    return page.locator(".attachments img")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_media_model("llava", tmp_path_factory.mktemp("models") / "llava")
    with serving(*OPTIONS, model=str(folder)) as server:
        yield server


@pytest.fixture
def images(browser: Browser, reader: Server) -> Iterator[Console]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    console = Console(context, reader)
    yield console
    context.close()
    assert console.complaints == []


def test_images_are_chosen_sent_and_kept(images: Console) -> None:
    page = images.open()
    page.fill("#settings [name=max_tokens]", "4")
    attach(page, file("cat.png", png(1)), file("dog.png", png(2)), file("broken.png", b"pixels"))
    expect(written(page)).to_have_count(3)
    page.get_by_role("button", name="Remove dog.png").press("Enter")
    expect(page.get_by_role("button", name="Remove broken.png")).to_be_focused()
    page.fill("#message", "What is this?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .notice code")).to_have_text("messages[0].content[1]")
    expect(page.locator("#message")).to_have_value("What is this?")
    expect(written(page)).to_have_count(2)

    page.get_by_role("button", name="Remove broken.png").click()
    message = last_message(page, lambda: page.press("#message", "Enter"))
    content = [part(png(1)), {"type": "text", "text": "What is this?"}]
    assert message == {"role": "user", "content": content}
    expect(page.locator(".answer-status")).to_contain_text("4 tokens")
    expect(written(page)).to_have_count(0)
    shown = page.locator(".turn-user").get_by_role("img", name="cat.png")
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 40

    regenerate = page.get_by_role("button", name="Regenerate")
    assert last_message(page, regenerate.click)["content"] == content
    expect(page.locator(".answer-status")).to_contain_text("4 tokens")
    page.get_by_role("button", name="Edit").click()
    expect(shown).to_be_visible()
    page.keyboard.type(" Well?")
    message = last_message(page, lambda: page.keyboard.press("Enter"))
    assert message["content"] == [content[0], {"type": "text", "text": "What is this? Well?"}]
    expect(page.locator(".answer-status")).to_contain_text("4 tokens")

    page.get_by_role("button", name="Copy as curl").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    assert "\"data:image/png;base64,$(base64 < 'cat.png' | tr -d" in command


def test_images_are_dropped_and_pasted(images: Console) -> None:
    page = images.open()
    message = page.locator("#message")
    expect(page.get_by_role("button", name="Attach images")).to_be_visible()
    for kind in ("dragover", "drop", "paste"):
        assert message.evaluate(HAND_OVER, [kind, f"{kind}.png", "image/png", []])
    expect(page.locator("[data-drop]")).to_have_count(0)
    names = [image.get_attribute("alt") for image in written(page).all()]
    assert names == ["drop.png", "paste.png"]
    texts = ["text/plain", "text/html"]
    assert not message.evaluate(HAND_OVER, ["paste", "text.png", "image/png", texts])
    assert message.evaluate(HAND_OVER, ["drop", "a.pdf", "application/pdf", []])
    expect(page.locator(".composer .notice")).to_have_text("a.pdf isn't an image.")
    expect(written(page)).to_have_count(2)
    sent = last_message(page, page.locator("#send").click)
    assert [each["type"] for each in sent["content"]] == ["image_url"] * 2
    expect(page.locator(".answer .notice")).to_contain_text(re.compile(r"messages\[0\]"))
    page.keyboard.press("m")
    expect(page.get_by_role("button", name="Attach images")).to_be_hidden()


def test_audio_is_attached_for_a_model_that_reads_audio(images: Console) -> None:
    def with_audio(route: Route) -> None:
        facts = {"has_image_understanding": False, "has_audio_understanding": True}
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), **facts})

    images.context.route("**/model_info", with_audio)
    page = images.open()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach audio").click()
    data = wav(1, 0.2)
    chooser.value.set_files([file("a.wav", data, "audio/wav"), file("cat.png", png(1))])
    expect(page.locator(".composer .notice")).to_have_text("cat.png isn't an audio file.")
    clip = page.locator(".attachments audio")
    expect(clip).to_have_count(1)
    assert clip.evaluate(
        "clip => clip.readyState ? clip.duration : new Promise((done) => "
        "clip.addEventListener('loadedmetadata', () => done(clip.duration)))"
    ) == pytest.approx(0.2, abs=0.01)
    (sent,) = last_message(page, page.locator("#send").click)["content"]
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    assert sent == {"type": "audio_url", "audio_url": {"url": url}}
    expect(page.locator(".answer .notice")).to_contain_text("reads no audio clips")


def test_a_model_of_text_is_offered_none(console: Console) -> None:
    page = console.open()
    message = page.locator("#message")
    expect(message).to_be_visible()
    assert not message.evaluate(HAND_OVER, ["paste", "a.png", "image/png", []])
    expect(page.get_by_role("button", name="Attach images")).to_be_hidden()
    expect(written(page)).to_have_count(0)
