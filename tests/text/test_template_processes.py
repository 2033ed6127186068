"""Chat templates that may take long are rendered in processes, which are limited and replaced."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import trio

from tests.support.process_ends import wait_ended
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.requests.prompts import ChatPrompt
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.text import template_processes
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.template_bounds import BeyondBounds
from trioserve.text.template_processes import MAX_PROCESSES, TemplateProcesses

TEMPLATE = ChatTemplate(
    "{% if what == 'time' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif what == 'memory' %}{{ 'a' * 10**10 }}"
    "{% elif what == 'refusal' %}{{ raise_exception('no ' ~ messages[0].content) }}"
    "{% endif %}{{ bos_token }}"
    "{{ [messages[0].content] | join }}{{ '!' if add_generation_prompt }}",
    bos_token="<s>",
)


def chat(what: object = "", content: object = "hi") -> ChatPrompt:
    return ChatPrompt(
        messages=({"role": "user", "content": content},), template_arguments={"what": what}
    )


def children() -> list[psutil.Process]:
    """Return the processes that render templates."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
            if any("template_child" in argument for argument in child.cmdline()):
                found.append(child)
    return found


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[TemplateProcesses]:
    before = children()
    processes = TemplateProcesses()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(processes.run)
        await trio.testing.wait_all_tasks_blocked()
        assert children() == before
        yield processes
        nursery.cancel_scope.cancel()
    assert children() == before


def test_the_template_is_one_that_needs_a_process() -> None:
    with pytest.raises(BeyondBounds):
        TEMPLATE.render_within_bounds(chat())


async def test_a_conversation_is_rendered() -> None:
    async with running() as processes:
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"
        (child,) = children()
        for text in ("ä" * 100_000, "𝄞"):
            assert await processes.render(TEMPLATE, chat(content=text)) == f"<s>{text}!"
        assert children() == [child]


async def test_another_template_has_another_process() -> None:
    async with running() as processes:
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"
        assert await processes.render(ChatTemplate("{{ 'a' * 3 }}"), chat()) == "aaa"
        assert len(children()) <= MAX_PROCESSES


@pytest.mark.parametrize(
    ("prompt", "message", "param"),
    [
        (chat("refusal"), "the chat template can't print the messages: no hi", "messages"),
        (chat(object()), "the messages can't be rendered", "messages"),
        (chat(content="\ud800"), "the messages can't be rendered", "messages"),
        (chat(2**70), "the messages can't be rendered", "messages"),
        (ChatPrompt(messages=()), "messages must have at least one message", "messages"),
        (
            ChatPrompt(messages=({"role": "user"},), continue_final_message=True),
            "continue_final_message needs add_generation_prompt to be false",
            "continue_final_message",
        ),
    ],
)
async def test_refusals_come_back(prompt: ChatPrompt, message: str, param: str) -> None:
    async with running() as processes:
        with pytest.raises(InvalidRequest) as raised:
            await processes.render(TEMPLATE, prompt)
        assert message in str(raised.value)
        assert raised.value.param == param
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"


@pytest.mark.parametrize("what", ["time", "memory"])
async def test_what_takes_too_much_is_refused_and_others_go_on(what: str) -> None:
    async with running() as processes:
        with pytest.raises(InvalidRequest, match="takes more than 2 s or 128 MiB") as raised:
            await processes.render(TEMPLATE, chat(what))
        assert raised.value.param == "messages"
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"


async def refuse(processes: TemplateProcesses) -> None:
    with pytest.raises(InvalidRequest):
        await processes.render(TEMPLATE, chat())


async def test_an_idle_process_that_is_killed_costs_nothing() -> None:
    async with running() as processes:
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"
        (child,) = children()
        os.kill(child.pid, signal.SIGKILL)
        await wait_ended(child)
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"


async def test_a_process_that_is_killed_is_replaced() -> None:
    async with running() as processes:
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"
        (child,) = children()
        os.kill(child.pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse, processes)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(child.pid, signal.SIGKILL)
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"


async def test_a_process_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as processes:
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"
        (child,) = children()
        os.kill(child.pid, signal.SIGSTOP)
        monkeypatch.setattr(template_processes, "MAX_WAIT", 0.5)
        with pytest.raises(InvalidRequest):
            await processes.render(TEMPLATE, chat())
        monkeypatch.undo()
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"


async def test_what_nothing_waits_for_any_more_is_stopped() -> None:
    async with running() as processes:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(processes.render, TEMPLATE, chat("time"))
            while len(children()) < MAX_PROCESSES:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert not children()
        assert await processes.render(TEMPLATE, chat()) == "<s>hi!"


async def test_the_end_is_an_error_of_those_that_wait() -> None:
    processes = TemplateProcesses()
    errors: list[str] = []

    async def render(what: str) -> None:
        with pytest.raises(EngineError) as raised:
            await processes.render(TEMPLATE, chat(what))
        errors.append(str(raised.value))

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as owner:
            owner.start_soon(processes.run)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2 * MAX_PROCESSES):
                nursery.start_soon(render, "time")
            await trio.testing.wait_all_tasks_blocked()
            owner.cancel_scope.cancel()
    await render("")
    assert errors == ["the engine is closed"] * (2 * MAX_PROCESSES + 1)


async def test_an_engine_renders_what_is_beyond_the_bounds() -> None:
    """Others overtake it meanwhile, and its process ends with the engine."""
    before = children()
    async with open_fake_engine() as engine:
        engine.tokenizer.chat_template = TEMPLATE
        assert await engine.tokenizer.render(chat()) == "<s>hi!"
        completion = await engine.complete(chat().messages, max_tokens=1)
        assert engine.tokenizer.decode(completion.prompt_token_ids) == "<s>hi!"
        long = "x" * 100_000
        with pytest.raises(InvalidRequest, match="tokens"):
            await engine.complete(chat(content=long).messages, max_tokens=1)
        with pytest.raises(InvalidRequest, match="takes more than"):
            await engine.complete(
                ChatPrompt(messages=chat().messages, template_arguments={"what": "memory"}),
                max_tokens=1,
            )
    assert children() == before
