"""Beam search of the whole engine: its outputs are those of transformers' ``generate``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from tests.support.engines import assert_idle, open_compiled_engine, open_tiny_engine, worker_of
from tests.support.tiny_models import make_tiny
from trioserve import Completion, Engine, Grammar, InvalidRequest

EOS = (3, 4)
NUM_PROMPTS = 200
MAX_TOKENS = 12


def cases() -> list[dict[str, Any]]:
    """Return the options of as many searches as there are prompts."""
    combinations = itertools.product((2, 4, 8), (1.0, 0.0, 2.0, -0.5), (False, True, "never"))
    return [
        {"beam_width": width, "n": width, "length_penalty": penalty, "early_stopping": stopping}
        for (width, penalty, stopping), _ in zip(
            itertools.cycle(combinations), range(NUM_PROMPTS), strict=False
        )
    ]


def prompts() -> list[list[int]]:
    drawn = random.Random(7)
    return [[drawn.randrange(5, 290) for _ in range(1 + i % 40)] for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def generate(
    reference: Any, prompt: list[int], case: dict[str, Any]
) -> list[tuple[list[int], float]]:
    """Return the outputs of transformers, with their scores."""
    found = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=MAX_TOKENS,
        num_beams=case["beam_width"],
        num_return_sequences=case["n"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        do_sample=False,
        eos_token_id=list(EOS),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for ids, score in zip(
        found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True
    ):
        end = next((i + 1 for i, token in enumerate(ids) if token in EOS), len(ids))
        outputs.append((ids[:end], score))
    return outputs


async def search_all(
    engine: Engine, asked: Sequence[tuple[list[int], dict[str, Any]]]
) -> list[Completion]:
    """Return the outputs of all searches, sixteen at a time."""
    found: dict[int, Completion] = {}
    limiter = trio.CapacityLimiter(16)

    async def run(index: int, prompt: list[int], options: dict[str, Any]) -> None:
        async with limiter:
            found[index] = await engine.complete(
                prompt, **{"max_tokens": MAX_TOKENS, "stop_token_ids": EOS, **options}
            )

    async with trio.open_nursery() as nursery:
        for index, (prompt, options) in enumerate(asked):
            nursery.start_soon(run, index, prompt, options)
    return [found[index] for index in range(len(asked))]


def score_of(output: Any, penalty: float) -> float:
    assert output.cumulative_logprob is not None
    return float(output.cumulative_logprob / len(output.token_ids) ** penalty)


@pytest.mark.parametrize("pages", [None, 160])
async def test_outputs_are_those_of_transformers(
    tiny: Path, reference: Any, pages: int | None
) -> None:
    asked = list(zip(prompts(), cases(), strict=True))
    options = {"num_gpu_blocks_override": pages, "block_size": 4} if pages else {}
    async with open_tiny_engine(tiny, dtype="float32", max_num_seqs=24, **options) as engine:
        completions = await search_all(engine, asked)
        await assert_idle(engine)
    num_different = 0
    for (prompt, case), completion in zip(asked, completions, strict=True):
        expected = generate(reference, prompt, case)
        for output, (tokens, score) in zip(completion.outputs, expected, strict=True):
            assert score_of(output, case["length_penalty"]) == pytest.approx(score, abs=2e-4)
            num_different += list(output.token_ids) != tokens
    assert num_different <= 2, "more than near-ties"


async def test_company_changes_no_bit(tiny: Path) -> None:
    asked = list(zip(prompts(), cases(), strict=True))[:24]
    asked = [(prompt, {**case, "logprobs": 2}) for prompt, case in asked]
    async with open_tiny_engine(tiny, dtype="bfloat16", max_num_seqs=24) as engine:
        alone = [(await search_all(engine, [each]))[0].outputs for each in asked[:6]]
        together = [each.outputs for each in await search_all(engine, asked)]
    assert together[:6] == alone


async def test_a_killed_worker_loses_no_beam(tiny: Path) -> None:
    asked = list(zip(prompts(), cases(), strict=True))[::6][:12]
    asked = [(prompt, {**case, "max_tokens": 60}) for prompt, case in asked]
    async with open_tiny_engine(tiny, dtype="bfloat16", max_num_seqs=24) as engine:
        expected = [each.outputs for each in await search_all(engine, asked)]
        num_sampled = engine.statistics().scheduler.num_tokens_sampled
        found: list[Completion] = []

        async def run() -> None:
            found.extend(await search_all(engine, asked))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            while engine.statistics().scheduler.num_tokens_sampled < num_sampled * 3 // 2:
                await trio.sleep(0.001)
            (await worker_of(engine)).kill()
        assert engine.statistics().worker_restarts == 1, "the searches were over before"
        assert [each.outputs for each in found] == expected
        await assert_idle(engine)


async def test_beams_follow_a_grammar(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        completion = await engine.complete(
            [9, 8, 7],
            beam_width=4,
            n=4,
            max_tokens=30,
            grammar=Grammar("regex", "(ab|cd|e){1,3}"),
        )
        texts = [output.text for output in completion.outputs]
        assert len(set(texts)) == 4
        assert all(set(text) <= set("abcde") for text in texts)
        scores = [score_of(output, 1.0) for output in completion.outputs]
        assert scores == sorted(scores, reverse=True)
        # There are three outputs in all, and a fourth was asked for.
        with pytest.raises(InvalidRequest, match="leaves 3 outputs for its beams, and n is 4"):
            await engine.complete([9, 8, 7], beam_width=4, n=4, grammar=Grammar("regex", "a|bc|d"))
        await assert_idle(engine)


async def test_the_best_of_more_beams_are_returned(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        every = await engine.complete([5, 6], beam_width=4, n=4, max_tokens=6)
        best = await engine.complete([5, 6], beam_width=4, n=2, max_tokens=6)
        assert len(best.outputs) == 2
        for output, same in zip(best.outputs, every.outputs, strict=False):
            assert output.token_ids == same.token_ids
        assert best.usage.completion_tokens == sum(len(each.token_ids) for each in best.outputs)
        with pytest.raises(InvalidRequest, match=r"n must be at most beam_width \(2\)"):
            await engine.complete([5, 6], beam_width=2, n=3)
        with pytest.raises(InvalidRequest, match="takes at most 32 stop strings and stop ids"):
            await engine.complete([5, 6], beam_width=32, stop_token_ids=list(range(5, 100)))


async def test_beams_end_by_stop_strings(tiny: Path) -> None:
    async with open_tiny_engine(tiny, dtype="bfloat16") as engine:
        options: dict[str, Any] = {
            **{"beam_width": 4, "n": 4, "max_tokens": 24},
            "length_penalty": 0.0,  # so that short outputs are better
        }
        whole = await engine.complete([40, 41, 42], **options)
        stop = [whole.outputs[0].text[5:7], whole.outputs[1].text[9]]
        cut = await engine.complete([40, 41, 42], **options, stop=stop)
        ended = [output for output in cut.outputs if output.stop_reason in stop]
        assert ended
        for output in cut.outputs:
            assert not any(each in output.text for each in stop)
            assert output.beam_logprob is not None
            assert len(output.token_ids) <= 24
        scores = [score_of(output, 0.0) for output in cut.outputs]
        assert scores == sorted(scores, reverse=True)
        # What follows a stop string counts for no beam.
        assert max(len(each.token_ids) for each in ended) < 24
