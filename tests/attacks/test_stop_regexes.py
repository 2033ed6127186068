"""Stop regexes that end or stall engines which try one way after another."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.attacks.siege import Victim
from tests.attacks.witness import HEADERS

DEADLY = (
    r"(?)(?2)(?>(?|(?:((*PRUNE))(?<n>(?:(){4}\G(()))(?|(()a)?(?&n)(())))))){e<3:[z]}",
    r"(a)(?=b)",
    r"(\w+)\1",
    "(a{1000}){1000}",
    "(" * 500 + "a" + ")" * 500,
)
SLOW = ("(a|aa)+$b", r"([a-z ]+)+!", "(.*)*(.*)*[^.]Q", "[a-z ].{400}Q", "(?:[a-z ]?){250}Q")


def complete(victim: Victim, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": victim.model, "prompt": "x", "max_tokens": 200, "ignore_eos": True, **fields}
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize("pattern", DEADLY)
def test_what_an_automaton_can_not_do_is_refused(victim: Victim, pattern: str) -> None:
    with victim.withstands():
        status, answer = complete(victim, stop_regex=pattern)
    assert (status, answer["error"]["param"]) == (400, "stop_regex")


def test_searching_takes_linear_time(victim: Victim) -> None:
    with victim.withstands(), ThreadPoolExecutor(len(SLOW)) as threads:
        asked = [threads.submit(complete, victim, n=24, stop_regex=pattern) for pattern in SLOW]
        answers = [each.result() for each in asked]
    for status, answer in answers:
        assert status == 200 or "takes too long to search for" in answer["error"]["message"]
    assert [status for status, _ in answers[:3]] == [200, 200, 200]
