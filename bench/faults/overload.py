"""Far more requests than a server can compute: what do those get that are admitted?

``python -m bench.faults.overload``. First as many clients as the server runs and lets wait keep it
busy, and none is refused. Then a flood of others comes that ask again as soon as they were refused.
Measured are the latency of admitted requests without and with the flood, how soon the others are
told, how many that are in a second, and the server's memory.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from bench.faults.results import RESULTS, markdown, save, spread
from bench.faults.server import Subject, serving
from bench.servers import MODEL

_MIB = 1 << 20
_SAMPLE_SECONDS = 0.5
_WARM_UP_SECONDS = 5.0


@attrs.define(eq=False)
class Load:
    """Clients on connections of their own that ask again as soon as they were answered."""

    port: int
    body: bytes
    served: list[float] = attrs.field(factory=list)
    """Seconds that each request took that was answered."""
    refused: list[float] = attrs.field(factory=list)
    statuses: Counter[int] = attrs.field(factory=Counter)
    hints: list[int] = attrs.field(factory=list)
    """What each refusal said in ``Retry-After``, in seconds."""

    def forget(self) -> None:
        """Begin to measure."""
        for figures in (self.served, self.refused, self.statuses, self.hints):
            figures.clear()

    async def client(self) -> None:
        """One of them. It never ends."""
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        )
        request = head.encode() + self.body
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            while True:
                started = trio.current_time()
                await stream.send_all(request)
                status, headers = await _answer(stream)
                seconds = trio.current_time() - started
                self.statuses[status] += 1
                if status == 200:
                    self.served.append(seconds)
                else:
                    self.refused.append(seconds)
                    self.hints.append(int(headers.get("retry-after", 0)))


async def _answer(stream: trio.SocketStream) -> tuple[int, dict[str, str]]:
    """The status and headers of an answer, which is read to its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await _part(stream)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    left = int(headers["content-length"]) - len(body)
    while left > 0:
        left -= len(await _part(stream))
    return int(first.split()[1]), headers


async def _part(stream: trio.SocketStream) -> bytes:
    part = await stream.receive_some()
    if not part:
        raise trio.BrokenResourceError("the server closed")
    return bytes(part)


async def _watch_memory(subject: Subject, sizes: list[int]) -> None:
    while True:
        sizes.append(subject.footprints()[0].resident_bytes)
        await trio.sleep(_SAMPLE_SECONDS)


async def _phase(subject: Subject, loads: Sequence[tuple[Load, int]], seconds: float) -> list[int]:
    """Let clients of ``loads`` at the server; how much memory it held meanwhile."""
    sizes: list[int] = []
    async with trio.open_nursery() as nursery:
        for load, count in loads:
            for _ in range(count):
                nursery.start_soon(load.client)
        await trio.sleep(_WARM_UP_SECONDS)
        for load, _ in loads:
            load.forget()
        nursery.start_soon(_watch_memory, subject, sizes)
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()
    await subject.wait_idle()
    return sizes


async def overload(model: str, given: argparse.Namespace) -> dict[str, Any]:
    """Both phases over a server of ``model``; the figures."""
    options = ["--max-num-seqs", given.running, "--max-num-queued-reqs", given.waiting]
    if given.threads is not None:
        options += ["--num-threads", given.threads]
    body = {"prompt": "Once upon a time", "max_tokens": given.tokens, "ignore_eos": True}
    encoded = json.dumps(body).encode()
    async with serving(*map(str, options), model=model) as subject:
        port = subject.running.port
        alone, beside, flood = (Load(port, encoded) for _ in range(3))
        fitting = given.running + given.waiting
        before = await _phase(subject, [(alone, fitting)], given.seconds)
        during = await _phase(subject, [(beside, fitting), (flood, given.flood)], given.seconds)
        after = subject.footprints()[0].resident_bytes
    served = [*beside.served, *flood.served]
    refused = [*beside.refused, *flood.refused]
    hints = sorted({*beside.hints, *flood.hints})
    half = len(during) // 2
    return {
        "without_flood": spread(alone.served),
        "with_flood": spread(served),
        "statuses": {str(key): n for key, n in sorted((beside.statuses + flood.statuses).items())},
        "refused": spread(refused),
        "refused_per_second": round(len(refused) / given.seconds, 1),
        "served_per_second": {
            "without_flood": round(len(alone.served) / given.seconds, 2),
            "with_flood": round(len(served) / given.seconds, 2),
        },
        "retry_after": hints,
        "memory_mib": {
            "before": round(max(before) / _MIB, 1),
            "first_half": round(max(during[:half]) / _MIB, 1),
            "second_half": round(max(during[half:]) / _MIB, 1),
            "after": round(after / _MIB, 1),
        },
        "passed": not alone.refused and not {*beside.statuses, *flood.statuses} - {200, 429},
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    alone, flooded, refused = (figures[name] for name in ("without_flood", "with_flood", "refused"))
    memory, rate = figures["memory_mib"], figures["served_per_second"]
    rows = [
        ("admitted without the flood, p50 · p99 ms", f"{alone['p50_ms']} · {alone['p99_ms']}"),
        ("admitted with it, p50 · p99 ms", f"{flooded['p50_ms']} · {flooded['p99_ms']}"),
        ("served per second, without · with", f"{rate['without_flood']} · {rate['with_flood']}"),
        ("refused per second", figures["refused_per_second"]),
        ("until a refusal, p50 · p99 ms", f"{refused['p50_ms']} · {refused['p99_ms']}"),
        ("Retry-After, s", ", ".join(map(str, figures["retry_after"]))),
        (
            "server's memory before · first half · second half · after, MiB",
            " · ".join(str(each) for each in memory.values()),
        ),
    ]
    return markdown(("overload", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Flood a server, print the table and save the record. 1 if it answered what it shouldn't."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.overload", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--running", type=int, default=8, help="requests computed together")
    parser.add_argument("--waiting", type=int, default=16, help="requests that may wait")
    parser.add_argument("--flood", type=int, default=100, help="clients beyond those that fit")
    parser.add_argument("--tokens", type=int, default=16, help="of each output")
    parser.add_argument("--threads", type=int, help="of the worker (default: all cores)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    given = parser.parse_args(arguments)
    figures = trio.run(overload, given.model, given)
    print(table(figures))
    print(f"saved {save(RESULTS, 'overload', vars(given), figures)}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
