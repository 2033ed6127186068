"""This project's whole HTTP layer over an engine that gives every stream a token per tick.

``python -m bench.front_end.sse_server PORT``. Requests are read, checked and admitted as
ever; what would come from the scheduler and the detokenizer is pushed into each request's stream.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import trio

from bench.front_end.sse_peers import INTERVAL
from trioserve.config import ServerConfig
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.http.server.server import serve_app
from trioserve.protocol.gc_tuning import rare_collections
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import GenerationStream
from trioserve.requests.prompts import Prompt
from trioserve.requests.request import Request, Times
from trioserve.requests.stream import Chunk, Stream, StreamBudget
from trioserve.testing.fake_engine import open_fake_engine

_TOKEN = Chunk(" token", (17,))


class PacedEngine:
    """``engine`` with other output: a token for all streams at once, every :data:`INTERVAL`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._budget = StreamBudget(per_stream=1 << 20, total=1 << 30)
        self._streams: dict[Stream, None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextlib.asynccontextmanager
    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, **_: Any
    ) -> AsyncIterator[GenerationStream]:
        """Yield a stream without an end."""
        stream = Stream(self._budget)
        request = Request(
            id=request_id,
            prompt=prompt,
            params=params,
            stream=stream,
            times=Times(trio.current_time()),
            prompt_ids=[1, 2, 3],
        )
        self._streams[stream] = None
        try:
            yield GenerationStream(request)
        finally:
            del self._streams[stream]

    async def tick(self) -> None:
        """Push a token to all streams on each tick; one that comes late isn't made up for."""
        due = trio.current_time()
        while True:
            due = max(due + INTERVAL, trio.current_time())
            await trio.sleep_until(due)
            for stream in self._streams:
                stream.push(_TOKEN)
            if trio.current_time() > due + INTERVAL:
                for _ in range(2):  # By then every reader has run, so that no tokens are merged.
                    await trio.lowlevel.checkpoint()


async def main(port: int) -> None:
    raise_descriptor_limit()
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        paced = PacedEngine(engine)
        nursery.start_soon(paced.tick)
        config = ServerConfig(engine=engine.config, host="127.0.0.1", port=port)
        app = create_app(cast(Engine, paced), config)
        with rare_collections() as freeze:  # As the server's own process does.
            freeze()
            await serve_app(app, config)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
