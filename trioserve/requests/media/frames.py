"""Processing of a video's frames by the part of a model's processor that is for images.

transformers' own part for videos needs torchvision. It runs in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from trioserve.requests.media.videos import Video

_FILES = (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", None))
"""Files that have the settings for videos, and the fields in which they have them, as transformers
looks for them. Without either, the settings are those for images."""
_SETTINGS = frozenset(
    (
        *("do_resize", "size", "max_image_size", "resample", "do_rescale", "rescale_factor"),
        *("do_normalize", "image_mean", "image_std", "do_pad"),
        *("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"),
    )
)
"""Settings for videos that images have as well."""


class FrameProcessor(Protocol):
    """Makes arrays and tokens of a video."""

    token_kind: ClassVar[str]
    """Kind of media whose token the embeddings of frames stand at."""

    def __call__(self, video: Video, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of a video by name, its ``input_ids``, and their ``text`` if it counts.

        Args:
            video: The video.
            arguments: Arguments of the processor.

        Raises:
            Refused: The video is damaged.
        """
        ...


def frame_processor_of(processor: Any, folder: Path) -> FrameProcessor | None:
    """Return that of the processor in a model's folder; None if the model reads no videos."""
    made = _CLASSES.get(type(processor).__name__)
    return None if made is None else made(processor, folder)


class SmolFrameProcessor:
    """Makes arrays and a text of a video for SmolVLM: each frame is an image that isn't split.

    Args:
        processor: The model's processor.
        folder: Its folder.
    """

    token_kind: ClassVar[str] = "image"

    def __init__(self, processor: Any, folder: Path) -> None:
        self._processor = processor
        self._settings = _settings_in(folder)

    def __call__(self, video: Video, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`FrameProcessor.__call__`."""
        from transformers.video_utils import VideoMetadata

        known = {name: value for name, value in arguments.items() if name in _SETTINGS}
        settings = {**self._settings, **known, "do_image_splitting": False}
        times: list[Any] = []
        frames = []
        for seconds, image in video.frames:
            times.append(seconds)
            frames.append(
                self._processor.image_processor(images=[[image]], return_tensors="np", **settings)
            )
        arrays = {name: np.concatenate([each[name] for each in frames], 1) for name in frames[0]}
        # At one frame for each second, the frames' numbers are their times.
        metadata = VideoMetadata(
            total_num_frames=len(times), fps=1, duration=video.duration, frames_indices=times
        )
        text = self._processor.replace_video_token({**arrays, "video_metadata": [metadata]}, 0)
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {**arrays, "text": text, "input_ids": ids}


class QwenFrameProcessor:
    """Makes arrays of a video for Qwen2-VL and Qwen2.5-VL, whose patches are those of pairs.

    The part for images makes the patches of each frame. The names of the arrays are those of
    images, because the tower takes both alike.

    Args:
        processor: The model's processor.
        folder: Its folder.
    """

    token_kind: ClassVar[str] = "video"

    def __init__(self, processor: Any, folder: Path) -> None:
        self._token = processor.video_token_id
        settings = _settings_in(folder)
        images = processor.image_processor
        self._images = type(images)(**settings) if settings else images

    def __call__(self, video: Video, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`FrameProcessor.__call__`. An odd last frame comes twice."""
        depth, patch_size, merge_size = (
            int(arguments.get(name, getattr(self._images, name)))
            for name in ("temporal_patch_size", "patch_size", "merge_size")
        )
        alone = {**arguments, "temporal_patch_size": 1}
        count = 0
        frames: list[Any] = []  # [patches, channels, pixels] of each, those of one pair
        pairs = []
        for _, image in video.frames:
            found = self._images(images=[image], return_tensors="np", **alone)
            grid, patches = found["image_grid_thw"], found["pixel_values"]
            frames.append(patches.reshape(len(patches), -1, patch_size**2))
            count += 1
            if len(frames) == depth:
                pairs.append(np.stack(frames, axis=2))
                frames.clear()
        if frames:
            frames += frames[-1:] * (depth - len(frames))
            pairs.append(np.stack(frames, axis=2))
        grid[0, 0] = len(pairs)
        num_tokens = int(grid.prod()) // merge_size**2
        return {
            "pixel_values": np.concatenate(pairs).reshape(len(pairs) * len(patches), -1),
            "image_grid_thw": grid,
            "second_per_grid_ts": np.array([depth * video.duration / count], np.float32),
            "input_ids": [self._token] * num_tokens,
        }


_CLASSES: Mapping[str, type[SmolFrameProcessor] | type[QwenFrameProcessor]] = {
    "SmolVLMProcessor": SmolFrameProcessor,
    "Qwen2VLProcessor": QwenFrameProcessor,
    "Qwen2_5_VLProcessor": QwenFrameProcessor,
}


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings for videos in a model's folder."""
    for name, field in _FILES:
        if not (folder / name).is_file():
            continue
        values = json.loads((folder / name).read_text())
        found = values if field is None else values.get(field)
        if isinstance(found, dict):
            return {name: value for name, value in found.items() if name in _SETTINGS}
    return {}
