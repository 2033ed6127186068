"""Processors of media with a small tokenizer, in folders as models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BEGINNING = "<s>"
IDEFICS_TOKENS = (
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
ONEVISION_GRIDS = [[32, 32], [32, 64], [64, 32], [64, 64]]
"""Heights and widths of an image's tiles together, as LLaVA-OneVision may cut it."""
QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def tokenizer(*special_tokens: str, **named_tokens: str) -> Any:
    """Return a tokenizer of bytes that puts ``<s>`` in front of a text.

    A processor knows ``named_tokens``, in place of the other special tokens, by their names.
    """
    import transformers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={each: id for id, each in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([BEGINNING])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BEGINNING} $A", special_tokens=[(BEGINNING, inner.token_to_id(BEGINNING))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BEGINNING,
        pad_token=BEGINNING,
        extra_special_tokens=named_tokens or list(special_tokens),
    )


def idefics3(folder: Path) -> Any:
    """Write a processor that cuts an image into tiles, and return it."""
    import transformers

    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    made = transformers.Idefics3Processor(images, tokenizer(*IDEFICS_TOKENS), image_seq_len=4)
    made.save_pretrained(folder)
    return made


def smolvlm(folder: Path) -> Any:
    """Write a processor of images and videos for SmolVLM, and return it without torchvision."""
    import transformers

    from trioserve.requests.media.processor_loading import load_processor

    tokenizer(*IDEFICS_TOKENS).save_pretrained(folder)
    transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    ).save_pretrained(folder)
    config = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(config))
    return load_processor(folder)


def gemma3(folder: Path) -> Any:
    """Write a processor that puts line breaks around an image, and return it."""
    import transformers

    words = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"}
    words["eoi_token"] = "<end_of_image>"
    made = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer(**words),
        image_seq_length=16,
    )
    made.save_pretrained(folder)
    return made


def llava(folder: Path, side: int = 28, patch: int = 14) -> Any:
    """Write a processor that makes one square of an image, and return it."""
    import transformers

    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    made = transformers.LlavaProcessor(
        images,
        tokenizer("<image>"),
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    made.save_pretrained(folder)
    return made


def llava_onevision(folder: Path) -> Any:
    """Write a processor that cuts an image into tiles of 16 tokens, and return it."""
    import transformers

    from trioserve.requests.media.processor_loading import load_processor

    tokenizer("<image>", "<video>").save_pretrained(folder)
    transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 32, "width": 32}, image_grid_pinpoints=ONEVISION_GRIDS
    ).save_pretrained(folder)
    config = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
    }
    (folder / "processor_config.json").write_text(json.dumps(config))
    return load_processor(folder)


def qwen2_vl(folder: Path, fewest_tokens: int = 1) -> Any:
    """Write a processor of images and videos, and return its part for images."""
    import transformers

    tokenizer(*QWEN_TOKENS).save_pretrained(folder)
    made = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": fewest_tokens * 28 * 28, "longest_edge": 16 * 28 * 28}
    )
    made.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    config = {**json.loads(file.read_text()), "processor_class": "Qwen2VLProcessor"}
    file.write_text(json.dumps(config))
    return made


def phi4(folder: Path) -> Any:
    """Write a processor of images and audio, and return it without torchvision."""
    import transformers

    from trioserve.requests.media.phi4_images import image_processor_class

    made = transformers.Phi4MultimodalProcessor(
        image_processor_class()(),
        transformers.Phi4MultimodalFeatureExtractor(),
        tokenizer(image_token="<|image|>", audio_token="<|audio|>"),
    )
    made.save_pretrained(folder)
    return made


def whisper(folder: Path) -> Any:
    """Write a feature extractor of audio, and return it."""
    import transformers

    made = transformers.WhisperFeatureExtractor(chunk_length=1)
    made.save_pretrained(folder)
    return made
