"""Log-probabilities of prompts and outputs equal transformers', however they came to be computed.

The reference is given each output whole, behind its prompt. A page that was shared wrongly, a chunk
that was counted wrongly or a position that came twice would show in the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.tiny_models import make_tiny
from trioserve import LLM, Completion, Engine
from trioserve.requests.stream import TokenLogprob

TOLERANCE = 1e-3
PAGE = 16
NAMED = (7, 299, 7, 0)
PROMPT = [3 + (7 * number + number * number) % 290 for number in range(100)]

ASKED: dict[str, Any] = {
    "logprobs": 4,
    "prompt_logprobs": 3,
    "logprob_token_ids": NAMED,
    "ignore_eos": True,
    "temperature": 1.0,
}

Reference = Any
"""The model as transformers has it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("llama2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Reference:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check_entries(entries: Sequence[TokenLogprob], expected: torch.Tensor, num_top: int) -> None:
    """``expected`` [len(entries), V]: what the reference says of each entry's position."""
    assert len(entries) == len(expected)
    for entry, row in zip(entries, expected, strict=True):
        named = [(entry.token_id, entry.logprob, ""), *entry.top, *entry.asked]
        ids = [token for token, _, _ in named]
        given = torch.tensor([logprob for _, logprob, _ in named])
        torch.testing.assert_close(given, row[ids], rtol=0, atol=TOLERANCE)
        assert [token for token, _, _ in entry.asked] == list(NAMED)
        # The most probable ones are right by value: two that nearly tie may change places.
        assert len({token for token, _, _ in entry.top}) == num_top
        best = torch.tensor([logprob for _, logprob, _ in entry.top])
        torch.testing.assert_close(best, row.topk(num_top).values, rtol=0, atol=TOLERANCE)
        if entry.rank:
            fewest = 1 + int((row > row[entry.token_id] + TOLERANCE).sum())
            most = int((row > row[entry.token_id] - TOLERANCE).sum())
            assert fewest <= entry.rank <= most


def check(model: Reference, completion: Completion, *, start: int = 1) -> None:
    """Everything that ``completion`` says of its prompt, from ``start`` on, and of its outputs."""
    prompt = list(completion.prompt_token_ids)
    assert completion.prompt_logprobs is not None
    prompt_entries = completion.prompt_logprobs.entries(prompt)
    assert [entry.token_id for entry in prompt_entries] == prompt[start:]
    assert all(entry.rank for entry in prompt_entries)
    for output in completion.outputs:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(output.token_ids)])).logits[0]
        expected = torch.log_softmax(logits.float(), dim=-1)
        check_entries(prompt_entries, expected[start - 1 : len(prompt) - 1], 3)
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        check_entries(output.logprobs, expected[len(prompt) - 1 : -1], 4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_plans_in_flight": 2, "max_num_batched_tokens": 33},
        {"enable_prefix_caching": False},
    ],
)
async def test_through_several_outputs_and_chunks(
    folder: Path, model: Reference, options: dict[str, Any]
) -> None:
    async with open_tiny_engine(folder, block_size=PAGE, **options) as engine:
        completion = await engine.complete(PROMPT, n=3, max_tokens=20, seed=1, **ASKED)
        assert len({output.token_ids for output in completion.outputs}) == 3
        check(model, completion)
        counted = engine.statistics().scheduler.num_tokens_computed
        assert counted == len(PROMPT) + 2 * (len(PROMPT) % PAGE) + 3 * 19
        await assert_idle(engine)


async def test_through_prefix_hits(folder: Path, model: Reference) -> None:
    async with open_tiny_engine(folder, block_size=PAGE) as engine:
        for start in (0, 1, PAGE, PAGE + 1, 50, len(PROMPT)):
            own = {"cache_salt": f"start {start}"}
            await engine.complete(PROMPT, max_tokens=0, **own)
            completion = await engine.complete(
                PROMPT, n=2, max_tokens=5, seed=2, prompt_logprobs_start=start, **own, **ASKED
            )
            first = max(start, 1)
            assert completion.usage.cached_tokens == (first - 1) // PAGE * PAGE
            check(model, completion, start=first)
        await assert_idle(engine)


async def test_through_preemption(folder: Path, model: Reference) -> None:
    """Four requests for two outputs each grow in a pool that holds half of them."""
    results: list[Completion] = []
    options = {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 240}
    async with open_tiny_engine(folder, block_size=PAGE, **options) as engine:

        async def ask(engine: Engine, number: int) -> None:
            prompt = [3 + number, *PROMPT]
            results.append(await engine.complete(prompt, n=2, max_tokens=60, seed=number, **ASKED))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, engine, number)
        assert engine.statistics().scheduler.num_preemptions > 0
        await assert_idle(engine)
    assert len(results) == 4
    for completion in results:
        check(model, completion)


async def test_of_a_prompt_alone(folder: Path, model: Reference) -> None:
    async with open_tiny_engine(folder, block_size=PAGE, max_num_batched_tokens=32) as engine:
        completion = await engine.complete(PROMPT, n=2, max_tokens=0, **ASKED)
        assert [output.token_ids for output in completion.outputs] == [(), ()]
        assert completion.prompt_logprobs is not None
        entries = completion.prompt_logprobs.entries(PROMPT)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0]
        check_entries(entries, torch.log_softmax(logits.float(), dim=-1)[:-1], 3)
        await assert_idle(engine)


def test_several_outputs_from_ordinary_code(folder: Path, model: Reference) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_queued_reqs": 5}
    with LLM(str(folder), num_threads=1, **options) as llm:
        prompts = [PROMPT[:length] for length in (10, 30, 50)]
        completions = llm.generate(prompts, n=3, max_tokens=8, seed=4, progress=False, **ASKED)
        # What isn't a sampling parameter is handed on, too.
        common: dict[str, Any] = {"ignore_eos": True, "progress": False, "cache_salt": "another"}
        single = llm.generate(prompts[0], max_tokens=8, seed=4, **common)
    assert [len(completion.outputs) for completion in completions] == [3, 3, 3]
    assert single[0].token_ids == completions[0].outputs[0].token_ids
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.prompt_token_ids) == prompt
        check(model, completion)
