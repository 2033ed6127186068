"""Media in prompts over tiny models: what they give is what transformers gives."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import peft
import PIL.Image
import pytest
import soundfile
import torch
import transformers
import trio

from tests.engine import audio_over_http, video_over_http
from tests.support import qwen_inputs, smolvlm_inputs
from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_audio import AUDIO_FAMILIES, TOKENS, make_audio_model
from tests.support.tiny_media import (
    IMAGE_TEXTS,
    MEDIA_FAMILIES,
    PHI4_AUDIO,
    image,
    make_media_model,
    png,
)
from tests.support.tiny_speech import wav
from tests.support.video_files import video
from trioserve import (
    AudioPart,
    Completion,
    Engine,
    EngineConfig,
    ImagePart,
    InvalidRequest,
    TextPrompt,
    VideoPart,
)
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
"""Prompts are cut in the middle of media, and there are too few pages for all."""
TOGETHER: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 19, "max_num_seqs": 4}
"""A step has just room for the 16 tokens of an image that come together, beside decodes."""
LIMITS: dict[str, Any] = {"limit_mm_per_prompt": '{"image": 2, "audio": 2, "video": 2}'}
TOLERANCE = 2e-4
OTHER_TOKENS = ("<|video_pad|>", PHI4_AUDIO)
"""Tokens of further media: Qwen's for videos, and Phi-4's for audio."""
Content = Sequence[str | bytes | PIL.Image.Image | AudioPart | VideoPart]
CONVERSATIONS: list[Content] = [
    ["What is this?", image(1)],
    [image(2, (30, 70)), "and", image(1), "differ?"],
    ["no picture at all"],
    [image(3), image(3), "twice"],
]
REFUSED_IMAGES: list[tuple[Content, str, str]] = [
    (["see", b"no image"], "messages[0].content[1]", "messages[0].content[1]"),
    ([image(1), image(1), image(1)], "--limit-mm-per-prompt", "messages[0].content[2]"),
    ([image(1), AudioPart(b"RIFF")], "reads no audio clips", "messages[0].content[1]"),
    ([VideoPart(b"x")], "reads no videos", "messages[0].content[0]"),
]
SHORT, LONG = VideoPart(video(num_frames=13)), VideoPart(video("libvpx", 24))
FILMS: list[Content] = [
    ["What is this?", image(1)],
    [LONG, "and", image(2, (30, 70)), "differ from", SHORT],
    ["What happens?", SHORT],
    [SHORT, SHORT, "twice"],
]
REFUSED_VIDEOS: list[tuple[Content, str, str]] = [
    (["see", VideoPart(b"no video")], "unknown format", "messages[0].content[1]"),
    ([SHORT, image(1), SHORT, SHORT], "--limit-mm-per-prompt", "messages[0].content[3]"),
]
REFUSED_FILMS: list[tuple[Content, str, str]] = [
    *REFUSED_VIDEOS,
    (["a text with <video> in it", SHORT], "which stands for videos", "messages"),
    (["a text with <image> in it", SHORT], "stands for embeddings", "messages"),
]
REFUSED_AUDIO: list[tuple[Content, str, str]] = [
    (["hear", AudioPart(b"no audio")], "messages[0].content[1]", "messages[0].content[1]"),
    ([AudioPart(wav(1, 0.1))] * 3, "--limit-mm-per-prompt", "messages[0].content[2]"),
    ([AudioPart(wav(1, 0.1)), image(1)], "reads no images", "messages[0].content[1]"),
    ([AudioPart(wav(1, 1.1))], "1.1 seconds, and the model hears 1", "messages[0].content[0]"),
    ([AudioPart(wav(1, 0.001))], "too short", "messages[0].content[0]"),
    (["a <|AUDIO|> in it", AudioPart(wav(1, 0.1))], "stands for audio clips", "messages"),
]
PHI4_CLIPS = AudioPart(wav(1, 0.7)), AudioPart(wav(2, 0.7))
PHI4_CONVERSATIONS: list[Content] = [
    ["What is this?", image(1, (500, 30))],
    [image(2, (4, 40)), "and", PHI4_CLIPS[0], "and", image(3, (40, 4)), "differ?"],
    ["no picture at all"],
    [*PHI4_CLIPS, "twice"],
    [PHI4_CLIPS[0], "and", image(3, (40, 4))],
]
"""Images have some 300 tokens. A clip has other embeddings beside them."""
REFUSED_PHI4: list[tuple[Content, str, str]] = [
    *REFUSED_IMAGES[:2],
    ([image(1, (1, 90))], "aspect ratio of 1 x 90 pixels is too extreme", "messages[0].content[0]"),
    ([VideoPart(b"x")], "reads no videos", "messages[0].content[0]"),
    (["hear", AudioPart(b"no audio")], "messages[0].content[1]", "messages[0].content[1]"),
    (["an <|audio|>", PHI4_CLIPS[0]], "stands for audio clips", "messages"),
    (["an <|image|>", image(1, (40, 4))], "stands for images", "messages"),
]


@attrs.frozen
class Model:
    """A tiny model, and conversations for it."""

    folder: Path
    token: str
    conversations: Sequence[Content]
    refused: Sequence[tuple[Content, str, str]]
    num_pages: int
    """Pages that are too few for all conversations at a time."""
    served: Callable[[Engine], Awaitable[None]] | None = None
    """Asserts that HTTP serves the model; None if that of another one is enough."""
    is_killed: bool = False
    """True if its worker is killed as well."""
    text: str = ""
    """Text that the template prints for an image."""
    frames: str = '{"video": {"num_frames": 2}}'
    """Frames that are taken of a video."""

    tight: dict[str, Any] = TIGHT
    """Options with which prompts are cut into chunks."""

    @property
    def options(self) -> dict[str, Any]:
        return {**LIMITS, "media_io_kwargs": self.frames}


def make_model(family: str, folder: Path) -> Model:
    if family == "smolvlm":
        made, served = make_media_model(family, folder), video_over_http.assert_served
        return Model(made, "<image>", FILMS, REFUSED_FILMS, 100, served, is_killed=True)
    if family not in AUDIO_FAMILIES:
        made, text = make_media_model(family, folder), IMAGE_TEXTS[family]
        written: Content = [f"a text with {text} in it", image(1)]
        stands = (written, "which stands for images", "messages")
        if family.startswith("qwen"):
            frames = json.dumps({"fps": qwen_inputs.FPS, "num_frames": qwen_inputs.NUM_FRAMES})
            refused = [*REFUSED_VIDEOS, stands]
            sampling = f'{{"video": {frames}}}'
            return Model(made, "<|image_pad|>", FILMS, refused, 40, text=text, frames=sampling)
        if family == "phi4":
            tight: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64}
            tight["enable_lora"] = True
            return Model(
                *(made, text, PHI4_CONVERSATIONS, REFUSED_PHI4, 50), is_killed=True, tight=tight
            )
        if family == "gemma3":
            soft: Content = ["a text with <image_soft_token> in it", image(1)]
            refused = [*REFUSED_IMAGES, stands, (soft, "stands for embeddings", "messages")]
            return Model(
                *(made, "<image_soft_token>", CONVERSATIONS, refused, 9), text=text, tight=TOGETHER
            )
        pages = {"llava": 18, "llava_onevision": 48}.get(family, 32)
        return Model(made, text, CONVERSATIONS, [*REFUSED_IMAGES, stands], pages, text=text)
    longest = 1.0 if family == "qwen2_audio" else 2.3
    spoken: list[Content] = [
        ["What is said?", AudioPart(wav(1, 0.7))],
        [AudioPart(wav(2, longest)), "and", AudioPart(wav(1, 0.7)), "differ?"],
        ["no sound at all"],
        [AudioPart(wav(3, 0.2)), AudioPart(wav(3, 0.2)), "twice"],
    ]
    made, pages = make_audio_model(family, folder), 32 if longest == 1 else 40
    served = audio_over_http.assert_served if family == "qwen2_audio" else None
    is_killed = served is not None
    return Model(made, TOKENS[family], spoken, REFUSED_AUDIO, pages, served, is_killed)


@pytest.fixture(scope="module", params=[*MEDIA_FAMILIES, *AUDIO_FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def messages_of(content: Content) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "audio", "audio": each}
        if isinstance(each, AudioPart)
        else {"type": "video", "video": each}
        if isinstance(each, VideoPart)
        else {"type": "image", "image": each}
        for each in content
    ]
    return [{"role": "user", "content": parts}]


def test_images_are_read_with_a_tower_and_a_limit_above_0() -> None:
    tower = MediaConfig(
        architecture="LlavaForConditionalGeneration", width=8, token_ids={"image": 1}
    )
    model = LoadedModel(name="m", tokenizer=Tokenizer(byte_tokenizer()), eos_token_ids=())
    reader = attrs.evolve(model, media=tower)
    refusing = EngineConfig("m", limit_mm_per_prompt='{"image": 0}')
    assert reader.reads("image", EngineConfig("m"))
    assert not reader.reads("audio", EngineConfig("m"))
    assert not reader.reads("image", refusing)
    assert not model.reads("image", EngineConfig("m"))


class Reference:
    """transformers' own model and processor."""

    def __init__(self, model: Model) -> None:
        config = transformers.AutoConfig.from_pretrained(model.folder)
        model_class: Any = getattr(transformers, config.architectures[0])
        self.model = model_class.from_pretrained(model.folder, dtype=torch.float32).eval()
        self.processor: Any = load_processor(model.folder)
        vocabulary = self.processor.tokenizer.get_vocab()
        tokens = [token for token in (model.token, *OTHER_TOKENS) if token in vocabulary]
        self.placeholders = self.processor.tokenizer.convert_tokens_to_ids(tokens)

    @property
    def is_qwen(self) -> bool:
        return "Qwen2VL" in type(self.processor).__name__

    @property
    def is_phi4(self) -> bool:
        return "Phi4" in type(self.processor).__name__

    @property
    def is_gemma(self) -> bool:
        return "Gemma" in type(self.processor).__name__

    def inputs_of(self, content: Content) -> Any:
        """Return the processor's result for a conversation."""
        template = self.processor.tokenizer.chat_template or self.processor.chat_template
        text = self.processor.tokenizer.apply_chat_template(
            messages_of(content),
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
        return self._inputs(text, [each for each in content if not isinstance(each, str)])

    def generate(self, content: Content, max_tokens: int) -> list[int]:
        """Return the greedy output, without tokens of media."""
        inputs = self.inputs_of(content)
        limits = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None}
        if not self.is_gemma:
            inputs.pop("token_type_ids", None)
        suppressed = {"suppress_tokens": self.placeholders}
        found = self.model.generate(**inputs, **limits, **suppressed, pad_token_id=0)
        return found[0, inputs["input_ids"].shape[1] :].tolist()

    def check(self, content: Content, completion: Completion) -> None:
        """Assert that the output is greedy, with log-probabilities within the tolerance."""
        inputs = self.inputs_of(content)
        prompt, usage = inputs["input_ids"][0].tolist(), completion.usage
        assert list(completion.prompt_token_ids) == prompt
        num_placeholders = sum(prompt.count(token) for token in self.placeholders)
        assert usage.image_tokens + usage.audio_tokens == num_placeholders
        tokens = torch.tensor([completion.token_ids])
        count = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        types = inputs.pop("token_type_ids", None)
        if self.is_gemma and types is not None:
            inputs["token_type_ids"] = torch.cat([types, torch.zeros_like(tokens)], 1)
        if self.is_qwen:
            inputs["position_ids"] = qwen_inputs.qwen_positions(self.model, inputs)
        with torch.inference_mode():
            logits = self.model(**inputs).logits[0]
        expected = logits[count - 1 : -1].log_softmax(-1)
        told = [entry.logprob for entry in completion.outputs[0].logprobs or ()]
        own = expected.gather(1, tokens[0][:, None])[:, 0]
        expected[:, self.placeholders] = -torch.inf
        assert told == pytest.approx(own.tolist(), abs=TOLERANCE)
        assert (expected.max(-1).values - own).max() < TOLERANCE

    def _inputs(self, text: str, media: Sequence[Any]) -> Any:
        options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
        if "SmolVLM" in type(self.processor).__name__:
            return smolvlm_inputs.smolvlm_inputs(self.processor, text, media)
        if self.is_qwen:
            return qwen_inputs.qwen_inputs(self.processor, text, media)
        clips = [samples_of(each) for each in media if isinstance(each, AudioPart)]
        images = [each for each in media if not isinstance(each, AudioPart)]
        if images and not clips:
            return self.processor(text=text, images=images, **options)
        options["sampling_rate"] = 16_000
        if self.is_phi4:
            given = {"images": images or None, "audio": clips or None}
            return self.processor(text=text, **given, **options)
        # Some processors take one clip for a text.
        parts: list[Any] = []
        for samples in clips:
            token = self.processor.audio_token
            parts.append(self.processor(text=token, audio=samples, **options))
            text = text.replace(token, "\0" * parts[-1]["input_ids"].shape[1], 1)
        if clips:
            text = text.replace("\0", self.processor.audio_token)
        names = [name for name in (parts[0] if clips else ()) if "feature" in name]
        features = {name: torch.cat([part[name] for part in parts]) for name in names}
        del options["sampling_rate"]
        return {**self.processor.tokenizer(text, **options), **features}


def samples_of(clip: AudioPart) -> Any:
    """Return the samples of a clip of 16 kHz."""
    assert isinstance(clip.source, bytes)
    samples, rate = soundfile.read(io.BytesIO(clip.source), dtype="float32")
    assert rate == 16_000
    return samples


def without_token(engine: Engine, model: Model) -> dict[str, Any]:
    """Return the fields of greedy answers without tokens of media."""
    tokens = [engine.tokenizer.token_of(token) for token in (model.token, *OTHER_TOKENS)]
    return {**GREEDY, "logit_bias": {token: -100.0 for token in tokens if token is not None}}


async def answers(engine: Engine, model: Model) -> list[Completion]:
    """Return the answers to all conversations, begun in one step, without tokens of media."""
    fields = without_token(engine, model)
    found: dict[int, Completion] = {}

    async def ask(number: int) -> None:
        messages = messages_of(model.conversations[number])
        found[number] = await engine.complete(messages, **fields)

    await engine.pause("in_place")
    async with trio.open_nursery() as nursery:
        for number in range(len(model.conversations)):
            nursery.start_soon(ask, number)
        while engine.statistics().scheduler.num_waiting < len(model.conversations):
            await trio.sleep(0.005)
        engine.resume()
    return [found[number] for number in range(len(model.conversations))]


async def test_answers_are_those_of_transformers(model: Model) -> None:
    """Together, in chunks and preempted, and again with cached pages."""
    reference = Reference(model)
    options = {"num_gpu_blocks_override": model.num_pages, **model.tight, **model.options}
    async with open_tiny_engine(model.folder, **options) as engine:
        for _ in range(2):
            found = await answers(engine, model)
            for content, completion in zip(model.conversations, found, strict=True):
                reference.check(content, completion)
        if model.conversations is CONVERSATIONS:
            assert list(found[1].token_ids) == reference.generate(CONVERSATIONS[1], 20)
        assert engine.statistics().scheduler.num_preemptions > 0
        if reference.is_gemma:
            await check_prefix_within_image(engine, model, reference)
        if reference.is_phi4:
            await check_adapter(engine, model, reference)
        if model.is_killed:
            tokens = await tokens_of_a_killed_worker(engine, model, without_token(engine, model))
            assert tokens == found[1].token_ids
            await assert_refused(engine, model)
        if model.served is not None:
            await model.served(engine)
        await assert_idle(engine)


async def check_adapter(engine: Engine, model: Model, reference: Reference) -> None:
    """Assert that an adapter of the decoder changes the answer about an image, as PEFT's does."""
    content = model.conversations[4]
    fields = without_token(engine, model)
    plain = await engine.complete(messages_of(content), **fields)
    # The towers have modules of the same names.
    modules = {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj"}
    folder = make_adapter(model.folder, model.folder / "vision-lora", rank=2, alpha=2, **modules)
    await engine.load_adapter("vision", folder)
    completion = await engine.complete(messages_of(content), adapter="vision", **fields)
    assert completion.token_ids != plain.token_ids
    adapted = peft.PeftModel.from_pretrained(reference.model, folder)
    reference.check(content, completion)
    adapted.unload()
    reference.check(content, plain)


async def check_prefix_within_image(engine: Engine, model: Model, reference: Reference) -> None:
    """Assert that an answer is right whose cached prefix ends within an image."""
    for question in ("What is this?", "Another question"):
        content = [image(4), question]
        completion = await engine.complete(messages_of(content), **without_token(engine, model))
        reference.check(content, completion)
    first = list(completion.prompt_token_ids).index(reference.placeholders[0])
    assert first < completion.usage.cached_tokens < first + 16


@pytest.mark.parametrize("model", ["llava", "qwen2_5_vl"], indirect=True)
async def test_compiled_kernels_give_the_same_bits_whatever_happens(model: Model) -> None:
    """Alone, beside others, with cached pages, and after the worker was killed."""
    options = {"dtype": "bfloat16", "num_threads": 2, **model.options}
    async with open_tiny_engine(model.folder, **options) as engine:
        await assert_refused(engine, model)
        alone = [
            facts_of(await engine.complete(messages_of(content), **GREEDY))
            for content in model.conversations
        ]
        prompt = f"user: What is this?{model.text}assistant:"
        text = TextPrompt(prompt, media=[ImagePart(png(1))])
        assert facts_of(await engine.complete(text, **GREEDY)) == alone[0]
        assert await tokens_of_a_killed_worker(engine, model, GREEDY) == alone[1][0]
        engine.flush_cache()
        found: dict[int, Any] = {}

        async def ask(number: int) -> None:
            content = messages_of(model.conversations[number % len(alone)])
            found[number] = facts_of(await engine.complete(content, **GREEDY))

        async with trio.open_nursery() as nursery:
            for number in range(3 * len(alone)):
                nursery.start_soon(ask, number)
        assert [found[number] for number in range(3 * len(alone))] == alone * 3


async def tokens_of_a_killed_worker(
    engine: Engine, model: Model, fields: dict[str, Any]
) -> tuple[int, ...]:
    """Return the answer to the second conversation, in which the worker is killed."""
    process = await worker_of(engine)
    async with engine.generate(messages_of(model.conversations[1]), **fields) as stream:
        chunks = []
        async for chunk in stream:
            if not chunks:
                os.kill(process.pid, signal.SIGKILL)
            chunks.append(chunk)
    assert (await worker_of(engine)).pid != process.pid
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def facts_of(completion: Completion) -> tuple[Any, ...]:
    logprobs = [entry.logprob for entry in completion.outputs[0].logprobs or ()]
    return completion.token_ids, logprobs


async def assert_refused(engine: Engine, model: Model) -> None:
    for content, told, param in model.refused:
        with pytest.raises(InvalidRequest) as refused:
            await engine.complete(messages_of(content), max_tokens=1)
        assert told in str(refused.value)
        assert refused.value.param == param
    await assert_idle(engine)
