"""``trioserve generate``: stream the continuation of a text to stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.cli.terminal import Terminal
from trioserve.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.requests.generation import PromptLike


async def generate(
    engine: Engine,
    prompt: PromptLike,
    params: SamplingParams,
    *,
    terminal: Terminal | None = None,
) -> None:
    """Stream the continuation of ``prompt`` to stdout, followed by a line end."""
    terminal = terminal or Terminal.standard()
    last = ""
    async with engine.generate(prompt, params) as stream:
        async for chunk in stream:
            terminal.write(chunk.text)
            last = chunk.text or last
    if not last.endswith("\n"):
        terminal.write("\n")
