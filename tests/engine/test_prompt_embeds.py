"""Embeddings in place of a prompt's tokens, on tiny models: those of its tokens give its output."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
import trio
from safetensors.numpy import load_file

from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.tiny_models import make_tiny
from trioserve import ChatPrompt, Completion, EmbeddingsPrompt, Engine, InvalidRequest

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
COMPILED: dict[str, Any] = {"dtype": "bfloat16"}
WIDTH = 256
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 24,
    "max_num_batched_tokens": 16,
}
"""Prompts come in chunks, and there are too few pages for all, so that sequences are preempted."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama3",
        tmp_path_factory.mktemp("llama3"),
        hidden_size=WIDTH,
        head_dim=64,
        intermediate_size=128,
    )


@pytest.fixture(scope="module")
def table(tiny: Path) -> npt.NDArray[np.float32]:
    """The embeddings of all tokens, [V, E]."""
    rows: npt.NDArray[np.float32] = load_file(tiny / "model.safetensors")[
        "model.embed_tokens.weight"
    ].astype(np.float32)
    return rows


def ids_of(number: int) -> list[int]:
    return [3 + (number * 11 + place * place) % 290 for place in range(6 + 9 * number)]


def facts_of(completion: Completion, places: int = 0) -> list[Any]:
    """Return tokens and log-probabilities, rounded unless ``places`` is 0."""
    found = [
        (each.token_ids, [entry.logprob for entry in each.logprobs or ()])
        for each in completion.outputs
    ]
    if not places:
        return found
    return [(tokens, pytest.approx(logprobs, abs=10**-places)) for tokens, logprobs in found]


async def all_facts(
    engine: Engine, table: npt.NDArray[np.float32] | None = None, **fields: Any
) -> list[Any]:
    """Return what is told of prompts that are computed together; with ``table`` by embeddings."""
    found: dict[int, Any] = {}

    async def ask(number: int) -> None:
        ids = ids_of(number)
        prompt = ids if table is None else EmbeddingsPrompt(table[ids])
        completion = await engine.complete(prompt, seed=number, **{**GREEDY, **fields})
        assert completion.usage.prompt_tokens == len(ids)
        # torch's sums depend on the company; those of the compiled kernels don't
        exact = engine.config.dtype == "bfloat16"
        found[number] = facts_of(completion, 0 if exact or table is not None else 4)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(ask, number)
    return [found[number] for number in range(5)]


@pytest.mark.parametrize("options", [{}, COMPILED], ids=["torch", "compiled"])
async def test_embeddings_of_tokens_give_the_output_of_the_tokens(
    tiny: Path, table: npt.NDArray[np.float32], options: dict[str, Any]
) -> None:
    async with open_tiny_engine(tiny, **TIGHT, **options) as engine:
        tokens = await all_facts(engine)
        preempted = engine.statistics().scheduler.num_preemptions
        assert await all_facts(engine, table) == tokens
        assert engine.statistics().scheduler.num_preemptions > preempted
        drawn = {"temperature": 0.8, "n": 2}
        assert await all_facts(engine, table, **drawn) == await all_facts(engine, **drawn)
        await assert_idle(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "tensor_parallel_slices": 2, **COMPILED},
    ],
)
async def test_several_processes(
    tiny: Path, table: npt.NDArray[np.float32], options: dict[str, Any]
) -> None:
    async with open_tiny_engine(tiny, **TIGHT, **options) as engine:
        assert await all_facts(engine, table) == await all_facts(engine)


async def test_any_embeddings_are_those_of_transformers(tiny: Path) -> None:
    """Embeddings that no token has, with cached pages and without."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(21, model.config.hidden_size, generator=generator) / 8
    async with open_tiny_engine(tiny, block_size=4) as engine:
        first = await engine.complete(EmbeddingsPrompt(rows.numpy()), **GREEDY)
        again = await engine.complete(EmbeddingsPrompt(rows.numpy()), **GREEDY)
        longer = await engine.complete(EmbeddingsPrompt(torch.cat([rows[:16], rows[:5]])), **GREEDY)
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 20)
    assert longer.usage.cached_tokens == 16
    assert facts_of(first)[0][0] == facts_of(again)[0][0]
    for given, completion in (
        (rows, first),
        (rows, again),
        (torch.cat([rows[:16], rows[:5]]), longer),
    ):
        tokens = list(completion.token_ids)
        with torch.inference_mode():
            outputs = model.get_input_embeddings()(torch.tensor(tokens))
            logits = model(inputs_embeds=torch.cat([given, outputs])[None]).logits[0]
        expected = logits[len(given) - 1 : -1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == tokens
        told = [entry.logprob for entry in completion.outputs[0].logprobs or ()]
        assert told == pytest.approx(expected.max(-1).values.tolist(), abs=2e-4)


async def test_other_embeddings_share_no_pages(tiny: Path, table: npt.NDArray[np.float32]) -> None:
    """Their places have the same ids for a client, and others in the prefix cache."""
    one, other = table[ids_of(3)], table[ids_of(4)[: len(ids_of(3))]]
    async with open_tiny_engine(tiny, block_size=4) as engine:
        await engine.complete(EmbeddingsPrompt(one), **GREEDY)
        answer = await engine.complete(EmbeddingsPrompt(other), **GREEDY)
        assert answer.usage.cached_tokens == 0
        assert set(answer.prompt_token_ids) == {0}
        zeros = await engine.complete([0] * len(one), **GREEDY)
        assert zeros.usage.cached_tokens == 0


async def test_a_lost_worker_loses_no_embeddings(
    tiny: Path, table: npt.NDArray[np.float32]
) -> None:
    async with open_tiny_engine(tiny, **COMPILED) as engine:
        expected = facts_of(await engine.complete(ids_of(4), **{**GREEDY, "max_tokens": 200}))
        process = await worker_of(engine)
        prompt = EmbeddingsPrompt(table[ids_of(4)])
        async with engine.generate(prompt, **{**GREEDY, "max_tokens": 200}) as stream:
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 3:
                    os.kill(process.pid, signal.SIGKILL)
        assert (await worker_of(engine)).pid != process.pid
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        logprobs = [entry.logprob for chunk in chunks for entry in chunk.logprobs or ()]
        assert [(tokens, logprobs)] == expected


async def test_parts_of_a_chat(tiny: Path, table: npt.NDArray[np.float32]) -> None:
    """Embeddings of a piece of a message's text give what the text gives."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    async with open_tiny_engine(tiny, chat_template=template, block_size=4) as engine:
        encode = engine.tokenizer.encode
        piece = encode("world", add_special_tokens=False)
        parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "!"}]
        embedded = {"type": "prompt_embeds", "prompt_embeds": table[piece]}
        prompt = ChatPrompt(messages=[{"role": "user", "content": [parts[0], embedded, parts[1]]}])
        found = await engine.complete(prompt, **GREEDY)
        before = encode("<user>hello\n", add_special_tokens=False)
        after = encode("\n!>", add_special_tokens=False)
        assert list(found.prompt_token_ids) == [*before, *([0] * len(piece)), *after]
        expected = await engine.complete([*before, *piece, *after], **GREEDY)
        assert facts_of(found) == facts_of(expected, 4)


REFUSED: list[tuple[Any, dict[str, Any], str, str]] = [
    (np.zeros((3, 7), np.float32), {}, "prompt", "columns, got 7"),
    (np.zeros((3, WIDTH), np.int32), {}, "prompt", "not int32"),
    (np.zeros(WIDTH, np.float32), {}, "prompt", "not of the shape [256]"),
    (np.zeros((0, WIDTH), np.float32), {}, "prompt", "at least one row"),
    (np.zeros((600, WIDTH), np.float32), {}, "prompt", "maximum context length"),
    (None, {"prompt_logprobs": 1}, "prompt_logprobs", "needs a prompt's tokens"),
    (None, {"repetition_penalty": 1.1}, "repetition_penalty", "needs a prompt's tokens"),
    (None, {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "needs a prompt's tokens"),
]


async def test_refusals(tiny: Path) -> None:
    async with open_tiny_engine(tiny) as engine:
        for rows, fields, param, told in REFUSED:
            with pytest.raises(InvalidRequest) as refused:
                given = np.zeros((3, WIDTH), np.float32) if rows is None else rows
                await engine.complete(EmbeddingsPrompt(given), max_tokens=1, **fields)
            assert told in str(refused.value)
            assert refused.value.param == param
        with pytest.raises(InvalidRequest, match="a turn's prompt is text or token ids"):
            with engine.open_session() as session:
                await session.complete(EmbeddingsPrompt(np.zeros((3, WIDTH), np.float32)))
