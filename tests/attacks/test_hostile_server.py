"""``trioserve top`` and ``trioserve chat --url`` against a server that means harm."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from tests.support.live_snapshots import hello, snapshot
from trioserve.cli import commands
from trioserve.cli.top import feed
from trioserve.load import remote

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
BODY = HEAD + b"\r\n"
ENDLESS = 32 << 20
"""Bytes after which a client that reads on hasn't noticed that there is no end."""
DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = "\x1b[2J\x9b2J\u202e\u2066evil"


def event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


HELLO_EVENT = BODY + event("hello", msgspec.json.encode(hello()))


def spoiled(**changes: Any) -> bytes:
    """Return a picture in which the values at dotted paths are others, as bytes of JSON."""
    found = json.loads(msgspec.json.encode(snapshot()))
    for path, value in changes.items():
        *way, last = path.split("__")
        place = found
        for step in way:
            place = place[step]
        place[last] = value
    # Not in ASCII: a text may do harm only as it is.
    return json.dumps(found, ensure_ascii=False).encode()


def tree(depth: int) -> bytes:
    node = b'{"name":"x","state":"","children":['
    return node * depth + b"]}" * depth


@contextlib.contextmanager
def hostile(pieces: Iterable[bytes], *, endless: bool = False) -> Iterator[str]:
    """Open a server that answers each request with ``pieces``, whatever is asked.

    If the last one is empty, the connection stays open, and if it is ``endless``, it is sent again
    and again; then it is for the client to give up.
    """
    stopped = threading.Event()
    waited_out = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    pieces = list(itertools.islice(pieces, 100_000))

    def serve() -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)
                    for _ in range(ENDLESS // len(pieces[-1]) if endless else 0):
                        connection.sendall(pieces[-1])
                    if endless or (pieces and pieces[-1] == b"" and not stopped.wait(10)):
                        waited_out.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        stopped.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listener.getsockname()).close()
        thread.join()
        listener.close()
    assert not waited_out.is_set(), "the client didn't give up"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(feed, "_SILENCE", 0.5)
    monkeypatch.setattr(remote, "_TIMEOUT", 1.0)
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield


ANSWERS: dict[str, list[bytes]] = {
    "nothing": [],
    "noise": [b"\x00\xff" * 1000],
    "an endless head": [b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 10_000],
    "an endless line of a head": [b"HTTP/1.1 200 OK\r\nX: ", b"y" * 65536],
    "interim heads": [b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, b""],
    "a long length": [b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 60_000 + b"\r\n\r\n{}"],
    "a negative length": [b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"],
    "a head that never ends": [b"HTTP/1.1 200 OK\r\n", b""],
    "gzip": [HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1 << 20))],
    "a body that never comes": [BODY, b""],
    "an endless line": [BODY, b"x" * 65536],
    "endless data of an event": [BODY, b"data:\n" * 10_000],
    "deep JSON": [BODY + event("hello", DEEP)],
    "a refusal of deep JSON": [b'HTTP/1.1 500 No\r\n\r\n{"error":' + DEEP + b"}"],
    "a refusal that is no text": [b"HTTP/1.1 500 No\r\n\r\n" + HOSTILE.encode() + b"\xff\xfe"],
    "a status line": [b"HTTP/1.1 " + HOSTILE.encode() + b"\r\n\r\n"],
}
PICTURES: dict[str, bytes] = {
    "a wrong type": spoiled(health=5),
    "no object": b"[]",
    "a huge number": spoiled(counts__running=10**400),
    "a huge number of pages": spoiled(pages__held=10**300, pages__total=1),
    "huge times": spoiled(now=1.7e308, worker__since=-1.7e308),
    "negative rates": spoiled(rates__generated_tokens_per_s=-1e18),
    "a deep tree": spoiled().replace(b'"tasks": {', b'"tasks": ' + tree(5000) + b', "x": {'),
    "a tree that is less deep": spoiled().replace(
        b'"tasks": {', b'"tasks": ' + tree(400) + b', "x": {'
    ),
    "many values": spoiled(prefix__nodes=[[]] * 1_000_000),
    "hostile texts": spoiled(
        health=HOSTILE, weight_version=HOSTILE, worker__state=HOSTILE, worker__last_death=HOSTILE
    ),
    "a long text": spoiled(health="x" * 1_000_000),
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run a command, and return its exit code with all that it printed."""
    code = commands.main(arguments)
    out, err = capsys.readouterr()
    printed = out + err
    assert "Traceback" not in printed
    assert len(printed) < 5_000 or "--json" in arguments
    assert all(each.isprintable() for each in printed.split("\n"))
    return code, printed


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_top_gets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(ANSWERS[name], endless="endless" in name) as url:
        code, printed = run(capsys, "top", url, "--once")
    assert code == 1
    assert printed.startswith("trioserve: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("option", ["--once", "--json"])
def test_pictures_that_top_gets(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = event("picture", PICTURES[name])
    good = event("picture", spoiled())
    with hostile([HELLO_EVENT, shown, good, shown]) as url:
        run(capsys, "top", url, "--once", *([option] if option == "--json" else []))
    with hostile([HELLO_EVENT, good, shown, shown]) as url:
        run(capsys, "top", url, "--once", *([option] if option == "--json" else []))


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_chat_gets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(ANSWERS[name], endless="endless" in name) as url:
        code, _ = run(capsys, "chat", "--url", url)
    assert code == 1


@pytest.mark.parametrize(
    "models",
    [
        {"data": [{"id": HOSTILE}]},
        {"data": [{"id": "m", "max_model_len": 10**400}]},
        {"data": [{"id": 5}]},
        {"data": []},
        [],
    ],
)
def test_models_that_chat_gets(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with hostile([b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(models).encode()]) as url:
        run(capsys, "chat", "--url", url)
