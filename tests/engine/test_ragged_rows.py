"""Rows that bring several tokens: callers see the same as with one token a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.support.front_ends import open_server
from trioserve import Engine, GenerationStream
from trioserve.protocol.sampling import NAN_LOGITS
from trioserve.testing import FakeWorker, open_fake_engine
from trioserve.testing.simulation.expected import ids_of
from trioserve.testing.simulation.scenario import num_accepted

PROMPT = "once upon a time"
ALPHABET = ids_of("abc \u00e9\U0001f600")

REQUESTS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 11},
    "stop string": {"max_tokens": 60, "stop": ("ab",)},
    "stop string of several characters": {"max_tokens": 60, "stop": ("a b", "cc", "b\u00e9")},
    "stop id": {"max_tokens": 60, "stop_token_ids": ids_of("c")},
    "stop id after some": {"max_tokens": 60, "stop_token_ids": ids_of("a"), "min_tokens": 9},
    "several outputs": {"max_tokens": 20, "n": 3, "stop": ("ca",)},
    "log-probabilities": {
        "max_tokens": 20, "n": 2, "logprobs": 2, "logprob_token_ids": ids_of("ab"),
        "stop_token_ids": ids_of(" "), "prompt_logprobs": 1,
    },
}  # fmt: skip


def token(context: list[int], sampler: Any) -> int:
    mixed = sum((place + 3) * each for place, each in enumerate(context[-7:], len(context)))
    return ALPHABET[(mixed + 5 * sampler.seed + 11 * sampler.sequence_index) % len(ALPHABET)]


def make_worker(max_row_tokens: int) -> FakeWorker:
    return FakeWorker(
        num_pages=400,
        page_size=4,
        token=token,
        step_time=0.01,
        max_row_tokens=max_row_tokens,
        accepted=num_accepted,
        computes_past_stop=True,
    )


async def outputs_of(engine: Engine) -> dict[str, Any]:
    """Send all requests at once; what each caller gets, without when."""
    got: dict[str, Any] = {}

    async def read(name: str, params: dict[str, Any]) -> None:
        async with engine.generate(PROMPT, seed=4, **params) as stream:
            chunks = [chunk async for chunk in stream]
            got[name] = [described(stream, chunks, index) for index in range(params.get("n", 1))]

    async with trio.open_nursery() as nursery:
        for name, params in REQUESTS.items():
            nursery.start_soon(read, name, params)
    return got


def described(stream: GenerationStream, chunks: list[Any], index: int) -> Any:
    own = [chunk for chunk in chunks if chunk.index == index]
    return (
        "".join(chunk.text for chunk in own),
        [each for chunk in own for each in chunk.token_ids],
        [each for chunk in own for each in chunk.logprobs or ()],
        own[-1].finish_reason,
        own[-1].stop_reason,
        (stream.usage.prompt_tokens, stream.usage.completion_tokens),
    )


async def expected_outputs() -> dict[str, Any]:
    async with open_fake_engine(lambda: make_worker(1)) as engine:
        return await outputs_of(engine)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
async def test_streams_are_the_same(autojump_clock: MockClock, plans_in_flight: int) -> None:
    expected = await expected_outputs()
    async with open_fake_engine(
        lambda: make_worker(6), max_plans_in_flight=plans_in_flight
    ) as engine:
        assert await outputs_of(engine) == expected
        counted = engine.metrics.generation_tokens
        statistics = engine.statistics().scheduler
        assert counted == statistics.num_tokens_sampled
        # The first token of each output has none before it.
        num_outputs = sum(params.get("n", 1) for params in REQUESTS.values())
        assert sum(engine.metrics.inter_token_latency.counts) == counted - num_outputs
    assert {each[0][3] for each in expected.values()} == {"stop", "length"}


@pytest.mark.parametrize("plans_in_flight", [1, 2])
async def test_no_token_after_a_stop_string_fails_nothing(
    autojump_clock: MockClock, plans_in_flight: int
) -> None:
    """Compute past the stop string in its own row, where the model's logits hold NaN."""
    texts = ["ccab", "cccccab", "ccccccccab"]
    params: dict[str, Any] = {"max_tokens": 60, "stop": ("ab",), "n": len(texts)}

    def no_token_after_stop(context: list[int], sampler: Any) -> int:
        left = ids_of(texts[sampler.sequence_index])[len(context) - len(PROMPT) :]
        return left[0] if left else NAN_LOGITS

    async def tokens_of(max_row_tokens: int) -> list[list[int]]:
        worker = attrs.evolve(make_worker(max_row_tokens), token=no_token_after_stop)
        async with (
            open_fake_engine(lambda: worker, max_plans_in_flight=plans_in_flight) as engine,
            engine.generate(PROMPT, **params) as stream,
        ):
            outputs: list[list[int]] = [[] for _ in range(params["n"])]
            async for chunk in stream:
                outputs[chunk.index] += chunk.token_ids
            return outputs

    assert await tokens_of(1) == await tokens_of(6) == [list(ids_of(each)) for each in texts]


async def test_streams_over_several_front_ends_are_the_same(tmp_path: Path) -> None:
    expected = await expected_outputs()
    async with open_server(tmp_path, lambda: make_worker(6)) as server:
        for front_end in server.front_ends:
            assert await outputs_of(front_end.engine) == expected
