"""Rendering in the server's process takes little time and memory, whatever the template."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli import test_chat
from tests.fuzz.templates import HOSTILE
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.prompts import ChatPrompt
from trioserve.text import template_bounds
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.template_bounds import BeyondBounds

USER = {"role": "user", "content": "x"}
TEMPLATES = {
    name: getattr(test_chat, name)
    for name in ("LLAMA3", "QWEN", "MISTRAL", "HERMES_TOOLS", "LLAMA3_TOOLS", "TEXT_TOOLS", "PARTS")
}
CONVERSATIONS = {
    "short": [test_chat.USER],
    "long": [test_chat.SYSTEM, *[test_chat.USER, test_chat.ASSISTANT] * 8, test_chat.USER],
    "called": [
        test_chat.USER,
        test_chat.CALL,
        {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "20 °C"},
    ],
}


def chat(*messages: dict[str, Any], **arguments: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages or (USER,), template_arguments=arguments)


def rendered_here(source: str, prompt: ChatPrompt | None = None) -> str:
    return ChatTemplate(source).render_within_bounds(prompt or chat())


def outcome(render: Callable[[ChatPrompt], str], prompt: ChatPrompt) -> str:
    """Return the text, or the refusal."""
    try:
        return render(prompt)
    except InvalidRequest as error:
        return f"refused: {error}"


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_refused_or_goes_elsewhere_or_prints_little(source: str) -> None:
    template = ChatTemplate(source)
    tracemalloc.start()
    try:
        assert len(template.render_within_bounds(chat())) < 1 << 16
    except (InvalidRequest, BeyondBounds):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, test_chat.TOOLS], ids=["", "tools"])
def test_usual_conversations_are_rendered_here(
    source: str, conversation: list[dict[str, Any]], tools: Any
) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    prompt = chat(*conversation, tools=tools)
    assert outcome(template.render_within_bounds, prompt) == outcome(template.render, prompt)


@pytest.mark.parametrize(
    "source",
    [
        "{{ [messages] }}",
        "{{ {'a': messages} }}",
        "{{ (messages, 1) }}",
        "{{ namespace(a=1) }}",
        "{{ namespace(a=1) ~ '' }}",
        "{{ namespace(a=1) | string }}",
        "{{ messages + messages }}",
        "{{ 2 ** 3 }}",
        "{{ 'a' * 3 }}",
        "{{ 3 * 'a' }}",
        "{{ '%s' % 'a' }}",
        "{{ 'a' | center(3) }}",
        "{{ 'a'.center(3) }}",
        "{{ 'a'.join(['b']) }}",
        "{{ '{}'.format(1) }}",
        "{{ [1] | map('string') | list }}",
        "{{ [3, 1] | sort }}",
        "{{ dict(a=1) }}",
        "{{ range(100000) | length }}",
        "{{ ('zz' | int(0, 36)) * (9223372036854775807) * 2 }}",
        "{{ '11111111111111111111' | int(0, 32) }}",
        "{{ messages | tojson(indent=9) }}",
        "{{ messages | tojson(separators=('         ', ':')) }}",
        "{{ strftime_now('%Y' ~ messages[0].content ~ '                ' ~ "
        "'                                                            ') }}",
        "{% for a in 'ab' recursive %}{{ loop('c') }}{% endfor %}",
        "{% for a in 'ab' %}{{ loop.cycle('x', 'y') }}{% endfor %}",
        "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
        "{% for i in range(999) %}{% for j in range(999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
    ],
)
def test_what_may_take_long_is_beyond_the_bounds(source: str) -> None:
    with pytest.raises(BeyondBounds):
        rendered_here(source)


def test_large_inputs_are_beyond_the_bounds() -> None:
    source = "{{ messages[0].content }}"
    for prompt in (
        chat({**USER, "content": "x" * template_bounds.MAX_INPUT}),
        chat(*[USER] * template_bounds.MAX_INPUT),
        chat(number=2**63),
        chat(other=object()),
    ):
        with pytest.raises(BeyondBounds):
            rendered_here(source, prompt)


@pytest.mark.parametrize("indent", [None, 4])
def test_json_that_is_nested_deeply_is_indented_elsewhere(indent: int | None) -> None:
    source = "{{ tools | tojson(indent=indent) }}"
    deep: list[Any] = []
    for _ in range(template_bounds.MAX_DEPTH):
        deep = [deep]
    prompt = chat(tools=deep, indent=indent)
    if indent is None:
        assert rendered_here(source, prompt).count("[") == 1 + template_bounds.MAX_DEPTH
    else:
        with pytest.raises(BeyondBounds):
            rendered_here(source, prompt)


def test_texts_that_double_end_soon() -> None:
    tracemalloc.start()
    with pytest.raises(BeyondBounds):
        rendered_here(
            "{% set n = namespace(s='ab') %}"
            "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
        )
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_nothing_is_computed_before_a_request_comes() -> None:
    ChatTemplate("{{ 'a' | center(10**9) }}{{ 'a' * 10**10 }}{{ ('a' ~ 'b') * 10**10 }}")
