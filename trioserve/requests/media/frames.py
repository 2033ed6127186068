"""Processing of a video's frames by the part of a model's processor that is for images.

transformers' own part for videos needs torchvision. It runs in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trioserve.requests.media.videos import Video

_CLASS = "SmolVLMProcessor"
_FILES = (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", None))
"""Files that have the settings for videos, and the fields in which they have them, as transformers
looks for them. Without either, the settings are those for images."""
_SETTINGS = frozenset(
    (
        *("do_resize", "size", "max_image_size", "resample", "do_rescale", "rescale_factor"),
        *("do_normalize", "image_mean", "image_std", "do_pad"),
    )
)
"""Settings for videos that images have as well."""


class FrameProcessor:
    """Makes arrays and a text of a video for SmolVLM: each frame is an image that isn't split.

    Args:
        processor: The model's processor.
        folder: Its folder.
        arguments: Arguments for each call (``--mm-processor-kwargs``).
    """

    def __init__(self, processor: Any, folder: Path, arguments: Mapping[str, Any]) -> None:
        self._processor = processor
        known = {name: value for name, value in arguments.items() if name in _SETTINGS}
        self._settings = {**_settings_in(folder), **known, "do_image_splitting": False}

    @classmethod
    def of(
        cls, processor: Any, folder: Path, arguments: Mapping[str, Any]
    ) -> FrameProcessor | None:
        """Return that of a processor; None if its model reads no videos."""
        return cls(processor, folder, arguments) if type(processor).__name__ == _CLASS else None

    def __call__(self, video: Video) -> dict[str, Any]:
        """Return the arrays of a video by name, its ``text``, and the text's ``input_ids``.

        Raises:
            Refused: The video is damaged.
        """
        from transformers.video_utils import VideoMetadata

        times: list[Any] = []
        frames = []
        for seconds, image in video.frames:
            times.append(seconds)
            frames.append(
                self._processor.image_processor(
                    images=[[image]], return_tensors="np", **self._settings
                )
            )
        arrays = {name: np.concatenate([each[name] for each in frames], 1) for name in frames[0]}
        # At one frame for each second, the frames' numbers are their times.
        metadata = VideoMetadata(
            total_num_frames=len(times), fps=1, duration=video.duration, frames_indices=times
        )
        text = self._processor.replace_video_token({**arrays, "video_metadata": [metadata]}, 0)
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {**arrays, "text": text, "input_ids": ids}


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
