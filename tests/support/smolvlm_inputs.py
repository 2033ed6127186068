"""Inputs of SmolVLM's model for a prompt with images and videos, by transformers' own code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers.video_utils import VideoMetadata

from tests.support.video_files import all_frames
from trioserve import VideoPart
from trioserve.requests.media.videos import frames_taken

NUM_FRAMES = 2


def smolvlm_inputs(processor: Any, text: str, media: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs of the model for a text with ``<image>`` and ``<video>`` in it.

    Videos must have ten frames a second; all of their frames are decoded.
    """
    given = iter(media)
    made: list[Any] = []

    def replaced(match: re.Match[str]) -> str:
        each = next(given)
        if isinstance(each, VideoPart):
            assert isinstance(each.source, bytes)
            every = all_frames(each.source)
            numbers = frames_taken(len(every), len(every) / 10, 2, NUM_FRAMES)
            frames = [every[number][1] for number in numbers]
            inputs = processor.image_processor(
                [frames], return_tensors="pt", do_image_splitting=False
            )
            metadata = VideoMetadata(len(every), 10, None, None, len(every) / 10, None, numbers)
            shown = processor.replace_video_token({**inputs, "video_metadata": [metadata]}, 0)
        else:
            inputs = processor.image_processor(
                [[each]], return_tensors="pt", return_row_col_info=True
            )
            shown = processor.replace_image_token(inputs, 0)
        made.append(inputs)
        return str(shown)

    text = re.sub("<image>|<video>", replaced, text)
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    names = ("pixel_values", "pixel_attention_mask") if made else ()
    return {"input_ids": ids, **{n: torch.cat([each[n] for each in made], 1) for n in names}}
