"""The yardstick of a front end: its client counts right, and figures come from a real server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from bench.front_end.__main__ import Workload, once, own, processes, table, verdicts
from bench.front_end.client import Load, WrongAnswer, run
from bench.report import Rounds


def event(**values: object) -> bytes:
    data = b"data: %b\n\n" % json.dumps(values).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(texts: int) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = [event(choices=[{"text": "data: {"}]) for _ in range(texts)]
    usage = event(choices=[], usage={"completion_tokens": texts, "total_tokens": 99})
    return head + b"".join(events) + usage + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.fixture
def server() -> Iterator[tuple[socket.socket, list[bytes]]]:
    """A listening socket and the pieces of its answers: one connection, at most two requests.

    An answer that isn't whole is the last.
    """
    pieces: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for _ in range(2):
                    if not connection.recv(1 << 16):
                        return
                    for piece in pieces:
                        connection.sendall(piece)
                    if not b"".join(pieces).endswith(b"0\r\n\r\n"):
                        return

        listener.settimeout(10)
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener, pieces
        thread.join(10)


def load_of(listener: socket.socket) -> Load:
    host, port = listener.getsockname()
    return Load(host=host, port=port, path="/", streams=1, bodies=["{}", "{}"], cores=[])


@pytest.mark.parametrize("size", [1, 7, 60, 10**6])
def test_every_event_counts_once_however_the_bytes_come(
    server: tuple[socket.socket, list[bytes]], size: int
) -> None:
    listener, pieces = server
    whole = answer(5)
    pieces += [whole[start : start + size] for start in range(0, len(whole), size)]
    seen = run(load_of(listener))
    # A text that looks like an event is counted as one: what is measured never says that.
    assert (seen.requests, seen.tokens, seen.events) == (2, 10, 2 * 2 * 5)
    assert len(seen.ttft) == 2
    assert seen.duration > 0


@pytest.mark.parametrize("refusal", [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b""])
def test_a_server_that_refuses_or_leaves_ends_the_run(
    server: tuple[socket.socket, list[bytes]], refusal: bytes
) -> None:
    listener, pieces = server
    pieces += [refusal or answer(5)[:-5]]
    with pytest.raises(WrongAnswer):
        run(load_of(listener))


async def test_a_server_with_a_mock_worker_is_measured_from_outside() -> None:
    load = Workload(streams=4, requests=8, output_tokens=20)
    async with own(load) as at, at(0.0) as up:
        found = await once(up, 0.0, load)
    assert 1.0 <= found["tokens_per_event"] <= 20.0
    assert found["tokens_per_second"] == pytest.approx(20 * found["requests_per_second"])
    assert found["ttft_p99_ms"] >= found["ttft_p50_ms"] > 0
    assert found["server_us"] > 0
    assert found["server_us"] == pytest.approx(found["engine"] + found["worker"], rel=0.5)


NAMES = """
step_ms tokens_per_second requests_per_second tokens_per_event ttft_mean_ms ttft_p50_ms ttft_p99_ms
gap_p50_ms gap_p99_ms server_us client_core_used
"""
FIGURES = dict.fromkeys(NAMES.split(), 1.0)


def test_ratios_are_of_runs_of_the_same_round_and_width() -> None:
    rounds = Rounds()
    for rates in ((30.0, 10.0), (90.0, 10.0), (50.0, 10.0)):
        for server, rate in zip(("trioserve", "vllm"), rates, strict=True):
            rounds.add((64, server), **FIGURES | {"tokens_per_second": rate})
    (verdict,) = verdicts(rounds)
    assert (verdict.what, verdict.reached) == ("tokens/s over a mock, 64 streams", 5.0)
    lines = table(rounds).splitlines()
    assert [line.split(" | ")[3] for line in lines[2:]] == ["50", "10"]


def test_the_busiest_process_bounds_the_rate_and_a_mock_worker_does_not() -> None:
    rounds = Rounds()
    used = {"engine": 4.0, "front end 0": 8.0, "front end 1": 10.0, "worker": 20.0}
    rounds.add((64, "trioserve, 2 front ends"), **FIGURES | used)
    heads, _, row = processes(rounds).splitlines()
    assert "not measured" in heads
    assert row == "| 64 | trioserve, 2 front ends | 4.0 | 8.0 · 10.0 | 20.0 | 100000 |"
    assert verdicts(rounds) == []
