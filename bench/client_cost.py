"""What the load generator itself costs: µs of its CPU for each event, by number of streams.

``python -m bench.client_cost`` starts a process that does nothing but send events, one to each
stream every step, as a server does that computes a batch. The client is measured twice: as runs use
it, with one task that reads all sockets, and with a task per connection; and beside both, h11's own
share for the same bytes.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import h11
import trio

from bench.report import machine, own_versions
from trioserve.load import Client, Record, Target, closed_loop, over_tcp

__all__ = ["main"]

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"smollm2-135m","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n'


def serve(streams: int, events: int, step: float) -> None:
    """Answer ``streams`` requests, all together, an event each every ``step`` seconds."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connections = [listener.accept()[0] for _ in range(streams)]
            for connection in connections:
                connection.recv(65536)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(_HEAD)
            at = time.monotonic()
            for _ in range(events):
                at += step
                time.sleep(max(at - time.monotonic(), 0))
                for connection in connections:
                    connection.sendall(_CHUNK)
            usage = _END % events
            for connection in connections:
                connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(usage), usage))
            # Each round has connections of its own.
            poll = select.poll()
            for connection in connections:
                poll.register(connection, select.POLLIN)
            for connection in connections:
                connection.recv(1)
                connection.close()


async def _task_per_connection(target: Target, streams: int) -> list[Record]:
    records: list[Record] = []

    async def one() -> None:
        async with Client(target) as client:
            records.append(await client.send({"prompt": "x"}))

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(one)
    return records


async def _one_task(target: Target, streams: int) -> list[Record]:
    return (await closed_loop(target, [{"prompt": "x"}] * streams, streams)).records


def _h11_seconds(events: int) -> float:
    """CPU seconds that h11 takes to give the data of as many events, each read by itself."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(_HEAD)
    connection.next_event()
    began = time.process_time()
    for _ in range(events):
        connection.receive_data(_CHUNK)
        while connection.next_event() is not h11.NEED_DATA:
            pass
    return time.process_time() - began


def measure(streams: int, events: int, step: float, rounds: int) -> dict[str, float]:
    """µs of the client's CPU per event: medians over the rounds, ways in turns."""
    command = [sys.executable, "-m", "bench.client_cost", "--serve"]
    command += [str(streams), str(events), str(step)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    costs: dict[str, list[float]] = {"one task": [], "a task per connection": [], "h11 alone": []}
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        target = Target(connect=over_tcp(f"http://127.0.0.1:{port}"), path="/", fields={})
        for _ in range(rounds):
            for name, run in (
                ("one task", _one_task),
                ("a task per connection", _task_per_connection),
            ):
                began = time.process_time()
                records = trio.run(run, target, streams)
                took = time.process_time() - began
                assert all(not r.error and len(r.chunks) == events for r in records), records[0]
                costs[name].append(1e6 * took / (streams * events))
            costs["h11 alone"].append(1e6 * _h11_seconds(events) / events)
    finally:
        server.kill()
        server.wait()
    return {name: round(statistics.median(values), 2) for name, values in costs.items()}


def main() -> int:
    """Print a line for each number of streams, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.client_cost", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 256, 1024])
    parser.add_argument("--events", type=int, default=200, help="of each stream")
    parser.add_argument("--step", type=float, default=0.02, help="seconds between two events")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(int(options.serve[0]), int(options.serve[1]), float(options.serve[2]))
        return 0
    results = {}
    for streams in options.streams:
        results[streams] = measure(streams, options.events, options.step, options.rounds)
        parts = ", ".join(f"{name} {cost:.1f}" for name, cost in results[streams].items())
        print(f"{streams:5} streams, µs of CPU per event: {parts}", flush=True)
    if options.json:
        facts = {"machine": machine(), "versions": own_versions(), "us_per_event": results}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
