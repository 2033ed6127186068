"""The options of images, audio and videos in prompts, a part of the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.config.json_object import parse_json_object
from trioserve.config.options import option
from trioserve.protocol.errors import InvalidRequest

MEDIA_KINDS = ("image", "audio", "video")
DEFAULT_COUNTS: Mapping[str, int] = {"image": 8, "audio": 8, "video": 1}
"""Most parts of each kind in a prompt, where ``--limit-mm-per-prompt`` doesn't say."""
_COUNTS = "limit_mm_per_prompt"
PROCESSOR_ARGUMENTS = "mm_processor_kwargs"
READING_ARGUMENTS = "media_io_kwargs"
"""Names of the arguments of processors and of reading, as options and as fields of requests."""
PROCESSOR_EXAMPLE = '{"do_image_splitting": false}'
READING_EXAMPLE = '{"video": {"fps": 2, "num_frames": 32}}'
MAX_FPS = 1000.0
MAX_FRAMES = 1024


@attrs.frozen(kw_only=True)
class FrameSampling:
    """The frames that are taken of a video, evenly from the first to the last one."""

    fps: float = 2.0
    """Most frames for each second."""
    num_frames: int = 32
    """Most frames."""

    def with_arguments(self, given: Mapping[str, Any]) -> FrameSampling:
        """Return this sampling with what ``media_io_kwargs`` of an option or a request say.

        Raises:
            InvalidRequest: They say something else, or a number is out of its range.
        """
        unknown = sorted(given.keys() - {"video"})
        if unknown:
            raise _refuse(f"{READING_ARGUMENTS} has {', '.join(unknown)}; it takes video")
        video = given.get("video", {})
        if not isinstance(video, dict) or video.keys() - {"fps", "num_frames"}:
            raise _refuse(
                f"{READING_ARGUMENTS}: video must be an object with fps and num_frames, "
                f"got {video!r}"
            )
        found = attrs.evolve(self, **video)
        if not _is_number(found.fps) or not 0 < found.fps <= MAX_FPS:
            raise _refuse(
                f"{READING_ARGUMENTS}: fps must be a number above 0 and at most {MAX_FPS:g}, "
                f"got {found.fps!r}"
            )
        if type(found.num_frames) is not int or not 1 <= found.num_frames <= MAX_FRAMES:
            raise _refuse(
                f"{READING_ARGUMENTS}: num_frames must be a whole number from 1 to {MAX_FRAMES}, "
                f"got {found.num_frames!r}"
            )
        return found


@attrs.frozen(kw_only=True)
class MediaOptions:
    """Options of the media in prompts: their limits, and where they may come from.

    Raises:
        InvalidRequest: A value isn't allowed; ``param`` names the option.
    """

    limit_mm_per_prompt: str | None = option(
        None,
        "most images, audio clips and videos in a prompt: a JSON object with image, audio and "
        'video, as in {"image": 4}; 0 refuses all of a kind',
        unset="8 images, 8 audio clips, 1 video",
        group="media",
        page="media#Limits",
        metavar="COUNTS",
    )
    limit_mm_bytes: int = option(
        32 << 20,
        "most bytes of an image, audio clip or video, as it is sent or fetched",
        group="media",
        page="media#Limits",
        kind=int,
        low=1,
        high=1 << 40,
        in_bytes=True,
    )
    limit_mm_pixels: int = option(
        1 << 26,
        "most pixels of an image or a frame of a video, width times height",
        group="media",
        page="media#Limits",
        kind=int,
        low=1,
        high=1 << 32,
    )
    limit_mm_seconds: float = option(
        600.0,
        "longest audio clip or video, in seconds",
        group="media",
        page="media#Limits",
        kind=float,
        above=0,
        high=86400,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "host whose http and https URLs are fetched for media in prompts; may be given several "
        "times; private addresses are refused, whatever the host",
        unset="none",
        group="media",
        page="media#URLs",
        common=True,
        metavar="HOST",
        repeatable=True,
        form=(
            r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?",
            "a host's name or IPv4 address, such as images.example.org",
        ),
    )
    mm_processor_kwargs: str | None = option(
        None,
        f"arguments of the model's processor of media: a JSON object, as in {PROCESSOR_EXAMPLE}",
        unset="the model's own",
        group="media",
        page="media#The processor",
        metavar="ARGUMENTS",
    )
    media_io_kwargs: str | None = option(
        None,
        "frames that are taken of a video, evenly: fps for each second, and num_frames at most; a "
        f"JSON object, as in {READING_EXAMPLE}",
        unset="2 a second, 32 at most",
        group="media",
        page="media#Videos",
        metavar="SAMPLING",
    )

    mm_processor_cache_gb: float = option(
        1.0,
        "memory in GiB for the embeddings of images and audio, which are kept for requests to come",
        group="media",
        page="media#The cache",
        kind=float,
        low=0,
        high=1 << 20,
    )

    def __attrs_post_init__(self) -> None:
        self.most_media()
        self.processor_arguments()
        self.frame_sampling()

    def most_media(self) -> dict[str, int]:
        """Return the most parts of each kind in a prompt."""
        text = self.limit_mm_per_prompt
        given = {}
        if text is not None:
            given = parse_json_object(_COUNTS, text, MEDIA_KINDS, '{"image": 4}')
        for kind, count in given.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InvalidRequest(
                    f"{_COUNTS}: {kind} must be an integer of at least 0, got {count!r}",
                    param=_COUNTS,
                )
        return {**DEFAULT_COUNTS, **given}

    def processor_arguments(self) -> dict[str, Any]:
        """Return the arguments of the processor, which checks their names when it is loaded."""
        text = self.mm_processor_kwargs
        if text is None:
            return {}
        return parse_json_object(PROCESSOR_ARGUMENTS, text, None, PROCESSOR_EXAMPLE)

    def frame_sampling(self) -> FrameSampling:
        """Return which frames of a video are taken."""
        text = self.media_io_kwargs
        if text is None:
            return FrameSampling()
        given = parse_json_object(READING_ARGUMENTS, text, None, READING_EXAMPLE)
        return FrameSampling().with_arguments(given)


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=READING_ARGUMENTS)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
