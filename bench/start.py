"""From starting a server to its first token: ``python -m bench.start --compare llama.cpp``.

The server is asked as soon as it says that it is healthy: 128 tokens in, streaming. The files are
in the system's cache from the second round on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import attrs

from bench.prompts import exact_prompts, tokenizer
from bench.scenario import Taken
from bench.servers import Server, running
from bench.setting import Setting
from bench.validity import check
from trioserve.load import closed_loop

__all__ = ["Start"]


@attrs.frozen(kw_only=True)
class Start:
    """Seconds to healthy, and to the first token of the first request."""

    prompt_tokens: int = 128
    output_tokens: int = 4
    name: str = "start"

    def setting(self, format: str) -> Setting:
        """As the other scenarios have it."""
        return Setting(format=format)

    async def measure(self, server: Server, log: Path, round: int) -> Taken:
        """Start it and ask once."""
        prompts = exact_prompts(tokenizer(), 1, self.prompt_tokens, round)
        async with running(server, log) as one:
            bodies = [{"prompt": prompts[0], "max_tokens": self.output_tokens}]
            run = await closed_loop(one.target, bodies, 1)
            check(server.title, run, self.prompt_tokens, self.output_tokens)
            record = run.records[0]
            return Taken(
                values={
                    "first_token_seconds": record.chunks[0] - one.started,
                    "healthy_seconds": record.started - one.started,
                }
            )


if __name__ == "__main__":
    from bench.compare import main

    sys.exit(main(scenarios=["start"]))
