"""The CPU that a server goes on burning after all its clients have left.

``python -m bench.cpu_after_leave --compare vllm``: 16 streams are cut off in the middle, all at
once. Until the server is idle, the CPU time of all its processes is counted, less what it used in
the same time while it had nothing to do.
"""

from __future__ import annotations

import sys

import attrs
import trio

from bench.prompts import exact_prompts, tokenizer
from bench.scenario import Taken, Turn
from bench.servers import Running
from bench.validity import InvalidRun
from trioserve.load import Client, Record

__all__ = ["CpuAfterLeave"]

_LOOK_EVERY = 0.05
IDLE_SECONDS = 2.0
# Idle is who uses no more than before, and so much of a core, in so many seconds.
QUIET_SECONDS, QUIET_SHARE = 1.5, 0.05
_ALL_STARTED, _ALL_DONE = 120.0, 120.0


@attrs.frozen(kw_only=True)
class CpuAfterLeave:
    """One case: so many clients leave after so many events each."""

    clients: int = 16
    events: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 1000
    name: str = "cpu_after_leave"

    def warm_up(self) -> list[Turn]:
        """Other scenarios warm the servers up; here one client leaves."""
        return [attrs.evolve(self, clients=1)._turn("warm-up")]

    def turns(self, round: int) -> list[Turn]:
        """Prompts of its own for each round."""
        return [self._turn(f"round {round}")]

    def _turn(self, when: str) -> Turn:
        seed = f"{self.name}, {when}"
        prompts = exact_prompts(tokenizer(), self.clients, self.prompt_tokens, seed)

        async def measure(one: Running) -> Taken:
            idle = await _idle_rate(one)
            await self._come_and_go(one, prompts)
            burnt, seconds = await _until_idle(one, idle)
            return Taken(values={"burnt_cpu_seconds": burnt, "seconds": seconds, "idle": idle})

        return Turn(case="", measure=measure)

    async def _come_and_go(self, one: Running, prompts: list[str]) -> None:
        records: list[Record] = []

        async def ask(prompt: str) -> None:
            records.append(Record(started=trio.current_time()))
            async with Client(one.target) as client:
                await client.ask({"prompt": prompt, "max_tokens": self.output_tokens}, records[-1])

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
            with trio.move_on_after(_ALL_STARTED):
                while sum(len(r.chunks) >= self.events for r in records) < len(prompts):
                    await trio.sleep(_LOOK_EVERY)
                    if any(record.error or record.finish_reason for record in records):
                        break
            nursery.cancel_scope.cancel()
        late = [record for record in records if len(record.chunks) < self.events]
        if late or any(record.finish_reason for record in records):
            raise InvalidRun(
                f"{one.server.title}: not all streams ran at the same time: "
                f"{late[0].error if late else 'one has ended'}"
            )


async def _idle_rate(one: Running) -> float:
    """Cores that the server uses while it has nothing to do."""
    before = one.family.cpu_seconds()
    await trio.sleep(IDLE_SECONDS)
    return (one.family.cpu_seconds() - before) / IDLE_SECONDS


async def _until_idle(one: Running, idle: float) -> tuple[float, float]:
    """Seconds of CPU from now until the server is idle, and the seconds that takes.

    Raises:
        InvalidRun: it isn't within two minutes.
    """
    began = trio.current_time()
    samples = [(0.0, one.family.cpu_seconds())]
    while True:
        await trio.sleep(_LOOK_EVERY)
        now, used = trio.current_time() - began, one.family.cpu_seconds()
        samples.append((now, used))
        then, used_then = max(s for s in samples if s[0] <= max(now - QUIET_SECONDS, 0.0))
        quiet = (idle + QUIET_SHARE) * (now - then)
        if now >= QUIET_SECONDS and used - used_then <= quiet:
            # What was used while it seemed quiet counts, too, as far as it is more than before.
            return max(used - samples[0][1] - idle * now, 0.0), then
        if now > _ALL_DONE:
            raise InvalidRun(f"{one.server.title}: still busy after {_ALL_DONE:g} s")


if __name__ == "__main__":
    from bench.compare import main

    sys.exit(main(scenarios=["cpu_after_leave"]))
