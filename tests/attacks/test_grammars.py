"""Grammars that take long to compile, or much memory, beside one that takes neither."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.attacks.siege import Victim, besieged
from tests.support.process_faults import hung

HEAVY = 8
"""Grammars that one client has compiled at a time."""


def heavy(number: int) -> dict[str, Any]:
    """Return a schema that takes far longer to compile than a choice of two words."""
    names = [f"property_{number}_{index}" for index in range(400)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


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


def num_arrived(victim: Victim) -> int:
    """Return how many requests the server has taken in and not answered."""
    headers = {"Authorization": "Bearer secret"}
    request = urllib.request.Request(f"{victim.url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    names = ("trioserve:num_requests_waiting{", "trioserve:num_requests_waiting ")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


def order_of_answers(victim: Victim, heavy_ones: range, short: list[str]) -> list[str]:
    """Have one key's heavy grammars compiled and then another key's choice of ``short``.

    A worker that hangs compiles nothing until all have come, in this order.
    """
    (worker,) = (
        each
        for each in psutil.Process(victim.process.pid).children(recursive=True)
        if "gpu" in each.cmdline()
    )
    answered: list[str] = []
    statuses: list[int] = []

    def ask(name: str, key: str, fields: dict[str, Any]) -> None:
        statuses.append(post(victim, key, **fields))
        answered.append(name)

    asked = [(f"heavy {n}", "secret", {"guided_json": heavy(n)}) for n in heavy_ones]
    threads = []
    with hung(worker.pid):
        for each in (*asked, ("short", "other", {"guided_choice": short})):
            threads.append(threading.Thread(target=ask, args=each))
            threads[-1].start()
            while num_arrived(victim) < len(threads):
                time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert {*statuses} <= {200, 400}  # what a machine finds too heavy is refused
    return answered


def test_a_short_choice_beside_another_key_s_heavy_grammars(victim: Victim) -> None:
    # The first ones wait for processes to start.
    order_of_answers(victim, range(2), ["yes", "no"])
    order = order_of_answers(victim, range(2, 2 + HEAVY), ["left", "right"])
    # Without turns it is the last.
    assert order.index("short") < HEAVY // 2, order
