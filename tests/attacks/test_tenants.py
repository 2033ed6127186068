"""A client with a key of its own that takes all it can get of what the keys share."""

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

NUM_CLIENTS = 128
QUEUE = 64
SECONDS = 3.0


@pytest.fixture(scope="module", params=["1", "2"])
def shared(request: pytest.FixtureRequest) -> Iterator[Victim]:
    """A server with two keys and a short queue, of one process and with two front ends."""
    options = ("--api-key", "greedy", "--api-server-count", request.param)
    queue = ("--max-num-seqs", "16", "--max-num-queued-reqs", str(QUEUE), "--max-sessions", "8")
    scope = ("--prefix-cache-scope", "key")
    with besieged("--mock-worker", "5ms", *options, *queue, *scope) as victim:
        yield victim


def ask(victim: Victim, path: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def flood(victim: Victim, end: float, statuses: list[int]) -> None:
    body = {"model": victim.model, "prompt": "x", "max_tokens": 32, "ignore_eos": True}
    while time.monotonic() < end:
        status, _ = ask(victim, "/v1/completions", body, "greedy")
        statuses.append(status)


def test_a_key_that_floods_the_queue(shared: Victim) -> None:
    statuses: list[int] = []
    # The clients' own work takes a part of the machine.
    with shared.withstands(gap=3.0):
        end = time.monotonic() + SECONDS
        clients = [
            threading.Thread(target=flood, args=(shared, end, statuses)) for _ in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    # The witness has never been refused, or it would have failed.
    assert set(statuses) == {200, 429}


def waiting(victim: Victim) -> int:
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=60)
    connection.request("GET", "/load", headers={"Authorization": "Bearer greedy"})
    loads = json.loads(connection.getresponse().read())
    connection.close()
    return int(loads["num_waiting_reqs"])


@pytest.mark.parametrize("num_front_ends", ["1", "2"])
def test_a_key_that_fills_its_share_of_the_queue(num_front_ends: str) -> None:
    options = ("--api-key", "greedy", "--api-server-count", num_front_ends)
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 32, "ignore_eos": True}
    finished: list[int] = []
    with besieged("--mock-worker", "5ms", "--max-num-seqs", "1", *options) as victim:
        body["model"] = victim.model

        def complete() -> None:
            finished.append(ask(victim, "/v1/completions", body, "greedy")[0])

        clients = [threading.Thread(target=complete) for _ in range(40)]
        for client in clients:
            client.start()
        while waiting(victim) < 30:
            time.sleep(0.01)
        before = len(finished)
        status, _ = ask(victim, "/v1/completions", body, "secret")
        # One was running and another one's turn came first; some time passes on the way there.
        assert status == 200
        assert len(finished) - before <= 10
        for client in clients:
            client.join()
        assert finished == [200] * 40


def test_a_key_that_opens_all_sessions(shared: Victim) -> None:
    body = {"capacity_of_str_len": 1000}
    opened = [ask(shared, "/open_session", body, "greedy")[0] for _ in range(8)]
    assert opened == [200] * 4 + [429] * 4
    status, _ = ask(shared, "/open_session", body, "secret")
    assert status == 200


def test_what_the_cache_tells_of_others(shared: Victim) -> None:
    body = {"model": shared.model, "prompt": [5] * 200, "max_tokens": 1}
    found = [ask(shared, "/v1/completions", body, key)[1] for key in ("secret", "greedy", "secret")]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]
    assert cached == [0, 0, 192]
