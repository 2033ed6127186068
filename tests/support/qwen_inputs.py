"""Inputs of Qwen's models for a prompt with images and videos, by transformers' own code."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.video_files import all_frames
from trioserve import VideoPart
from trioserve.requests.media.videos import frames_taken

FPS, NUM_FRAMES = 10, 5
"""Frames that are taken of a video: an odd number, more than a pair."""
MERGE = 2
_TOKEN = re.compile(r"<\|(image|video)_pad\|>")


@functools.cache
def patchify() -> Callable[..., tuple[torch.Tensor, int, int, int]]:
    """Return transformers' function from the pixels of a video to patches.

    Its module needs torchvision, and the function does not.
    """
    found = importlib.util.find_spec("transformers.models.qwen2_vl")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).with_name("video_processing_qwen2_vl.py").read_text()
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "patchify"
    ]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), "patchify", "exec"), names)
    return functools.partial(names["patchify"], None)


def video_inputs(images: Any, frames: Sequence[Any], duration: float) -> dict[str, Any]:
    """Return the inputs for the frames of a video, as transformers' part for videos makes them.

    ``images`` is the processor's part for images, which resizes them here.
    """

    def pixels(frame: Any) -> Any:
        array = np.asarray(frame).transpose(2, 0, 1)
        factor = images.patch_size * images.merge_size
        array = images.resize(array, images.size, images.resample, factor)
        array = images.rescale(array, images.rescale_factor)
        return images.normalize(array, images.image_mean, images.image_std)

    tensor = torch.from_numpy(np.stack([pixels(frame) for frame in frames])).float()[None]
    sizes = images.patch_size, images.merge_size, images.temporal_patch_size
    patches, *grid = patchify()(tensor, *sizes)
    sampled_fps = len(frames) / duration
    return {
        "pixel_values_videos": patches[0],
        "video_grid_thw": torch.tensor([grid]),
        "second_per_grid_ts": torch.tensor([images.temporal_patch_size / sampled_fps]),
    }


def qwen_inputs(processor: Any, text: str, media: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs of the model for a text with the tokens of images and videos in it.

    Videos must have ten frames a second; all of their frames are decoded.
    """
    given = iter(media)
    made: dict[str, list[torch.Tensor]] = {}

    def replaced(match: re.Match[str]) -> str:
        each = next(given)
        if isinstance(each, VideoPart):
            assert isinstance(each.source, bytes)
            every = all_frames(each.source)
            numbers = frames_taken(len(every), len(every) / 10, FPS, NUM_FRAMES)
            frames = [every[number][1] for number in numbers]
            inputs = video_inputs(processor.image_processor, frames, len(every) / 10)
        else:
            inputs = dict(processor.image_processor([each], return_tensors="pt"))
        for name, value in inputs.items():
            made.setdefault(name, []).append(value)
        grid = inputs.get("image_grid_thw", inputs.get("video_grid_thw"))
        return match[0] * (int(grid.prod()) // MERGE**2)

    text = _TOKEN.sub(replaced, text)
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, **{name: torch.cat(values) for name, values in made.items()}}


def qwen_positions(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the rotary positions [3, 1, T] for a model, or one without its head.

    Each image's and video's are transformers' own. Text goes on behind the largest one, as in the
    models' own code.
    """
    config = model.config
    kinds = {config.image_token_id: "image", config.video_token_id: "video"}
    grids = {kind: iter(inputs.get(f"{kind}_grid_thw", ())) for kind in kinds.values()}
    seconds = iter(inputs.get("second_per_grid_ts", ()))
    ids = inputs["input_ids"][0].tolist()
    found: list[torch.Tensor] = []
    first = place = 0
    while place < len(ids):
        kind = kinds.get(ids[place])
        if kind is None:
            part = torch.full((3, 1), first)
        else:
            interval: Any = 1
            if kind == "video" and hasattr(config.vision_config, "tokens_per_second"):
                interval = config.vision_config.tokens_per_second * next(seconds)
            grid = next(grids[kind])
            part = getattr(model, "model", model).get_vision_position_ids(
                first, grid, 1, MERGE, interval
            )
        found.append(part)
        place += part.shape[1]
        first = int(part.max()) + 1
    return torch.cat(found, 1)[:, None]
