"""Far more requests than a server can compute: what do those get that are admitted?

``python -m tests.faults.overload``. First as many clients as the server runs and lets wait keep it
busy, and none is refused. Then a flood of others comes that ask again as soon as they were refused.
Measured are the latency of admitted requests without and with the flood, how soon the others are
told, how many that are in a second, and the server's memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from bench.report import Made, run_script
from bench.servers import MODEL
from tests.faults.stage import Subject, pair, resident_bytes, serving, verdict_of

_WARM_UP_SECONDS = 5.0


@attrs.define(eq=False)
class Load:
    """Clients on connections of their own that ask again as soon as they were answered.

    ``answers`` has the status and the seconds of each, ``hints`` what refusals said in
    ``Retry-After``, ``sizes`` the server's memory meanwhile, in MiB.
    """

    subject: Subject
    body: bytes
    answers: list[tuple[int, float]] = attrs.field(factory=list)
    hints: set[int] = attrs.field(factory=set)
    sizes: list[float] = attrs.field(factory=list)

    async def run(self, clients: int, seconds: float) -> Load:
        """Let ``clients`` at the server for a while, after a warm-up."""
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(self._ask)
            await trio.sleep(_WARM_UP_SECONDS)
            self.answers.clear()
            with trio.move_on_after(seconds):
                while True:
                    self.sizes.append(resident_bytes(self.subject.pid) / 2**20)
                    await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        await self.subject.wait_idle()
        return self

    async def _ask(self) -> None:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        )
        port = self.subject.running.port
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            while True:
                started = trio.current_time()
                await stream.send_all(head.encode() + self.body)
                status, headers = await _answer(stream)
                self.answers.append((status, trio.current_time() - started))
                if "retry-after" in headers:
                    self.hints.add(int(headers["retry-after"]))

    def seconds(self, *, served: bool) -> list[float]:
        """Return the time of each request that was served, or refused."""
        return [seconds for status, seconds in self.answers if (status == 200) == served]


async def _answer(stream: trio.SocketStream) -> tuple[int, dict[str, str]]:
    """Return the status and headers of an answer, which is read to its end."""

    async def part() -> bytes:
        if not (data := await stream.receive_some()):
            raise trio.BrokenResourceError("the server closed")
        return bytes(data)

    data = b""
    while b"\r\n\r\n" not in data:
        data += await part()
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    left = int(headers["content-length"]) - len(body)
    while left > 0:
        left -= len(await part())
    return int(first.split()[1]), headers


async def overload(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run both phases; return the figures, and whether only admitted requests were served."""
    given = ["--max-num-seqs", options.running, "--max-num-queued-reqs", options.waiting]
    if options.threads:
        given += ["--num-threads", options.threads]
    body = {"prompt": "Once upon a time", "max_tokens": options.tokens, "ignore_eos": True}
    encoded, fitting = json.dumps(body).encode(), options.running + options.waiting
    async with serving(*map(str, given), model=options.model) as subject:
        alone = await Load(subject, encoded).run(fitting, options.seconds)
        flood = await Load(subject, encoded).run(fitting + options.flood, options.seconds)
        after = resident_bytes(subject.pid) / 2**20
    served, refused = flood.seconds(served=True), flood.seconds(served=False)
    half = len(flood.sizes) // 2
    memory = (max(alone.sizes), max(flood.sizes[:half]), max(flood.sizes[half:]), after)
    rates = (len(each) / options.seconds for each in (alone.seconds(served=True), served))
    figures = {
        "admitted without the flood, p50 · p99 ms": pair(alone.seconds(served=True)),
        "admitted with it, p50 · p99 ms": pair(served),
        "served per second, without · with": " · ".join(f"{rate:.2f}" for rate in rates),
        "refused per second": f"{len(refused) / options.seconds:.1f}",
        "until a refusal, p50 · p99 ms": pair(refused),
        "Retry-After, s": ", ".join(map(str, sorted(flood.hints))),
        "server's memory before · first half · second half · after, MiB": " · ".join(
            f"{size:.1f}" for size in memory
        ),
    }
    statuses = {status for status, _ in flood.answers}
    return figures, not alone.seconds(served=False) and statuses <= {200, 429}


async def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    figures, good = await overload(options)
    return verdict_of("overload", figures, good)


def main(arguments: Sequence[str] | None = None) -> int:
    """Flood a server; return 1 if it answered what it shouldn't."""
    return run_script(
        *("faults_overload", measure, arguments),
        **{"model": MODEL, "running": 8, "waiting": 16, "flood": 100, "tokens": 16},
        **{"threads": 0, "seconds": 20.0},
    )


if __name__ == "__main__":
    raise SystemExit(main())
