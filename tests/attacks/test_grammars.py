"""Grammars that take long to compile, or much memory, beside one that takes neither."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.attacks.siege import Victim, besieged

HEAVY = 12
"""Grammars that one client has compiled at a time."""


def heavy(number: int) -> str:
    """Return a schema that takes a good part of a second to compile, and megabytes."""
    names = [f"property_{number}_{index}" for index in range(800)]
    return json.dumps(
        {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    )


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A server with a model, whose vocabulary the grammars need, and with two keys."""
    with besieged("--api-key", "other", "--grammar-timeout", "120") as victim:
        yield victim


def post(victim: Victim, key: str, **fields: Any) -> int:
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=120)
    body = {"model": victim.model, "prompt": "x", "max_tokens": 1, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_short_choice_beside_another_key_s_heavy_grammars(victim: Victim) -> None:
    assert post(victim, "secret", guided_choice=["yes", "no"]) == 200  # the vocabulary is built
    statuses: list[int] = []

    def attack(number: int) -> None:
        statuses.append(post(victim, "secret", guided_json=json.loads(heavy(number))))

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(HEAVY)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert post(victim, "other", guided_choice=["left", "right"]) == 200
    waited, left = time.monotonic() - began, sum(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert {*statuses} <= {200, 400}  # what a machine finds too heavy is refused
    # Without turns it is behind all of them; how many are done before it is the machine's speed.
    assert left >= 1, f"it waited {waited:.1f} s, until {HEAVY - left} others were done"
