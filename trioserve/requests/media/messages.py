"""Messages between the server and the processes that read media."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Encoding = Literal["bytes", "base64", "path", "pixels", "samples"]
"""Form of a job's payload: a file's bytes, its base64, its path, or what is decoded already."""


class MediaSetup(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The limits of all jobs to come, and the processor that they use.

    Attributes:
        max_bytes: Most bytes of a file.
        max_pixels: Most pixels of an image or a frame.
        max_seconds: Longest audio clip or video, in seconds.
        num_frames: Most frames that are taken of a video, where its job doesn't say.
        processor_folder: Folder of the model whose processor is used; empty for none.
        processor_arguments: Arguments of the processor, where a job has no others.
    """

    max_bytes: int
    max_pixels: int
    max_seconds: float
    num_frames: int
    processor_folder: str
    processor_arguments: dict[str, Any]


class MediaJob(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A part to read; its payload follows the message.

    Attributes:
        kind: Kind of the part; empty asks for nothing but whether the processor works.
        encoding: Form of the payload.
        is_processed: False to return what is decoded, as it would be without a processor.
        size: Bytes of the payload.
        arguments: Arguments of the processor for this part, over those of the setup.
        max_array_bytes: Most bytes of its arrays; 0 for as many as there are.
        fps: Most frames that are taken for each second of a video.
        num_frames: Most frames that are taken of a video.
        mode: Mode of decoded pixels.
        width: Width of decoded pixels.
        height: Height of decoded pixels.
    """

    kind: str
    encoding: Encoding = "bytes"
    is_processed: bool = True
    size: int = 0
    arguments: dict[str, Any] = {}
    max_array_bytes: int = 0
    fps: float = 0.0
    num_frames: int = 0
    mode: str = ""
    width: int = 0
    height: int = 0


class ArrayLayout(msgspec.Struct, array_like=True, frozen=True):
    """An array in shared memory, in C order; arrays follow each other without gaps.

    Attributes:
        name: Name of the array.
        dtype: NumPy's name of its numbers' format.
        shape: Its lengths.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class MediaAnswer(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The result of a job, whose arrays are in shared memory.

    Attributes:
        error: Reason for which the part is refused; empty if it isn't.
        is_about_arguments: True if the reason is the job's arguments.
        failure: Reason for which the processor can't be loaded; empty if it can.
        digest: Hash of the content.
        token_ids: Tokens in place of the part.
        num_placeholder_tokens: Number of them whose embeddings come from the arrays.
        text: Text that the tokens are of, if what stands beside it in a prompt changes them.
        arrays: Arrays.
        argument_names: Names of arguments that the processor takes; in the answer to a job without
            a part.
    """

    error: str = ""
    is_about_arguments: bool = False
    failure: str = ""
    digest: bytes = b""
    token_ids: list[int] = []
    num_placeholder_tokens: int = 0
    text: str = ""
    arrays: list[ArrayLayout] = []
    argument_names: list[str] = []
