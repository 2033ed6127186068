"""Draft tokens change no token and no bit of a log-probability, whatever a request asks for."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_encoders import make_encoder
from tests.support.tiny_models import make_tiny
from trioserve import Completion, Engine, Grammar, InvalidRequest, ModelLoadError

SUFFIX = '{"method": "suffix", "adaptive": false, "prompt_lookup_min": 1}'
NGRAM = """{"method": "ngram", "adaptive": false, "num_speculative_tokens": 4,
            "prompt_lookup_min": 1, "prompt_lookup_max": 3}"""
ADAPTIVE = '{"method": "suffix"}'
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 3, "logprob_token_ids": [5, 6]},
    "sampled": {"temperature": 0.3, "top_p": 0.9, "seed": 1, "logprobs": 1},
    "min_p": {"temperature": 0.5, "min_p": 0.2, "top_k": 20, "seed": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.05, "frequency_penalty": 0.2},
    "bias": {"temperature": 0, "logit_bias": {7: 2.0, 8: -5.0}},
    "bad words": {"temperature": 0, "bad_words": ["ab", "c"]},
    "grammar": {"temperature": 0.7, "seed": 3, "grammar": Grammar("regex", "(ab|cd|e){20,40}")},
    "min tokens": {"temperature": 0, "min_tokens": 30, "stop_token_ids": list(range(3, 60))},
    "stop": {"temperature": 0, "stop": ["a", "e"]},
    "stop ids": {"temperature": 0, "stop_token_ids": list(range(40, 60))},
    "several": {"temperature": 0.4, "n": 3, "seed": 4},
    "length": {"temperature": 0, "max_tokens": 7},
    "prediction": {"temperature": 0, "prediction": "ab" * 20},
    "adapter": {"temperature": 0, "adapter": "own"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny, tmp_path_factory.mktemp("adapter"))


@asynccontextmanager
async def open_engine(tiny: Path, adapter: Path, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine in bfloat16 with the adapter ``own``."""
    async with open_tiny_engine(tiny, dtype="bfloat16", enable_lora=True, **options) as engine:
        await engine.load_adapter("own", adapter)
        yield engine


def prompt(number: int) -> list[int]:
    """Return a prompt that repeats itself, so that there is something to draft from its start."""
    piece = [3 + (number * 11 + place * place) % 290 for place in range(6 + number)]
    return piece * 3


def facts_of(completion: Completion) -> list[Any]:
    """Return the tokens, the bits of their log-probabilities and the ends of all outputs."""
    facts: list[Any] = []
    for output in completion.outputs:
        facts.append((output.token_ids, output.finish_reason, output.stop_reason, output.text))
        for each in output.logprobs or ():
            values = [
                (token, struct.pack("f", value)) for token, value, _ in (*each.top, *each.asked)
            ]
            facts.append((each.token_id, struct.pack("f", each.logprob), values))
    return facts


async def run_all(engine: Engine, *, together: bool) -> list[list[Any]]:
    """Run every request of :data:`REQUESTS` on two prompts; return their facts."""
    jobs = [(number, params) for number in (0, 5) for params in REQUESTS.values()]
    found: dict[int, list[Any]] = {}

    async def run(place: int) -> None:
        number, params = jobs[place]
        params = {"max_tokens": 48, "ignore_eos": True, **params}
        found[place] = facts_of(await engine.complete(prompt(number), **params))

    if together:
        async with trio.open_nursery() as nursery:
            for place in range(len(jobs)):
                nursery.start_soon(run, place)
    else:
        for place in range(len(jobs)):
            await run(place)
    return [found[place] for place in range(len(jobs))]


@pytest.fixture(scope="module")
def plain(tiny: Path, adapter: Path) -> list[list[Any]]:
    """Return the facts without drafts, of requests that run alone."""

    async def run() -> list[list[Any]]:
        async with open_engine(tiny, adapter) as engine:
            return await run_all(engine, together=False)

    return trio.run(run)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of another shape with the same tokens, which drafts badly."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("other"), seed=1, num_hidden_layers=1)


def draft_model(folder: Path, **fields: Any) -> str:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 5, **fields}
    return json.dumps(config)


@pytest.mark.parametrize("config", [SUFFIX, NGRAM, ADAPTIVE], ids=["suffix", "ngram", "adaptive"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_plans_in_flight": 2},
        {"num_threads": 2, "max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 16, "enable_prefix_caching": False},
    ],
    ids=["plain", "two plans", "chunks", "preempted"],
)
async def test_nothing_differs(
    tiny: Path, adapter: Path, plain: list[list[Any]], config: str, options: dict[str, Any]
) -> None:
    async with open_engine(tiny, adapter, speculative_config=config, **options) as engine:
        assert await run_all(engine, together=False) == plain
        assert await run_all(engine, together=True) == plain
        counted = engine.statistics().scheduler
        await assert_idle(engine)
    # How many are worth their time depends on the machine.
    assert config == ADAPTIVE or counted.num_accepted_drafts > 200
    assert counted.num_accepted_drafts <= counted.num_draft_tokens
    assert counted.num_drafts <= counted.num_draft_tokens
    assert sum(counted.accepted_by_position) == counted.num_accepted_drafts
    assert list(counted.accepted_by_position) == sorted(counted.accepted_by_position)[::-1]


@pytest.mark.parametrize(
    "options",
    [
        {"max_plans_in_flight": 2, "kv_offloading_bytes": 1 << 20},
        {"num_threads": 2, "max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 16, "enable_prefix_caching": False},
    ],
    ids=["two plans", "chunks", "preempted"],
)
@pytest.mark.parametrize("drafts", ["well", "badly", "adaptive"])
async def test_nothing_differs_with_a_draft_model(
    tiny: Path,
    other: Path,
    adapter: Path,
    plain: list[list[Any]],
    drafts: str,
    options: dict[str, Any],
) -> None:
    config = draft_model(other if drafts == "badly" else tiny, adaptive=drafts == "adaptive")
    async with open_engine(tiny, adapter, speculative_config=config, **options) as engine:
        assert await run_all(engine, together=False) == plain
        assert await run_all(engine, together=True) == plain
        counted = engine.statistics().scheduler
        await assert_idle(engine)
    if drafts == "well":
        # Greedy outputs are the draft model's own, as far as nothing else changes its logits.
        assert counted.num_accepted_drafts > counted.num_draft_tokens / 4
    if drafts == "badly":
        assert counted.num_draft_tokens > 0
        assert counted.num_accepted_drafts < counted.num_draft_tokens / 5


async def test_all_drafts_of_the_model_itself_are_accepted(tiny: Path) -> None:
    """Its cache has what is shared with others, and what was drafted before."""
    options = {"dtype": "bfloat16", "speculative_config": draft_model(tiny, adaptive=False)}
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 49, "ignore_eos": True}
    async with open_tiny_engine(tiny, **options) as engine:
        for _ in range(3):
            for number in range(3):
                completion = await engine.complete(prompt(number), **params)
                usage = completion.usage
                assert usage.draft_tokens == usage.accepted_draft_tokens > 0
        assert completion.usage.cached_tokens
        counted = engine.statistics().scheduler
        # A step gives six tokens, and a prompt one.
        assert counted.num_drafts == 9 * 8


async def test_a_draft_model_with_other_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path, seed=1)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|end|>"))
    with pytest.raises(ModelLoadError, match=r"tokens aren't the model's: 2 differ, such as '<\|"):
        async with open_tiny_engine(tiny, speculative_config=draft_model(folder)):
            pass


async def test_a_killed_worker_changes_nothing(
    tiny: Path, adapter: Path, plain: list[list[Any]]
) -> None:
    """The next worker indexes the tokens so far, and goes on."""
    options = {"speculative_config": SUFFIX, "max_worker_restarts": 20}
    found: list[list[Any]] = []
    async with open_engine(tiny, adapter, **options) as engine, trio.open_nursery() as nursery:

        async def kill_now_and_then() -> None:
            for kills in range(2):
                due = engine.statistics().scheduler.num_tokens_sampled + 200
                while engine.statistics().scheduler.num_tokens_sampled < due:
                    await trio.sleep(0.001)
                (await worker_of(engine)).kill()
                while engine.statistics().worker_restarts == kills:
                    await trio.sleep(0.001)

        nursery.start_soon(kill_now_and_then)
        found = await run_all(engine, together=True)
        nursery.cancel_scope.cancel()
        assert engine.statistics().worker_restarts == 2
        assert engine.statistics().scheduler.num_accepted_drafts > 0
    assert found == plain


async def test_a_request_may_do_without(tiny: Path) -> None:
    """A request without drafts has the same output, and nothing is counted."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    options = {"dtype": "bfloat16", "speculative_config": SUFFIX}
    async with open_tiny_engine(tiny, **options) as engine:
        without = await engine.complete(prompt(0), speculative=False, **params)
        assert engine.statistics().scheduler.num_draft_tokens == 0
        drafted = await engine.complete(prompt(0), **params)
        assert engine.statistics().scheduler.num_accepted_drafts > 0
    assert facts_of(without) == facts_of(drafted)


async def test_turns_of_a_session_are_the_same(tiny: Path) -> None:
    params: dict[str, Any] = {"temperature": 0.3, "seed": 5, "max_tokens": 30, "logprobs": 1}
    turns: list[list[Any]] = []
    for config in (None, SUFFIX):
        options: dict[str, Any] = {"dtype": "bfloat16", "speculative_config": config}
        async with open_tiny_engine(tiny, **options) as engine:
            with engine.open_session() as session:
                completions = [
                    await session.complete(prompt(number), ignore_eos=True, **params)
                    for number in range(3)
                ]
            turns.append([facts_of(each) for each in completions])
            assert all(each.usage.cached_tokens for each in completions[1:])
            accepted = engine.statistics().scheduler.num_accepted_drafts
            assert (accepted > 0) == (config is not None)
    assert turns[0] == turns[1]


async def test_a_prediction_is_drafted_from(tiny: Path) -> None:
    """A right one saves steps from the first token on, and usage has what became of it."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    options = {"dtype": "bfloat16", "speculative_config": SUFFIX, "enable_prefix_caching": False}
    async with open_tiny_engine(tiny, **options) as engine:
        tokens = list(range(3, 20))
        # Letters that are tokens by themselves, whatever stands beside them.
        params["allowed_token_ids"] = engine.tokenizer.encode("bkpqvxz", add_special_tokens=False)
        expected = await engine.complete(tokens, speculative=False, **params)
        assert expected.usage.draft_tokens == expected.usage.accepted_draft_tokens == 0
        text = expected.text
        steps = engine.statistics().scheduler.num_steps
        right = await engine.complete(tokens, prediction=text, cache_salt="1", **params)
        steps = engine.statistics().scheduler.num_steps - steps
        wrong = await engine.complete(
            tokens, prediction="no such text" * 9, cache_salt="2", **params
        )
    assert facts_of(right) == facts_of(wrong) == facts_of(expected)
    assert right.usage.accepted_draft_tokens >= 8
    assert steps <= 24 - right.usage.accepted_draft_tokens + 3
    assert wrong.usage.accepted_draft_tokens < wrong.usage.draft_tokens


async def test_outputs_are_drafted_from_by_requests_of_their_kind(
    tiny: Path, adapter: Path
) -> None:
    """Salt, tenant and adapter keep outputs apart, whatever is in the prefix cache."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    tokens = list(range(3, 40))  # nothing occurs twice
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"tenant": "b"}, {"adapter": "own"}]
    async with open_engine(tiny, adapter, speculative_config=SUFFIX) as engine:
        for kind in kinds:
            first = await engine.complete(tokens, **params, **kind)
            again = await engine.complete(tokens, **params, **kind)
            assert facts_of(again) == facts_of(first)
            assert again.usage.accepted_draft_tokens > first.usage.accepted_draft_tokens + 8


@pytest.mark.parametrize("prediction", [7, "x" * 10_000_000])
async def test_a_prediction_that_is_no_text_or_too_long_is_refused(
    tiny: Path, prediction: Any
) -> None:
    async with open_tiny_engine(tiny, dtype="bfloat16") as engine:
        with pytest.raises(InvalidRequest, match="prediction must") as refused:
            await engine.complete([3, 4], prediction=prediction)
    assert refused.value.param == "prediction"


async def test_torch_drafts_nothing_and_says_so(tiny: Path) -> None:
    with pytest.raises(ModelLoadError, match="--speculative-config can't be had"):
        async with open_tiny_engine(tiny, dtype="float32", speculative_config=SUFFIX):
            pass


async def test_an_encoder_drafts_nothing_and_says_so(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path)
    with pytest.raises(ModelLoadError, match="for models that generate"):
        async with open_tiny_engine(folder, speculative_config=SUFFIX):
            pass
