"""A long beginning that requests share: ``python -m bench.shared_prefix --compare vllm``.

16 requests, 4 at a time: 1,000 tokens that are the same in all of a round and in no other round,
32 of their own, and 64 out.
"""

from __future__ import annotations

import sys

import attrs

from bench.prompts import exact_prompts, tokenizer
from bench.scenario import Taken, Turn, taken_from
from bench.servers import Running
from bench.validity import check
from trioserve.load import closed_loop

__all__ = ["SharedPrefix"]


@attrs.frozen(kw_only=True)
class SharedPrefix:
    """One case: all requests of a prefix."""

    prefix_tokens: int = 1000
    own_tokens: int = 32
    output_tokens: int = 64
    requests: int = 16
    at_a_time: int = 4
    name: str = "shared_prefix"

    def warm_up(self) -> list[Turn]:
        """The same on a small scale."""
        return [self._turn(self.at_a_time, "warm-up")]

    def turns(self, round: int) -> list[Turn]:
        """A prefix of its own for each round."""
        return [self._turn(self.requests, f"round {round}")]

    def _turn(self, requests: int, when: str) -> Turn:
        seed, prefix = f"{self.name}, {when}", self.prefix_tokens
        prompts = exact_prompts(tokenizer(), requests, self.own_tokens, seed, prefix_tokens=prefix)

        async def measure(one: Running) -> Taken:
            bodies = [{"prompt": prompt, "max_tokens": self.output_tokens} for prompt in prompts]
            run = await closed_loop(one.target, bodies, self.at_a_time)
            check(one.server.title, run, self.prefix_tokens + self.own_tokens, self.output_tokens)
            return taken_from(run)

        return Turn(case="", measure=measure)


if __name__ == "__main__":
    from bench.compare import main

    sys.exit(main(scenarios=["shared_prefix"]))
