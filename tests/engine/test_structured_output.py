"""Outputs of a real engine under a grammar are texts that the grammar accepts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex
import trio
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.engines import assert_idle, open_compiled_engine, worker_of
from tests.support.json_schemas import schemas
from tests.support.tiny_models import make_tiny, tiny_tokenizer
from trioserve import Engine, InvalidRequest
from trioserve.protocol.grammar import GRAMMAR_KINDS, Grammar
from trioserve.requests.generation import Completion

NUM_SCHEMAS = 1000
CONCURRENT = 64
MAX_TOKENS = 160
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm2", tmp_path_factory.mktemp("model"), head_dim=32)


def generated_schemas(count: int) -> list[dict[str, Any]]:
    """Return as many different schemas, always the same."""
    found: dict[str, dict[str, Any]] = {}

    @seed(2)
    @settings(
        max_examples=count + count // 2,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas())
    def collect(schema: dict[str, Any]) -> None:
        found[json.dumps(schema)] = schema

    collect()
    assert len(found) >= count
    return random.Random(0).sample(list(found.values()), count)


async def complete_all(engine: Engine, grammars: list[Grammar], **params: Any) -> list[Completion]:
    """Return an output for each of ``grammars``, ``CONCURRENT`` at a time, in their order."""
    found: dict[int, Completion] = {}
    limit = trio.CapacityLimiter(CONCURRENT)

    async def complete(index: int, grammar: Grammar) -> None:
        async with limit:
            found[index] = await engine.complete(
                PROMPT, seed=index, grammar=grammar, **{"max_tokens": MAX_TOKENS, **params}
            )

    async with trio.open_nursery() as nursery:
        for index, grammar in enumerate(grammars):
            nursery.start_soon(complete, index, grammar)
    return [found[index] for index in range(len(grammars))]


def check(schemas: list[dict[str, Any]], completions: list[Completion]) -> None:
    """Assert that every output that came to its end is valid, and that nearly all did."""
    ended = 0
    for schema, completion in zip(schemas, completions, strict=True):
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
            ended += 1
    assert ended >= 0.95 * len(schemas)


@pytest.mark.time_limit(600)
async def test_a_thousand_schemas(folder: Path) -> None:
    wanted = generated_schemas(NUM_SCHEMAS)
    grammars = [Grammar("json_schema", json.dumps(schema)) for schema in wanted]
    async with open_compiled_engine(folder, max_num_seqs=CONCURRENT, seed=1) as engine:
        completions = await complete_all(engine, grammars)
        await assert_idle(engine)
    check(wanted, completions)
    # About half differ. Near-ties of rounding make it a few more or fewer from batch to batch.
    assert len({completion.text for completion in completions}) > 0.45 * NUM_SCHEMAS


async def test_grammars_through_preemption(folder: Path) -> None:
    schemas = sorted(generated_schemas(60), key=lambda schema: len(json.dumps(schema)))[-24:]
    pattern = "([a-z]{2,9} ){6}x"
    grammars = [
        *(Grammar("json_schema", json.dumps(schema)) for schema in schemas),
        *[Grammar("regex", pattern)] * 12,
    ]
    small = {"block_size": 4, "num_gpu_blocks_override": 40, "max_model_len": 160}
    async with open_compiled_engine(folder, max_num_seqs=16, **small) as engine:
        completions = await complete_all(engine, grammars, max_tokens=150)
        assert engine.statistics().scheduler.num_preemptions > 5
        await assert_idle(engine)
    check(schemas, completions[:24])
    assert all(regex.fullmatch(pattern, each.text) for each in completions[24:])


async def test_grammars_through_the_death_of_a_worker(folder: Path) -> None:
    pattern = "([a-z]{2,9} ){12}x"
    async with open_compiled_engine(folder, max_num_seqs=8) as engine:
        worker = await worker_of(engine)

        async def kill() -> None:
            while engine.statistics().scheduler.num_steps < 15:
                await trio.sleep(0.001)
            worker.kill()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            completions = await complete_all(engine, [Grammar("regex", pattern)] * 12)
        assert engine.statistics().worker_restarts == 1
        await assert_idle(engine)
    assert all(regex.fullmatch(pattern, each.text) for each in completions)


CASES: list[tuple[str, str, str]] = [
    ("json_schema", '{"type": "boolean"}', r"\s*(true|false)\s*"),
    ("regex", "(the|in) [a-c]{2,5}(é|/)", r"(the|in) [a-c]{2,5}(é|/)"),
    ("grammar", 'start: "<" ("a" start | "b")? ">"', r"(<(a(?1)|b)?>)"),
    ("grammar", 'root ::= "<" ("a" root | "b")? ">"', r"(<(a(?1)|b)?>)"),
    ("choice", '["the cat", "the", "in"]', r"the cat|the|in"),
    (
        "structural_tag",
        json.dumps(
            {
                "structures": [{"begin": "a=", "schema": {"enum": [1, 2]}, "end": ";"}],
                "triggers": ["a"],
            }
        ),
        r"([^a]|a=[12];)*",
    ),
]


async def test_every_kind_of_grammar(folder: Path) -> None:
    assert {kind for kind, _, _ in CASES} == set(GRAMMAR_KINDS)
    times = 12
    async with open_compiled_engine(folder) as engine:
        for kind, text, pattern in CASES:
            completions = await complete_all(engine, [Grammar(kind, text)] * times, temperature=2.0)
            ended = [each.text for each in completions if each.finish_reason == "stop"]
            assert len(ended) >= times / 4, kind
            for output in ended:
                assert regex.fullmatch(pattern, output), (kind, output)
        with pytest.raises(InvalidRequest, match="unclosed group") as caught:
            await engine.complete(PROMPT, grammar=Grammar("regex", "("))
        assert caught.value.param == "grammar"
        with pytest.raises(InvalidRequest, match="got beta") as caught:
            await engine.complete(PROMPT, extra_args={"beta": 1})
        assert caught.value.param == "extra_args"
        await assert_idle(engine)


async def test_outputs_that_are_cut_off_are_beginnings(folder: Path) -> None:
    grammar = Grammar("regex", "[a-d]{300}")
    async with open_compiled_engine(folder) as engine:
        greedy = await complete_all(engine, [grammar], max_tokens=20, temperature=0.0)
        again = await complete_all(engine, [grammar] * 4, max_tokens=20, temperature=0.0)
    assert greedy[0].finish_reason == "length"
    assert len(greedy[0].token_ids) == 20
    assert regex.fullmatch("[a-d]{20,}", greedy[0].text)
    assert {each.text for each in again} == {greedy[0].text}


async def test_several_outputs_of_one_request_follow_the_grammar_each(folder: Path) -> None:
    async with open_compiled_engine(folder) as engine:
        completion = await engine.complete(
            PROMPT, n=8, seed=1, max_tokens=30, grammar=Grammar("regex", "[a-h]{3}(,[a-h]){2}")
        )
        await assert_idle(engine)
    texts = [output.text for output in completion.outputs]
    assert all(regex.fullmatch("[a-h]{3}(,[a-h]){2}", text) for text in texts)
    assert len(set(texts)) > 1


async def test_words_and_ids_that_are_not_allowed(folder: Path) -> None:
    backend = tiny_tokenizer()
    letters = [backend.token_to_id(letter) for letter in "abcd"]
    async with open_compiled_engine(folder) as engine:
        completion = await engine.complete(
            PROMPT, n=4, seed=1, max_tokens=100, temperature=5.0, ignore_eos=True,
            allowed_token_ids=letters, bad_words=["ab", "c"],
        )  # fmt: skip
    for output in completion.outputs:
        assert set(output.token_ids) <= {*letters}
        assert len(output.token_ids) == 100
        assert "ab" not in output.text
        assert "c" not in output.text
        assert {"ba", "ad"} <= {output.text[i : i + 2] for i in range(99)}
