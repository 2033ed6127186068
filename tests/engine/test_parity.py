"""Greedy output equals the reference implementation's, on the real model.

The reference is transformers on the same GGUF file, which it reads with its own code, in float32.
It is given each of our outputs whole: at every position its best token must be the one we sampled.
Where it isn't, its two best logits must lie as near as rounding may move them, and ours must be the
second; checking along our own continuation then says as much as generating with it would, for a
fraction of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from tests.support.engines import assert_idle
from tests.support.rounding import apart, terms_of
from trioserve import Engine, open_engine
from trioserve.model_files import locate

MODEL = "smollm2-135m"
TERMS = terms_of(hidden=576, inner=1536, layers=30, tokens=1100)

pytestmark = pytest.mark.time_limit(400)

_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()


def prompts() -> list[str]:
    """Twenty-two texts of 1 to some 1,040 tokens; several begin alike."""
    short = [
        "The",
        "Once upon a time",
        "def fibonacci(n):\n",
        "1, 1, 2, 3, 5, 8,",
        "La capitale de la France est",
        "日本の首都は",
        "Emoji 🙂 and ½ of \t\t3 tabs",
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    ]
    shared = _TEXT[:1200]
    begin_alike = [shared + ending for ending in ("", " Therefore", "\n\nIn short,", " 1.")]
    slices = [_TEXT[start : start + 40 * (start // 500 + 1)] for start in range(0, 3500, 500)]
    long = [_TEXT[:5300], _TEXT[1000:6300], _TEXT[3000:8300]]
    return short + begin_alike + slices + long


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    torch.set_num_threads(1)
    path = locate(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


_near_ties: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
"""Near-ties of the outputs that were checked already: most tests have the same."""


def check_against(reference: Any, prompt_ids: list[int], output_ids: list[int]) -> int:
    """Assert that ``output_ids`` is the reference's greedy continuation; returns its near-ties."""
    key = (tuple(prompt_ids), tuple(output_ids))
    if key not in _near_ties:
        _near_ties[key] = compare_with(reference, prompt_ids, output_ids)
    return _near_ties[key]


def compare_with(reference: Any, prompt_ids: list[int], output_ids: list[int]) -> int:
    """Compare as :func:`check_against` does, always with the reference."""
    near_ties = 0
    with torch.inference_mode():
        ids = torch.tensor([prompt_ids + output_ids])
        # Logits at the last prompt token and at every output token but the last.
        logits = reference(ids, logits_to_keep=len(output_ids) + 1).logits[0, :-1]
    best = torch.topk(logits, 2, dim=-1)
    for position, token in enumerate(output_ids):
        if best.indices[position, 0] == token:
            continue
        margin = float(best.values[position, 0] - best.values[position, 1])
        is_near_tie = best.indices[position, 1] == token and margin <= apart(
            TERMS, logits[position]
        )
        assert is_near_tie, (
            f"position {position} of {len(prompt_ids)}+{len(output_ids)}: we sampled {token}, the "
            f"reference prefers {best.indices[position].tolist()} by {margin:.4f}"
        )
        near_ties += 1
    return near_ties


async def complete_together(
    engine: Engine, texts: list[str], max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    results: list[tuple[list[int], list[int]]] = [([], [])] * len(texts)

    async def run(index: int) -> None:
        generation = engine.generate(
            texts[index], temperature=0, max_tokens=max_tokens, ignore_eos=True
        )
        output: list[int] = []
        async with generation as stream:
            async for chunk in stream:
                output.extend(chunk.token_ids)
            results[index] = (stream.prompt_token_ids, output)

    async with trio.open_nursery() as nursery:
        for index in range(len(texts)):
            nursery.start_soon(run, index)
    return results


def options(**more: Any) -> dict[str, Any]:
    # One thread: several would wait for each other on a machine that has something else to do.
    fixed = {"dtype": "float32", "device": "cpu", "max_model_len": 2048, "num_threads": 1}
    return {**fixed, **more}


def verify(reference: Any, results: list[tuple[list[int], list[int]]], max_tokens: int) -> None:
    near_ties = 0
    for prompt_ids, output_ids in results:
        assert len(output_ids) == max_tokens
        near_ties += check_against(reference, prompt_ids, output_ids)
    # A handful of rounding ties may occur; many would mean that something is wrong.
    assert near_ties <= 3


async def test_each_prompt_alone(reference: Any) -> None:
    texts = prompts()
    assert len(texts) >= 20
    async with open_engine(MODEL, **options(enable_prefix_caching=False)) as engine:
        results = [(await complete_together(engine, [text], 16))[0] for text in texts]
        await assert_idle(engine)
    assert sum(len(prompt_ids) > 1000 for prompt_ids, _ in results) >= 3
    verify(reference, results, 16)


@pytest.mark.parametrize("depth", [1, 2])
async def test_all_together_with_chunks_and_prefix_hits(reference: Any, depth: int) -> None:
    """Prompts are prefilled in chunks of at most 200 tokens beside rows that decode, in a pool
    that holds less than half of them; a second round finds what is left of the first's pages."""
    texts = prompts()[:-2]  # one of the three longest is enough
    tight = options(
        max_num_batched_tokens=200, num_gpu_blocks_override=90, max_plans_in_flight=depth
    )
    async with open_engine(MODEL, **tight) as engine:
        results = await complete_together(engine, texts, 16)
        again = await complete_together(engine, texts[8:12], 16)
        statistics = engine.statistics().scheduler
        await assert_idle(engine)
    assert statistics.prefix_cache_hits > 0
    verify(reference, results, 16)
    verify(reference, again, 16)


async def test_preempted(reference: Any) -> None:
    """Short prompts and long outputs that outgrow the page pool together: some have to leave it,
    and resume from their tokens."""
    texts = [text for text in prompts() if len(text) < 300]
    tight = options(num_gpu_blocks_override=36, max_plans_in_flight=2)
    async with open_engine(MODEL, **tight) as engine:
        results = await complete_together(engine, texts, 64)
        statistics = engine.statistics().scheduler
        await assert_idle(engine)
    assert statistics.num_preemptions > 0
    verify(reference, results, 64)
