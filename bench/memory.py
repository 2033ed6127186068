"""Memory of all processes of a server: ``python -m bench.memory --compare llama.cpp``.

Each server is started with a KV cache of the same number of tokens, which is then filled: 8
requests at a time of 1,984 tokens in and 32 out. PSS is read before and after: a page that several
processes share counts once.
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

__all__ = ["Memory"]


@attrs.frozen(kw_only=True)
class Memory:
    """PSS with the KV cache filled."""

    streams: int = 8
    prompt_tokens: int = 1984
    output_tokens: int = 32
    context: int = 2048
    name: str = "memory"

    def setting(self, format: str) -> Setting:
        """A KV cache for all streams at their full length."""
        return Setting(
            format=format,
            streams=self.streams,
            context=self.context,
            kv_tokens=self.streams * self.context,
        )

    async def measure(self, server: Server, log: Path, round: int) -> Taken:
        """Start it, fill it, and look."""
        prompts = exact_prompts(tokenizer(), self.streams, self.prompt_tokens, round)
        async with running(server, log) as one:
            before = one.family.pss_bytes()
            bodies = [{"prompt": prompt, "max_tokens": self.output_tokens} for prompt in prompts]
            run = await closed_loop(one.target, bodies, self.streams)
            check(server.title, run, self.prompt_tokens, self.output_tokens)
            return Taken(
                values={
                    "pss_mib": one.family.pss_bytes() / 2**20,
                    "pss_anonymous_mib": one.family.pss_bytes("Pss_Anon") / 2**20,
                    "pss_files_mib": one.family.pss_bytes("Pss_File") / 2**20,
                    "pss_at_start_mib": before / 2**20,
                    "peak_resident_mib": one.family.peak_resident_bytes() / 2**20,
                }
            )


if __name__ == "__main__":
    from bench.compare import main

    sys.exit(main(scenarios=["memory"]))
