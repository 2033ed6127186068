"""The model's processor of media, as transformers has it: tokens and arrays of a part.

It runs in a child process, which alone imports transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trioserve.config.media import PROCESSOR_ARGUMENTS
from trioserve.protocol.errors import ModelLoadError
from trioserve.requests.media.audio import DEFAULT_RATE, Samples
from trioserve.requests.media.frames import frame_processor_of
from trioserve.requests.media.processor_arguments import (
    ArrayForms,
    Arrays,
    KnownArguments,
    PartArguments,
    shown_error,
    unknown_arguments,
)
from trioserve.requests.media.processor_loading import load_processor
from trioserve.requests.media.refusals import ArgumentsRefused, Refused
from trioserve.requests.media.videos import Video

if TYPE_CHECKING:
    from PIL.Image import Image

_OF_TEXT = frozenset(
    (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "text_replacement_offsets",
        "text",
    )
)
"""Entries of a processor's result that belong to the text."""
_TRIAL_SIZE = (64, 64)
NOTHING_ASKED = PartArguments()


@attrs.frozen
class ProcessedPart:
    """The result of a processor.

    Attributes:
        token_ids: Tokens that stand for the part in a prompt.
        num_placeholder_tokens: Number of them whose embeddings come from the arrays.
        arrays: Arrays by name, with the processor's batch dimension of 1.
        text: Text that the tokens are of, if what stands beside it in a prompt changes them.
    """

    token_ids: list[int]
    num_placeholder_tokens: int
    arrays: Arrays
    text: str = ""


class MediaProcessor:
    """The processor in a model's folder. Code in the folder is never run.

    Args:
        folder: The folder.
        arguments: Arguments for each call (``--mm-processor-kwargs``).

    Raises:
        ModelLoadError: There is no processor of media, transformers can't load it, or an argument
            isn't one of its own.
    """

    def __init__(self, folder: str, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._processor = load_processor(Path(folder))
        self._extractor: Any = getattr(self._processor, "feature_extractor", None)
        if self._extractor is None:
            self._extractor = getattr(self._processor, "audio_processor", None)
        if self._extractor is None and hasattr(self._processor, "sampling_rate"):
            self._extractor = self._processor
        self.reads_images = hasattr(self._processor, "image_processor") or hasattr(
            self._processor, "image_mean"
        )
        self._frames = frame_processor_of(self._processor, Path(folder))
        if not self.reads_images and self._extractor is None:
            raise ModelLoadError(f"the processor in {folder} is none of images or audio")
        self._known = KnownArguments(self._processor, self.reads_images, self._extractor)
        if error := unknown_arguments(arguments, self._known.names):
            raise ModelLoadError(error)
        self._forms: dict[str, ArrayForms] = {}
        """Forms of the arrays of each kind of media."""
        self._try(folder)

    @property
    def sample_rate(self) -> int:
        """Sample rate of audio that the processor takes, in Hz."""
        return int(getattr(self._extractor, "sampling_rate", DEFAULT_RATE))

    @property
    def argument_names(self) -> frozenset[str]:
        """Names of the arguments that a request may give."""
        return self._known.request_names

    def check(self, asked: PartArguments) -> None:
        """Refuse a request's arguments of unknown names or wrong types.

        Raises:
            ArgumentsRefused: There is one.
        """
        self._known.check_values(asked.given)

    def of_image(self, image: Image, asked: PartArguments = NOTHING_ASKED) -> ProcessedPart:
        """Return the result for an RGB image.

        Raises:
            Refused: The processor refuses it, or reads no images.
        """
        if not self.reads_images:
            raise Refused("the model reads no images")
        return self._call("image", {"images": [image]}, {}, asked)

    def of_audio(self, samples: Samples, asked: PartArguments = NOTHING_ASKED) -> ProcessedPart:
        """Return the result for samples of :attr:`sample_rate`.

        Raises:
            Refused: The processor refuses them, or reads no audio.
        """
        if self._extractor is None:
            raise Refused("the model reads no audio")
        rate = {"sampling_rate": self.sample_rate}
        if getattr(self._processor, "audio_token", None) is None:
            return self._result(
                lambda given: self._extractor(samples, return_tensors="np", **rate, **given),
                "audio",
                asked,
            )
        self._check_seconds(len(samples) / self.sample_rate)
        # The processors of some families make torch's tensors only.
        return self._call("audio", {"audio": [samples]}, {**rate, "return_tensors": "pt"}, asked)

    def _check_seconds(self, seconds: float) -> None:
        """Refuse a clip that the processor would cut."""
        window = getattr(self._extractor, "chunk_length", math.inf)
        most = float(getattr(self._processor, "max_audio_len", window))
        if seconds > most:
            raise Refused(f"the audio has {seconds:.1f} seconds, and the model hears {most:g}")

    def of_video(self, video: Video, asked: PartArguments = NOTHING_ASKED) -> ProcessedPart:
        """Return the result for a video.

        Raises:
            Refused: The video is damaged, the processor refuses it, or reads no videos.
        """
        frames = self._frames
        if frames is None:
            raise Refused("the model reads no videos")
        return self._result(lambda given: frames(video, given), "video", asked, frames.token_kind)

    def _call(
        self, kind: str, media: dict[str, Any], more: dict[str, Any], asked: PartArguments
    ) -> ProcessedPart:
        tokenizer = getattr(self._processor, "tokenizer", None)
        given = {**media, "return_tensors": "np", **more}
        token = getattr(self._processor, f"{kind}_token", None)
        if tokenizer is None or token is None:
            return self._result(lambda added: self._processor(**{**given, **added}), kind, asked)
        given |= {"text": token, "add_special_tokens": False}
        if hasattr(self._processor, "full_image_sequence"):
            # Gemma 3 has line breaks around an image, which become tokens with what is beside them.
            given["return_text_replacement_offsets"] = True
        found = self._result(lambda added: self._processor(**{**given, **added}), kind, asked)
        if not found.num_placeholder_tokens:
            raise Refused(f"the {kind} is too short or too small for the model")
        return found

    def _result(
        self,
        call: Callable[[Mapping[str, Any]], Any],
        kind: str,
        asked: PartArguments,
        token_kind: str = "",
    ) -> ProcessedPart:
        """Return the result of a call with the arguments of the option and of the request."""
        try:
            found = call({**self._arguments, **asked.given})
            ids = [int(each) for each in np.asarray(found.get("input_ids", ())).reshape(-1)]
            arrays = {
                name: np.asarray(value) for name, value in found.items() if name not in _OF_TEXT
            }
        except (MemoryError, Refused):
            raise
        except Exception as error:  # Processors check their inputs in many ways.
            reason = f"the model's processor refuses the {kind}"
            if asked.given and self._takes(call):
                raise ArgumentsRefused(f"{reason} with {asked}: {shown_error(error)}") from error
            raise Refused(f"{reason}: {error}") from error
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                raise Refused(f"the model's processor gives no numbers for {name}")
        if asked:
            self._forms[kind].check(arrays, asked)
        token = self._placeholder_id(token_kind or kind)
        replaced = found.get("text_replacement_offsets")
        text = replaced[0][0]["replacement"] if replaced else found.get("text", "")
        return ProcessedPart(ids, ids.count(token), arrays, text)

    def _takes(self, call: Callable[[Mapping[str, Any]], Any]) -> bool:
        """Return True if the processor takes a part without the request's arguments."""
        try:
            call(self._arguments)
        except MemoryError:
            raise
        except Exception:  # The part itself is refused.
            return False
        return True

    def _placeholder_id(self, kind: str) -> int:
        """Return the token whose embeddings come from the arrays, -1 without one."""
        # Some families (Gemma 3) have one token in texts and another one in its expansion.
        tokenizer = getattr(self._processor, "tokenizer", None)
        for owner in (tokenizer, self._processor):
            found = getattr(owner, f"{kind}_token_id", None)
            if found is not None:
                return int(found)
        return -1

    def _try(self, folder: str) -> None:
        """Process something small of each kind, so that arguments of wrong types are found at once.

        The forms of its arrays are kept.
        """
        import PIL.Image

        image = PIL.Image.new("RGB", _TRIAL_SIZE)
        found = {}
        try:
            if self.reads_images:
                found["image"] = self.of_image(image)
            if self._frames is not None:
                found["video"] = self.of_video(Video(0.0, iter([(0.0, image)])))
            if self._extractor is not None:
                found["audio"] = self.of_audio(np.zeros(self.sample_rate, np.float32))
        except Refused as error:
            raise ModelLoadError(
                f"the processor in {folder} fails with {PROCESSOR_ARGUMENTS} {self._arguments}: "
                f"{error}"
            ) from error
        self._forms = {kind: ArrayForms.of(part.arrays) for kind, part in found.items()}
