"""Prompt adapters in whole engines: PEFT's numbers, whatever the company and whatever happens."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter
from tests.support.prompt_adapters import PeftModels, save_with_peft, write_prompt_adapter
from tests.support.tiny_models import make_tiny
from trioserve import Engine, InvalidRequest

GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
COMPILED: dict[str, Any] = {"dtype": "bfloat16"}
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 16,
}
"""Virtual tokens and prompts come in chunks, and there are too few pages for all."""
PROMPTS = [[3 + 7 * place % 200 for place in range(number)] for number in (3, 25)]
NUM_VIRTUAL = {"": 0, "tuned": 21, "encoded": 10, "prefix": 11, "lora": 0}


class Setting:
    """A model, both kinds of prompt adapters, and a LoRA adapter."""

    def __init__(self, root: Path) -> None:
        self.model = make_tiny(
            "llama3", root / "model", hidden_size=128, head_dim=32, intermediate_size=96
        )
        self.adapters = {
            "tuned": save_with_peft(self.model, root / "tuned", "PROMPT_TUNING", 21),
            "encoded": save_with_peft(self.model, root / "encoded", "P_TUNING", 10),
            "prefix": save_with_peft(self.model, root / "prefix", "PREFIX_TUNING", 11),
            "lora": make_adapter(self.model, root / "lora", seed=1),
        }
        self.peft = PeftModels(self.model, self.adapters)

    @property
    def modules(self) -> list[str]:
        return [f"{name}={path}" for name, path in self.adapters.items()]

    def check(self, name: str, prompt: list[int], facts: Any) -> None:
        """Assert that tokens and log-probabilities are PEFT's greedy ones."""
        tokens, logprobs = facts
        expected = self.peft.logprobs(name, prompt, tokens)
        assert list(tokens) == expected.argmax(-1).tolist()
        assert logprobs == pytest.approx(expected.max(-1).values.tolist(), abs=2e-4)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("prompt-adapters"))


async def facts_of(engine: Engine, name: str, prompt: list[int], **fields: Any) -> Any:
    """Return tokens and their log-probabilities."""
    completion = await engine.complete(prompt, adapter=name, **{**GREEDY, **fields})
    assert list(completion.prompt_token_ids) == prompt
    assert completion.usage.prompt_tokens == len(prompt)
    logprobs = [entry.logprob for entry in completion.outputs[0].logprobs or ()]
    return completion.token_ids, logprobs


async def all_at_once(engine: Engine, **fields: Any) -> dict[tuple[str, int], Any]:
    """Return the facts of each adapter and of none with each prompt, computed together."""
    found: dict[tuple[str, int], Any] = {}

    async def ask(name: str, number: int) -> None:
        found[name, number] = await facts_of(engine, name, PROMPTS[number], **fields)

    async with trio.open_nursery() as nursery:
        for name in NUM_VIRTUAL:
            for number in range(len(PROMPTS)):
                nursery.start_soon(ask, name, number)
    return found


async def num_cached(engine: Engine, name: str, prompt: list[int]) -> int:
    """Return how many tokens the prefix cache has of a prompt, virtual ones included."""
    async with engine.generate(prompt, adapter=name, **GREEDY) as stream:
        await anext(stream)
        assert stream.usage.cached_tokens == max(
            stream.request.num_cached_tokens - NUM_VIRTUAL[name], 0
        )
        return stream.request.num_cached_tokens


async def test_the_numbers_are_peft_s(setting: Setting) -> None:
    """Alone and from cached pages; in a batch, in chunks and preempted."""
    async with open_tiny_engine(setting.model, lora_modules=setting.modules, **TIGHT) as engine:
        for name in 2 * ("tuned", "encoded", "prefix"):
            for prompt in PROMPTS:
                setting.check(name, prompt, await facts_of(engine, name, prompt))
        assert engine.statistics().scheduler.num_preemptions == 0
        for (name, number), facts in (await all_at_once(engine)).items():
            setting.check(name, PROMPTS[number], facts)
        assert engine.statistics().scheduler.num_preemptions > 0
        await assert_idle(engine)


async def test_virtual_tokens_are_computed_once_for_each_adapter(setting: Setting) -> None:
    first, second = [5, 6, 7], [8, 9, 10]
    async with open_tiny_engine(
        setting.model, lora_modules=setting.modules, block_size=4, **COMPILED
    ) as engine:
        for name, shared in (("tuned", 21), ("encoded", 10), ("prefix", 11), ("", 0)):
            assert await num_cached(engine, name, first) == 0
            assert await num_cached(engine, name, second) == shared
        # Neither the tokens in the places of virtual ones nor another load of the same files.
        assert await num_cached(engine, "", [0] * 21) == 0
        await engine.unload_adapter("tuned")
        await engine.load_adapter("tuned", setting.adapters["tuned"])
        assert await num_cached(engine, "tuned", second) == 0
        await assert_idle(engine)


async def test_a_lost_worker_changes_nothing(setting: Setting) -> None:
    """The bits are the same, with a new worker and in a batch of other sequences."""
    async with open_tiny_engine(setting.model, lora_modules=setting.modules, **COMPILED) as engine:
        expected = {
            (name, number): await facts_of(engine, name, prompt, max_tokens=200)
            for name in NUM_VIRTUAL
            for number, prompt in enumerate(PROMPTS)
        }

        async def kill() -> None:
            while engine.statistics().scheduler.num_running < len(expected):
                await trio.sleep(0.001)
            os.kill((await worker_of(engine)).pid, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            assert await all_at_once(engine, max_tokens=200) == expected
        assert engine.statistics().worker_restarts == 1
        await assert_idle(engine)


async def test_what_is_refused(setting: Setting, tmp_path: Path) -> None:
    write_prompt_adapter(tmp_path, count=4, width=128, peft_type="CARTRIDGE")
    async with open_tiny_engine(
        setting.model, lora_modules=setting.modules, max_model_len=64, **COMPILED
    ) as engine:
        with pytest.raises(InvalidRequest, match="peft_type = 'CARTRIDGE': only LORA is"):
            await engine.load_adapter("cartridge", tmp_path)
        for fields in ({"prompt_logprobs": 1}, {"repetition_penalty": 1.1}):
            with pytest.raises(InvalidRequest, match="prompt adapter 'tuned' puts emb") as refused:
                await facts_of(engine, "tuned", PROMPTS[0], **fields)
            assert refused.value.param == next(iter(fields))
        with pytest.raises(InvalidRequest, match="'tuned' puts virtual tokens") as refused:
            await engine.embed([PROMPTS[0]], adapter="tuned")
        assert refused.value.param == "adapter"
        told = r"^43 tokens in the prompt \(21 of them its adapter's\) and max_tokens of 22 are 65"
        with pytest.raises(InvalidRequest, match=told):
            await facts_of(engine, "tuned", [5] * 22, max_tokens=22)
        tokens, _ = await facts_of(engine, "tuned", [5] * 22, max_tokens=21)
        assert len(tokens) == 21
