"""Loading of a model's processor by transformers. Code in the model's folder is never run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trioserve.protocol.errors import ModelLoadError
from trioserve.requests.media.phi4_images import image_processor_class

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of processors; without one of them, transformers would find a tokenizer at most."""
_PHI4 = "Phi4MultimodalProcessor"
"""Class of Phi-4's processor, whose part for images needs torchvision."""
_SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_processor(folder: Path) -> Any:
    """Return the processor in a model's folder.

    Raises:
        ModelLoadError: There is none, or transformers can't load it.
    """
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise ModelLoadError(
            f"the model in {folder} reads no media: it has none of {', '.join(PROCESSOR_FILES)}"
        )
    try:
        import transformers

        if _class_name(folder) == _PHI4:
            return _load_phi4(folder)
        auto: Any = transformers.AutoProcessor
        try:
            return auto.from_pretrained(folder, **_SAFELY)
        except ImportError:
            if find_spec("torchvision") is not None:
                raise
            return _load_without_videos(folder)
    except MemoryError:
        raise
    except Exception as error:  # transformers raises many kinds for damaged files.
        raise ModelLoadError(f"the processor in {folder} can't be loaded: {error}") from error


def _load_without_videos(folder: Path) -> Any:
    """Return a processor of images and videos without its part for videos.

    That part alone needs torchvision, and transformers has no way to leave it out.

    Raises:
        ImportError: The processor has no such part.
    """
    import transformers

    base: Any = getattr(transformers, _class_name(folder), None)
    if base is None or "video_processor" not in base.get_attributes():
        raise ImportError("it needs a library that isn't installed")
    loaders: dict[str, Any] = {
        "image_processor": transformers.AutoImageProcessor,
        "tokenizer": transformers.AutoTokenizer,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    parts = [
        None if name == "video_processor" else loaders[name].from_pretrained(folder, **_SAFELY)
        for name in base.get_attributes()
    ]

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else base.check_argument_for_proper_class(self, name, part)

    made: Any = type(base.__name__, (base,), {"check_argument_for_proper_class": check})
    config, _ = base.get_processor_dict(folder, **_SAFELY)
    return made.from_args_and_dict(parts, config)


def _load_phi4(folder: Path) -> Any:
    """Return Phi-4's processor with a part for images that doesn't need torchvision.

    It is taken where torchvision is installed, too, so that an image has the same tokens anywhere.
    """
    import transformers

    base: Any = transformers.Phi4MultimodalProcessor
    audio: Any = transformers.AutoFeatureExtractor
    config, _ = base.get_processor_dict(folder, **_SAFELY)
    parts = [
        image_processor_class().from_pretrained(folder, **_SAFELY),
        audio.from_pretrained(folder, **_SAFELY),
        transformers.AutoTokenizer.from_pretrained(folder, **_SAFELY),
    ]
    return base.from_args_and_dict(parts, config)


def _class_name(folder: Path) -> str:
    """Return the name of the processor's class in its files; empty if they don't say it."""
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text()).get("processor_class")
            if isinstance(found, str):
                return found
    return ""
