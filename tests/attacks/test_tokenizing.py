"""Texts that take gigabytes to tokenize."""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.attacks.siege import Victim
from tests.attacks.witness import HEADERS

HUGE = 31 << 20
"""Most characters that a body may have."""
LARGE = 1 << 19
"""Most characters that are tokenized for a model of 8,192 tokens."""
EXPENSIVE = "1"
"""A character that is a token by itself."""


def ask(victim: Victim, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=120)
    try:
        content = json.dumps({"model": victim.model, **body})
        connection.request("POST", path, content, HEADERS)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def chat(text: str, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": EXPENSIVE * HUGE}),
        ("/tokenize", {"prompt": [EXPENSIVE * (HUGE // 100)] * 100}),
        ("/tokenize", {"messages": chat(EXPENSIVE * HUGE)["messages"]}),
        ("/v1/messages/count_tokens", {"messages": chat(EXPENSIVE * HUGE)["messages"]}),
        ("/v1/responses/input_tokens", {"input": EXPENSIVE * HUGE}),
        ("/v1/chat/completions", chat("x", role=EXPENSIVE * HUGE)),
        ("/detokenize", {"tokens": [1] * (LARGE + 1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_too_long_to_tokenize_is_refused(
    victim: Victim, path: str, body: dict[str, Any]
) -> None:
    with victim.withstands():
        status, answer = ask(victim, path, body)
    assert status == 400, answer
    assert re.search("at (most|least) ", answer["error"]["message"])


def test_the_longest_texts_are_tokenized_one_at_a_time(victim: Victim) -> None:
    text = EXPENSIVE * LARGE
    with victim.withstands(), ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(ask, victim, "/tokenize", {"prompt": text}),
            threads.submit(ask, victim, "/tokenize", {"prompt": text}),
            threads.submit(ask, victim, "/v1/completions", {"prompt": text}),
            threads.submit(
                ask,
                victim,
                "/v1/completions",
                {"prompt": text, "truncate_prompt_tokens": 1000, "max_tokens": 4},
            ),
        ]
        answers = [each.result() for each in asked]
    assert [status for status, _ in answers] == [200, 200, 400, 200]
    assert answers[0][1]["count"] == LARGE
    assert "at least" in answers[2][1]["error"]["message"]
    assert answers[3][1]["usage"]["prompt_tokens"] == 1000
