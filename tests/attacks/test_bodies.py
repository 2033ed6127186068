"""Bodies that are legal in size and made to take long, or to be kept."""

from __future__ import annotations

import contextlib
import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.attacks.siege import MAX_BUSY, MAX_GAP, MAX_MEMORY, Victim
from tests.attacks.witness import HEADERS

LARGE = 31 << 20
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"


def post(victim: Victim, path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the answer to ``body``."""
    connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, body, HEADERS)
        response = connection.getresponse()
        return response.status, response.read()


def chat(content: bytes = b'"x"', more: bytes = b"") -> bytes:
    return b'{"max_tokens":1,"messages":[{"role":"user","content":%s}]%s}' % (content, more)


def text(more: bytes) -> bytes:
    return b'{"max_tokens":1,"prompt":"x",%s}' % more


def many(item: bytes, number: int) -> bytes:
    return b"[" + b",".join([item] * number) + b"]"


def messages(message: bytes, number: int) -> bytes:
    return b'{"max_tokens":1,"messages":%s}' % many(message, number)


PART = b'{"type":"text","text":""}'
CALL = b'{"id":"c","function":{"name":"f","arguments":"{}"}}'
CALLS = b'{"role":"assistant","content":"x","tool_calls":%s}'
INPUT = b'{"role":"user","content":%s}'
KEYS = b",".join(b'"%d":1' % number for number in range(1_900_000))

BODIES = {
    "254,000 parts": (CHAT, messages(b'{"role":"user","content":%s}' % many(PART, 1000), 254)),
    "86,000 tool calls": (CHAT, messages(CALLS % many(CALL, 120), 720)),
    "parts of items without a type": (
        RESPONSES,
        b'{"input":%s}' % many(INPUT % many(b'{"type":"input_text","text":""}', 60), 4000),
    ),
    "a field that is not known": (CHAT, b'{"%s":1}' % (b"x" * LARGE)),
    "a value that is not known": (CHAT, chat(more=b',"tool_choice":"%s"' % (b"x" * LARGE))),
    "1,900,000 biases": (TEXT, text(b'"logit_bias":{%s}' % KEYS)),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_takes_long(victim: Victim, kind: str) -> None:
    path, body = BODIES[kind]
    post(victim, path, body)  # A virtual machine may be slow to back memory for the first time.
    with victim.withstands(busy=2 * MAX_BUSY, gap=2 * MAX_GAP):
        status, answer = post(victim, path, body)
    assert status == 400, answer
    assert len(answer) < 10_000


def test_the_description_in_a_loop(victim: Victim) -> None:
    def load(_: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(victim.url).netloc, timeout=120)
        with contextlib.closing(connection):
            connection.request("GET", "/openapi.json", headers=HEADERS)
            assert connection.getresponse().read()

    with victim.withstands(), ThreadPoolExecutor(8) as pool:
        list(pool.map(load, range(100)))


def test_slow_bodies_that_take_all_room(victim: Victim) -> None:
    """The room of all bodies is full but for some bytes, of bodies that never end."""
    size = 32 << 20
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    address = urlsplit(victim.url)
    target = (address.hostname or "", address.port or 0)
    padded = text(b'"stream":false') + b" " * (4 << 20)
    # A buffer that grows in steps has up to an eighth more than is in it.
    with victim.withstands(memory=MAX_MEMORY + (128 << 20)), contextlib.ExitStack() as stack:
        for _ in range(12):
            client = stack.enter_context(socket.create_connection(target))
            client.sendall(head.encode())
            client.sendall(b" " * (size - 1))
        status, answer = post(victim, TEXT, padded)
        assert status == 200, answer
