"""Hidden states and logits equal transformers', however they came to be computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio

from tests.gpu.lora.test_models import HAS_KERNELS
from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.tiny_models import make_tiny
from trioserve import LLM, Completion, Engine, EngineConfig

TOLERANCE = 2e-4
PAGE = 16
PROMPT = [3 + (7 * number + number * number) % 290 for number in range(100)]
EVERYTHING: dict[str, Any] = {
    "return_hidden_states": "all",
    "return_context_logits": True,
    "return_generation_logits": True,
    "ignore_eos": True,
}
ADJUSTED: dict[str, Any] = {
    "logit_bias": {7: 50.0},
    "repetition_penalty": 1.5,
    "temperature": 0.3,
    "seed": 1,
}

Reference = Any
"""The model as transformers has it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("llama2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Reference:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check(model: Reference, completion: Completion) -> None:
    prompt = list(completion.prompt_token_ids)
    for output in completion.outputs:
        tokens = torch.tensor([prompt + list(output.token_ids)])
        with torch.inference_mode():
            states = model.model(tokens).last_hidden_state[0]
            logits = model(tokens).logits[0].numpy()
        first = len(prompt) - 1
        for found, wanted in (
            (completion.prompt_hidden_states, states.numpy()[: first + 1]),
            (completion.context_logits, logits[: first + 1]),
            (output.hidden_states, states.numpy()[first:-1]),
            (output.generation_logits, logits[first:-1]),
        ):
            assert found is not None
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


async def ask_all(engine: Engine) -> dict[int, Completion]:
    """Ask for everything of several prompts at once, beside requests that ask for nothing."""
    found: dict[int, Completion] = {}

    async def ask(number: int, **fields: Any) -> None:
        prompt = PROMPT[: 40 + 11 * number]
        fields = {"max_tokens": 12, "seed": number, **fields}
        found[number] = await engine.complete(prompt, **fields)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask(0, **EVERYTHING))
        nursery.start_soon(lambda: ask(1, **EVERYTHING, **ADJUSTED))
        nursery.start_soon(lambda: ask(2, **EVERYTHING, n=2, temperature=0.0))
        nursery.start_soon(lambda: ask(3, ignore_eos=True))
    assert found.pop(3).outputs[0].tensors == {}
    return found


async def test_alone_together_with_a_prefix_hit_and_cut_off(folder: Path, model: Reference) -> None:
    async with open_tiny_engine(folder) as engine:
        alone = await engine.complete(PROMPT, max_tokens=8, temperature=0.0, **EVERYTHING)
        check(model, alone)
        logits = alone.outputs[0].generation_logits
        assert logits is not None
        assert logits.argmax(1).tolist() == list(alone.token_ids)
        for completion in (await ask_all(engine)).values():
            check(model, completion)
        last = await engine.complete(PROMPT, max_tokens=0, return_hidden_states="last")
        assert last.usage.cached_tokens == len(PROMPT) // PAGE * PAGE
        assert last.prompt_hidden_states is None
        assert (last.outputs[0].hidden_states == alone.outputs[0].hidden_states[:1]).all()
        await assert_idle(engine)


def test_an_offline_batch_in_chunks_and_preempted(folder: Path, model: Reference) -> None:
    config = EngineConfig(
        str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_num_batched_tokens=7,
        num_gpu_blocks_override=15,
        max_model_len=120,
    )
    prompts = [PROMPT[: 40 + 11 * number] for number in range(3)]
    with LLM(config) as llm:
        for completion in llm.generate(prompts, max_tokens=40, n=2, **EVERYTHING):
            check(model, completion)
        assert llm.statistics().scheduler.num_preemptions > 0


async def test_a_killed_workers_rows_are_neither_lost_nor_doubled(tmp_path: Path) -> None:
    """Bit for bit by the compiled kernels, where the processor has what they need."""
    folder = make_tiny("llama3", tmp_path, head_dim=32)
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, **EVERYTHING}
    options: dict[str, Any] = {"dtype": "bfloat16", "deterministic": HAS_KERNELS}
    if HAS_KERNELS:
        drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
        options["speculative_config"] = json.dumps(drafts)
    async with open_tiny_engine(folder, **options) as engine:
        whole = await engine.complete(PROMPT, **asked)
        num_tokens = 0
        async with (
            engine.generate([5, 6, 7, 8] * 9, max_tokens=60, temperature=0.0) as drafted,
            engine.generate(PROMPT, **asked) as stream,
        ):
            async for chunk in stream:
                num_tokens += len(chunk.token_ids)
                if num_tokens == 5:
                    (await worker_of(engine)).kill()
            again = stream.prompt_tensors | stream.output_tensors(0, num_tokens)
            assert (drafted.usage.draft_tokens > 0) == HAS_KERNELS
            assert stream.usage.draft_tokens == 0
        assert engine.statistics().worker_restarts == 1
    check_direction(folder, whole)
    wanted = whole.tensors | whole.outputs[0].tensors
    assert again.keys() == wanted.keys()
    for name, rows in wanted.items():
        atol = 0.0 if HAS_KERNELS else 0.2
        np.testing.assert_allclose(again[name], rows, rtol=0, atol=atol, err_msg=name)


def check_direction(folder: Path, completion: Completion) -> None:
    """Check that rows computed in bfloat16 point the same way as transformers' in float32."""
    (output,) = completion.outputs
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([PROMPT + list(output.token_ids)])
    with torch.inference_mode():
        states = model.model(tokens).last_hidden_state[0].numpy()
        logits = model(tokens).logits[0].numpy()
    assert output.generation_logits is not None
    assert output.generation_logits.argmax(1).tolist() == list(output.token_ids)
    for rows, wanted in (
        (completion.prompt_hidden_states, states[: len(PROMPT)]),
        (completion.context_logits, logits[: len(PROMPT)]),
        (output.hidden_states, states[len(PROMPT) - 1 : -1]),
        (output.generation_logits, logits[len(PROMPT) - 1 : -1]),
    ):
        assert rows is not None
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(wanted, axis=1)
        assert ((rows * wanted).sum(1) / lengths).min() > 0.995
