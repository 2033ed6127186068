"""The bounds can fail: a planted fault of each kind is seen."""

from __future__ import annotations

import http.client
import json
import signal
import time
from urllib.parse import urlsplit

import pytest

from tests.attacks.siege import Victim
from tests.attacks.witness import HEADERS

BODY = {"model": "smollm2-135m", "prompt": "x", "max_tokens": 4}


def ask(victim: Victim) -> None:
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(BODY), HEADERS)
    assert connection.getresponse().status == 200
    connection.close()


def test_an_ordinary_request_is_within_the_bounds(victim: Victim) -> None:
    with victim.withstands():
        ask(victim)


def test_a_busy_loop_is_seen(victim: Victim) -> None:
    with pytest.raises(AssertionError, match="event loop was busy"):
        with victim.withstands(busy=0.0):
            ask(victim)


def test_memory_is_seen(victim: Victim) -> None:
    with pytest.raises(AssertionError, match=r"the server took -?\d+ MiB"):
        with victim.withstands(memory=-(2**30)):
            ask(victim)


def test_a_witness_that_waits_is_seen(victim: Victim) -> None:
    with pytest.raises(AssertionError, match="witness waited"):
        with victim.withstands(gap=0.4):
            victim.process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            victim.process.send_signal(signal.SIGCONT)
