"""The image part of Phi-4's processor, computed by Pillow and NumPy.

transformers' own part computes the same arrays by torchvision. An image is resized to a grid of
crops, with white below it or to its right, and the crops come behind a small copy of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_MIN_SIDE = 10
"""Fewest pixels of a side of the resized image."""
_WHITE = 255
_CUBIC_RESAMPLING = 3
"""Pillow's number of cubic interpolation."""
_CUBIC = -0.75
"""Parameter of the cubic kernel, as torch has it."""


def image_processor_class() -> Any:
    """Return a class of image processors with the fields of ``Phi4MultimodalImageProcessor``.

    It imports transformers, so only child processes call it.
    """
    from transformers.feature_extraction_utils import BatchFeature
    from transformers.image_processing_backends import PilBackend
    from transformers.image_utils import PILImageResampling
    from transformers.processing_utils import ImagesKwargs

    class Phi4ImageArguments(ImagesKwargs, total=False):
        """Arguments of a call."""

        patch_size: int
        dynamic_hd: int

    class Phi4MultimodalImageProcessorPil(PilBackend):
        """Image processor of Phi-4; transformers finds it by its name without ``Pil``."""

        valid_kwargs = Phi4ImageArguments
        model_input_names = ["image_pixel_values", "image_sizes", "image_attention_mask"]  # noqa: RUF012
        resample = PILImageResampling.BICUBIC
        size = {"height": 448, "width": 448}  # noqa: RUF012
        patch_size = 14
        dynamic_hd = 36
        image_mean = (0.5, 0.5, 0.5)
        image_std = (0.5, 0.5, 0.5)
        do_rescale = True
        do_normalize = True
        do_convert_rgb = True

        def _preprocess(  # type: ignore[override]  # transformers gives all by their names
            self, images: list[Pixels], *, return_tensors: str | None, **settings: Any
        ) -> BatchFeature:
            return BatchFeature(data=arrays_of(images, settings), tensor_type=return_tensors)

    return Phi4MultimodalImageProcessorPil


def arrays_of(images: Sequence[Pixels], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of images [3, height, width], as transformers names them.

    Args:
        images: The images.
        settings: ``size``, ``resample``, ``patch_size``, ``dynamic_hd`` (most crops), and those of
            the numbers that the tower takes.

    Raises:
        ValueError: An image is too long for its width, the size isn't a square, or the small copy
            isn't to be resized by cubic interpolation.
    """
    side = settings["size"].height
    if side is None or side != settings["size"].width:
        raise ValueError("the size has to be a square")
    if settings["resample"] != _CUBIC_RESAMPLING:
        raise ValueError(f"resample has to be {_CUBIC_RESAMPLING}")
    found = [_crops_of(image, side, settings) for image in images]
    most = max(len(crops) for crops, _, _ in found)
    # Crops that a smaller image doesn't have are black, and its tower leaves them out.
    return {
        "image_pixel_values": np.stack([_padded(crops, most, 0) for crops, _, _ in found]),
        "image_sizes": np.array([[rows * side, columns * side] for _, _, (rows, columns) in found]),
        "image_attention_mask": np.stack([_padded(mask, most, 1) for _, mask, _ in found]),
        "num_img_tokens": np.array([_count_tokens(mask, grid) for _, mask, grid in found]),
    }


def _crops_of(
    image: Pixels, side: int, settings: Mapping[str, Any]
) -> tuple[Floats, Floats, tuple[int, int]]:
    """Return the crops [n, 3, side, side], their patches' masks, and the grid of all but one.

    The first crop is a small copy of the whole. A mask is 0 for a patch of nothing but white.
    """
    import PIL.Image

    patch = settings["patch_size"]
    height, width = image.shape[1:]
    rows, columns = grid_of(height, width, side, settings["dynamic_hd"])
    target = (rows * side, columns * side)
    down, across = target[0] / height, target[1] / width
    resized = (int(height * across), target[1])
    if across >= down:
        resized = (target[0], int(width * down))
    if min(resized) < _MIN_SIDE:
        raise ValueError(f"the aspect ratio of {width} x {height} pixels is too extreme")
    pixels = np.full((*target, 3), _WHITE, np.uint8)
    picture = PIL.Image.fromarray(np.moveaxis(image, 0, -1))
    bilinear = picture.resize(resized[::-1], PIL.Image.Resampling.BILINEAR)
    pixels[: resized[0], : resized[1]] = np.asarray(bilinear)
    mask = np.ones((rows * (side // patch), columns * (side // patch)), np.float32)
    below, beside = ((target[axis] - resized[axis]) // patch for axis in (0, 1))
    mask[len(mask) - below :] = 0
    mask[:, mask.shape[1] - beside :] = 0
    numbers = _normalized(np.moveaxis(pixels, -1, 0), settings)
    crops = np.concatenate([_shrunk(numbers, side)[None], _split(numbers, side)])
    whole = np.ones((1, 1, side // patch, side // patch), np.float32)
    masks = np.concatenate([whole, _split(mask[None], side // patch)])[:, 0]
    return crops, masks, (rows, columns)


def _normalized(pixels: Pixels, settings: Mapping[str, Any]) -> Floats:
    """Return pixels [3, height, width] as the tower takes them."""
    factor = settings["rescale_factor"] if settings["do_rescale"] else 1.0
    numbers = pixels.astype(np.float32)
    if not settings["do_normalize"]:
        return numbers * np.float32(factor)
    mean, std = (
        np.array(settings[name], np.float32)[:, None, None] * np.float32(1.0 / factor)
        for name in ("image_mean", "image_std")
    )
    found: Floats = (numbers - mean) / std
    return found


def grid_of(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of an image's crops, at most ``most`` of them.

    They cover the image as it is. If they were too many, they are those of the nearest shape. Of
    grids of equal shape, a larger one is taken if the image fills at least half of it.
    """
    rows, columns = math.ceil(height / side), math.ceil(width / side)
    if rows * columns <= most:
        return rows, columns
    grids = {(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)}
    shape, found, nearest = width / height, (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid)):
        distance = abs(shape - columns / rows)
        is_filled = width * height > 0.5 * side * side * columns * rows
        if distance < nearest or (distance == nearest and is_filled):
            found, nearest = (rows, columns), distance
    return found


def _count_tokens(mask: Floats, grid: tuple[int, int]) -> int:
    """Return the number of an image's tokens.

    Each is of 2 x 2 patches of the tower, and one more ends a line. The whole has 16 lines of 16,
    and a token behind them.
    """
    halved = mask[1:, ::2, ::2]
    first_columns = halved[:: grid[1], :, 0]
    return 16 * 17 + 1 + int(halved.sum()) + int(first_columns.sum())


def _padded(crops: Floats, most: int, number: int) -> Floats:
    """Return ``crops`` filled up to ``most``; added ones hold ``number``."""
    added = np.full((most - len(crops), *crops.shape[1:]), number, np.float32)
    return np.concatenate([crops, added])


def _split(image: Floats, side: int) -> Floats:
    """Return the crops [n, channels, side, side] of an image, row by row."""
    channels, height, width = image.shape
    rows, columns = height // side, width // side
    parts = image.reshape(channels, rows, side, columns, side)
    return parts.transpose(1, 3, 0, 2, 4).reshape(-1, channels, side, side)


def _shrunk(image: Floats, side: int) -> Floats:
    """Return an image [channels, side, side] by cubic interpolation, down and across.

    Unlike Pillow's, it doesn't average, however much smaller the image becomes.
    """
    for axis in (1, 2):
        length = image.shape[axis]
        places = (np.arange(side) + 0.5) * (length / side) - 0.5
        first = np.floor(places)
        shrunk = np.zeros_like(np.take(image, np.zeros(side, np.int64), axis))
        for offset in (-1, 0, 1, 2):
            weights = _cubic_weight(np.abs(places - first - offset)).astype(np.float32)
            taken = np.clip(first + offset, 0, length - 1).astype(np.int64)
            along = [1, 1, 1]
            along[axis] = side
            shrunk += np.take(image, taken, axis) * weights.reshape(along)
        image = shrunk
    return image


def _cubic_weight(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weights of pixels by their distances (Keys 1981)."""
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _CUBIC - 4 * _CUBIC
    return np.where(distance <= 1, near, far)
