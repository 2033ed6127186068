"""Chat templates that want to run long or take all memory, over conversations made for them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.attacks.siege import Victim, besieged
from tests.attacks.witness import HEADERS
from trioserve.http.api.schema.field_bounds import MAX_JSON_DEPTH

CALLS = {
    "int": "{% set a = ('9' * 10**7) | int(0, 32) %}"
    "{% set b = ('7' * (5 * 10**6)) | int(0, 32) %}{{ a % b }}",
    "format": "{{ ('{0:{1}}' * 1000).format(1, 10**6) | length }}",
    "sum": "{{ ([['a'] * 10**6] * 100) | sum(start=[]) | length }}",
    "translate": "{{ ('a' * 60000).translate({97: 'b' * 60000}) }}",
    "wordwrap": "{{ ('a b ' * 10**7) | wordwrap(1, true, 'x' * 60000) }}",
    "sort": "{{ ((range(99999) | map('string') | list) * 10) | sort | length }}",
    "urlize": "{{ ('www.a.b ' * (4 * 10**6)) | urlize | length }}",
}
"""Calls that a template may make, by the name that a request gives them."""
SHARED = (
    "{% set n0 = [1] %}"
    + "".join(f"{{% set n{i + 1} = [n{i}, n{i}] %}}" for i in range(60))
    + "{{ n60 }}"
)
"""A value that holds itself, which takes as long as it may and no memory."""
NUM_PROCESSES = 2
"""Processes for templates, all of which are kept busy."""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
) + "".join(
    f"{{% if attack == '{name}' %}}{call}{{% endif %}}"
    for name, call in {**CALLS, "shared": SHARED}.items()
)

MOST_LISTS = MAX_JSON_DEPTH - 4
"""Lists within one another that a schema may hold below four levels of its own."""


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server of a model whose template has all of that."""
    path: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    options = ("--chat-template", str(path), "--tool-call-parser", "hermes")
    with besieged("--mock-worker", "5ms", *options) as victim:
        yield victim


def post(victim: Victim, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=120)
    connection.request("POST", path, json.dumps(body), HEADERS)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def chat(victim: Victim, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"model": victim.model, "messages": messages, "max_tokens": 2, **fields}


@pytest.mark.parametrize("name", CALLS)
def test_a_template_that_takes_too_much(templated: Victim, name: str) -> None:
    with templated.withstands():
        body = chat(templated, chat_template_kwargs={"attack": name})
        status, answer = post(templated, "/v1/chat/completions", body)
    assert status == 400
    assert "takes more than 2 s or 128 MiB" in answer["error"]["message"]
    assert post(templated, "/v1/chat/completions", chat(templated))[0] == 200


@pytest.mark.parametrize(
    ("path", "num_lists", "num_numbers", "reason"),
    [
        ("/tokenize", MOST_LISTS, 60_000, "takes more than 2 s or 128 MiB"),
        ("/tokenize", 300, 130_000, "is nested too deeply"),
        ("/v1/chat/completions", 300, 130_000, "is nested too deeply"),
        ("/v1/messages/count_tokens", 300, 130_000, "is nested too deeply"),
    ],
)
def test_a_schema_of_nested_lists(
    templated: Victim, path: str, num_lists: int, num_numbers: int, reason: str
) -> None:
    """Its indentation makes megabytes of each kilobyte."""
    deep: Any = [0] * num_numbers
    for _ in range(num_lists - 1):
        deep = [deep]
    schema = {"type": "object", "properties": {"x": {"enum": [deep]}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    if path.startswith("/v1/messages"):
        tools = [{"name": "f", "input_schema": schema}]
    body = chat(templated, tools=tools)
    if path != "/v1/chat/completions":
        del body["max_tokens"]
    with templated.withstands():
        status, answer = post(templated, path, body)
    assert status == 400, answer
    assert reason in answer["error"]["message"]


def test_many_at_once_leave_short_chats_alone(templated: Victim) -> None:
    """The witness only wants its tokens; here a chat wants them, too."""
    body = chat(templated, chat_template_kwargs={"attack": "shared"})
    threads = [
        threading.Thread(target=post, args=(templated, "/v1/chat/completions", body))
        for _ in range(NUM_PROCESSES)
    ]
    with templated.withstands():
        for thread in threads:
            thread.start()
        for _ in range(3):
            assert post(templated, "/v1/chat/completions", chat(templated))[0] == 200
        for thread in threads:
            thread.join()
