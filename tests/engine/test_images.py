"""Images in prompts over tiny models: what they give is what transformers gives."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import PIL.Image
import pytest
import torch
import transformers
import trio

from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.tiny_media import IMAGE_TEXTS, MEDIA_FAMILIES, image, make_media_model, png
from trioserve import Completion, Engine, EngineConfig, ImagePart, InvalidRequest, TextPrompt
from trioserve.engine.loaded_model import LoadedModel
from trioserve.model_files.media_config import MediaConfig
from trioserve.requests.media.processor_loading import load_processor
from trioserve.testing.fake_engine import byte_tokenizer
from trioserve.text.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 0}
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 16,
}
"""Prompts are cut in the middle of images, and there are too few pages for all."""
TOLERANCE = 2e-4
Content = Sequence[str | bytes | PIL.Image.Image]
CONVERSATIONS: list[Content] = [
    ["What is this?", image(1)],
    [image(2, (30, 70)), "and", image(1), "differ?"],
    ["no picture at all"],
    [image(3), image(3), "twice"],
]


@pytest.fixture(scope="module", params=MEDIA_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_model(request.param, tmp_path_factory.mktemp(request.param))


def family_of(folder: Path) -> str:
    """Return the family of a folder that a fixture made."""
    return folder.name[:-1]


def messages_of(content: Content) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image", "image": each}
        for each in content
    ]
    return [{"role": "user", "content": parts}]


def test_images_are_read_with_a_tower_and_a_limit_above_0() -> None:
    tower = MediaConfig(architecture="LlavaForConditionalGeneration", width=8, image_token_id=1)
    model = LoadedModel(name="m", tokenizer=Tokenizer(byte_tokenizer()), eos_token_ids=())
    reader = attrs.evolve(model, media=tower)
    refusing = EngineConfig("m", limit_mm_per_prompt='{"image": 0}')
    assert reader.reads_images(EngineConfig("m"))
    assert not reader.reads_images(refusing)
    assert not model.reads_images(EngineConfig("m"))


class Reference:
    """transformers' own model and processor."""

    def __init__(self, folder: Path) -> None:
        self.processor: Any = load_processor(folder)
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    @property
    def image_token(self) -> int:
        """Token at the positions of images."""
        return int(self.model.config.image_token_id)

    def inputs_of(self, content: Content) -> Any:
        """Return the processor's result for a conversation."""
        template = self.processor.tokenizer.chat_template or self.processor.chat_template
        text = self.processor.apply_chat_template(
            messages_of(content), chat_template=template, add_generation_prompt=True
        )
        images = [each for each in content if not isinstance(each, str)]
        return self.processor(
            text=text, images=images or None, return_tensors="pt", add_special_tokens=False
        )

    def generate(self, content: Content, max_tokens: int) -> list[int]:
        """Return the greedy output, without tokens of images."""
        inputs = self.inputs_of(content)
        limits = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None}
        inputs.pop("token_type_ids", None)
        suppressed = [self.image_token]
        found = self.model.generate(**inputs, **limits, suppress_tokens=suppressed, pad_token_id=0)
        return found[0, inputs["input_ids"].shape[1] :].tolist()

    def check(self, content: Content, completion: Completion) -> None:
        """Assert that the output is greedy, with log-probabilities within the tolerance."""
        inputs = self.inputs_of(content)
        prompt = inputs["input_ids"][0].tolist()
        assert list(completion.prompt_token_ids) == prompt
        assert completion.usage.image_tokens == prompt.count(self.image_token)
        tokens = torch.tensor([completion.token_ids])
        count = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        types = inputs.pop("mm_token_type_ids", None)
        inputs.pop("token_type_ids", None)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(tokens)], 1)
        with torch.inference_mode():
            logits = self.model(**inputs).logits[0]
        expected = logits[count - 1 : -1].log_softmax(-1)
        told = [entry.logprob for entry in completion.outputs[0].logprobs or ()]
        own = expected.gather(1, tokens[0][:, None])[:, 0]
        expected[:, self.image_token] = -torch.inf
        assert told == pytest.approx(own.tolist(), abs=TOLERANCE)
        assert (expected.max(-1).values - own).max() < TOLERANCE


async def answers(engine: Engine, image_token: int) -> list[Completion]:
    """Return the answers to all conversations, begun in one step, without tokens of images."""
    fields = {**GREEDY, "logit_bias": {image_token: -100.0}}
    found: dict[int, Completion] = {}

    async def ask(number: int) -> None:
        found[number] = await engine.complete(messages_of(CONVERSATIONS[number]), **fields)

    await engine.pause("in_place")
    async with trio.open_nursery() as nursery:
        for number in range(len(CONVERSATIONS)):
            nursery.start_soon(ask, number)
        while engine.statistics().scheduler.num_waiting < len(CONVERSATIONS):
            await trio.sleep(0.005)
        engine.resume()
    return [found[number] for number in range(len(CONVERSATIONS))]


async def test_answers_are_those_of_transformers(folder: Path) -> None:
    """Together, in chunks and preempted, and again with cached pages."""
    reference = Reference(folder)
    pages = 18 if family_of(folder) == "llava" else 32
    async with open_tiny_engine(folder, num_gpu_blocks_override=pages, **TIGHT) as engine:
        for _ in range(2):
            found = await answers(engine, reference.image_token)
            for content, completion in zip(CONVERSATIONS, found, strict=True):
                reference.check(content, completion)
        assert list(found[1].token_ids) == reference.generate(CONVERSATIONS[1], 20)
        assert engine.statistics().scheduler.num_preemptions > 0
        await assert_idle(engine)


@pytest.mark.parametrize("folder", ["llava", "qwen2_5_vl"], indirect=True)
async def test_compiled_kernels_give_the_same_bits_whatever_happens(folder: Path) -> None:
    """Alone, beside others, with cached pages, and after the worker was killed."""
    image_text = IMAGE_TEXTS[family_of(folder)]
    options = {"dtype": "bfloat16", "num_threads": 2, "limit_mm_per_prompt": '{"image": 2}'}
    async with open_tiny_engine(folder, **options) as engine:
        await assert_refused(engine, image_text)
        alone = [
            facts_of(await engine.complete(messages_of(content), **GREEDY))
            for content in CONVERSATIONS
        ]
        prompt = f"user: What is this?{image_text}assistant:"
        text = TextPrompt(prompt, media=[ImagePart(png(1))])
        assert facts_of(await engine.complete(text, **GREEDY)) == alone[0]
        process = await worker_of(engine)
        async with engine.generate(messages_of(CONVERSATIONS[1]), **GREEDY) as stream:
            chunks = []
            async for chunk in stream:
                if not chunks:
                    os.kill(process.pid, signal.SIGKILL)
                chunks.append(chunk)
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        assert tokens == alone[1][0]
        assert (await worker_of(engine)).pid != process.pid
        engine.flush_cache()
        found: dict[int, Any] = {}

        async def ask(number: int) -> None:
            content = messages_of(CONVERSATIONS[number % len(alone)])
            found[number] = facts_of(await engine.complete(content, **GREEDY))

        async with trio.open_nursery() as nursery:
            for number in range(3 * len(alone)):
                nursery.start_soon(ask, number)
        assert [found[number] for number in range(3 * len(alone))] == alone * 3


def facts_of(completion: Completion) -> tuple[Any, ...]:
    logprobs = [entry.logprob for entry in completion.outputs[0].logprobs or ()]
    return completion.token_ids, logprobs


async def assert_refused(engine: Engine, image_text: str) -> None:
    for content, told, param in (
        (["see", b"no image"], "messages[0].content[1]", "messages[0].content[1]"),
        ([image(1), image(1), image(1)], "--limit-mm-per-prompt", "messages[0].content[2]"),
        ([f"a text with {image_text} in it", image(1)], "which stands for an image", "messages"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await engine.complete(messages_of(content), max_tokens=1)
        assert told in str(refused.value)
        assert refused.value.param == param
    await assert_idle(engine)
