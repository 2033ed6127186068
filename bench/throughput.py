"""Closed loops of several widths: ``python -m bench.throughput --compare llama.cpp``.

128 tokens in, 128 out, greedy, streaming over ``/v1/completions``; no two prompts begin alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import attrs

from bench.prompts import exact_prompts, tokenizer
from bench.scenario import Taken, Turn, taken_from
from bench.servers import Running
from bench.validity import check
from trioserve.load import closed_loop

__all__ = ["Throughput"]

_WARM_UP_TOKENS = 8


@attrs.frozen(kw_only=True)
class Throughput:
    """Each width of the closed loop is a case."""

    streams: Sequence[int] = (1, 8, 32)
    requests_per_stream: int = 2
    prompt_tokens: int = 128
    output_tokens: int = 128
    name: str = "throughput"

    def warm_up(self) -> list[Turn]:
        """A few tokens at each width."""
        return [self._turn(streams, 1, _WARM_UP_TOKENS, "warm-up") for streams in self.streams]

    def turns(self, round: int) -> list[Turn]:
        """Each width once."""
        return [
            self._turn(streams, self.requests_per_stream, self.output_tokens, f"round {round}")
            for streams in self.streams
        ]

    def _turn(self, streams: int, requests: int, output_tokens: int, when: str) -> Turn:
        seed = f"{self.name}, {streams} streams, {when}"
        prompts = exact_prompts(tokenizer(), streams * requests, self.prompt_tokens, seed)

        async def measure(one: Running) -> Taken:
            bodies = [{"prompt": prompt, "max_tokens": output_tokens} for prompt in prompts]
            run = await closed_loop(one.target, bodies, streams)
            check(one.server.title, run, self.prompt_tokens, output_tokens)
            return taken_from(run)

        return Turn(case=f"{streams} streams" if streams > 1 else "1 stream", measure=measure)


if __name__ == "__main__":
    from bench.compare import main

    sys.exit(main(scenarios=["throughput"]))
