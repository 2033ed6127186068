"""The prefix cache keeps a digest of a request's salt, and tells salts apart by it."""

from __future__ import annotations

import trio.testing

from trioserve.engine.engine import Engine
from trioserve.testing.fake_engine import open_fake_engine

PROMPT = list(range(64))


async def cached(engine: Engine, salt: str) -> int:
    """Return how many tokens of a prompt with ``salt`` were in the cache."""
    completion = await engine.complete(PROMPT, max_tokens=1, cache_salt=salt)
    return completion.usage.cached_tokens


async def test_salts_share_as_before(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine() as engine:
        long = "x" * (1 << 20)
        for salt in ("", "one", "two", long + "a", long + "b", "\ud800"):
            assert not await cached(engine, salt)
            assert await cached(engine, salt)


async def test_a_digest_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine() as engine:
        salts = set()
        for salt in ("", "x", "x" * (1 << 20)):
            async with engine.generate(PROMPT, max_tokens=1, cache_salt=salt) as stream:
                async for _ in stream:
                    pass
                salts.add(stream.request.cache_salt)
        assert len(salts) == 3
        assert max(map(len, salts)) == 32
