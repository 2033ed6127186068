"""Numbers that transformers' own image part of Phi-4 gives, which needs torchvision.

The tests' environment has no torchvision. Where there is one that fits,
``python -m tests.support.phi4_images`` writes the numbers anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from tests.support.media_files import noise

FILE = Path(__file__).with_name("phi4_images.json")
SIZES = ((40, 30), (30, 70), (448, 448), (500, 300), (1000, 900), (2000, 40), (100, 101))
CROPPED = ((3000, 1200), 6)
"""Size of an image that is too large for the grid that covers it, and its most crops."""
NUM_PLACES = 12


def pictures() -> list[tuple[PIL.Image.Image, dict[str, int]]]:
    """Return images, each with the arguments of its call."""
    found: list[tuple[PIL.Image.Image, dict[str, int]]] = [(noise(*size), {}) for size in SIZES]
    size, most = CROPPED
    return [*found, (noise(*size), {"dynamic_hd": most})]


def facts_of(arrays: Any) -> dict[str, Any]:
    """Return numbers of an image's arrays: pixels at random places of each crop, and sums."""
    pixels, mask = arrays["image_pixel_values"][0], arrays["image_attention_mask"][0]
    places = np.random.default_rng(len(pixels)).integers(0, pixels.shape[-1], (NUM_PLACES, 2))
    return {
        "sizes": arrays["image_sizes"].tolist(),
        "pixels": np.round(pixels[:, :, places[:, 0], places[:, 1]], 4).tolist(),
        "means": np.round(pixels.mean((1, 2, 3), np.float64), 5).tolist(),
        "masks": [mask.sum(axis).astype(int).tolist() for axis in (1, 2)],
    }


def main() -> None:
    """Write the numbers."""
    import transformers

    images: Any = transformers.Phi4MultimodalImageProcessor()
    found = []
    for picture, arguments in pictures():
        arrays = images([picture], return_tensors="np", **arguments)
        facts = facts_of(arrays)
        found.append({**facts, "num_tokens": int(arrays["num_img_tokens"][0])})
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
