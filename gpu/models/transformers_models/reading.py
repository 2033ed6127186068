"""Loads a model from its folder with transformers' classes, and without the folder's code."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.loading.loaded_model import OnProgress
from gpu.models.transformers_models import interface
from gpu.models.transformers_models.probing import refusal
from trioserve.model_files.media_config import text_tensor
from trioserve.model_files.shards import read_shards
from trioserve.protocol.errors import ModelLoadError

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Supported kinds of layers, by their names in configurations."""
LOOK_SECONDS = 0.5
_BEHIND_TOWER = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
}
"""Names of a decoder's tensors behind a tower, and those without one."""


def version() -> str:
    """Return the version of transformers."""
    import transformers

    return str(transformers.__version__)


def read_model(
    folder: Path,
    architecture: str,
    dtype: torch.dtype,
    on_progress: OnProgress,
    *,
    has_tower: bool = False,
) -> Any:
    """Return the model in evaluation mode. Code in its folder is never run.

    With ``has_tower``, the folder's model is another class that has a tower before this one.

    Raises:
        ModelLoadError: transformers doesn't have the class, the class isn't supported, or the files
            don't fit it.
    """
    import transformers

    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ModelLoadError(
            f"transformers {version()} has no {architecture}: a newer one may, and code that "
            "comes with a model isn't run"
        )
    if (folder / "adapter_config.json").exists():
        # transformers would load the base model's weights and add the adapter.
        raise refusal(architecture, f"comes with an adapter in {folder}: merge the two")
    safely = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **safely)
    if has_tower:
        config = config.get_text_config()
    _refuse_class(model_class, config)
    numbers = sum(
        math.prod(shape) for each in read_shards(folder) for shape in each.shapes.values()
    )
    with reporting_growth(numbers * dtype.itemsize, on_progress):
        model, found = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=interface.NAME,
            use_safetensors=True,
            output_loading_info=True,
            key_mapping=_BEHIND_TOWER if has_tower else None,
            **safely,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(name for name in map(str, found[kind]) if not has_tower or text_tensor(name))
        if names:
            raise ModelLoadError(
                f"{folder} doesn't fit {architecture} of transformers {version()}: "
                f"{len(names)} {kind.replace('_keys', '')} tensors, such as {names[0]}"
            )
    return model.eval()


def _refuse_class(model_class: Any, config: Any) -> None:
    """Refuse an unsupported class before its weights are read."""
    name = model_class.__name__
    if not getattr(model_class, "_supports_attention_backend", False):
        raise refusal(name, "doesn't ask for its attention by name (_supports_attention_backend)")
    if not isinstance(config, model_class.config_class):
        raise refusal(name, f"comes with a configuration of {config.model_type}")
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - SERVED_LAYERS
    if kinds:
        raise refusal(name, f"has layers of {', '.join(sorted(kinds))}, which aren't kept in pages")


@contextlib.contextmanager
def reporting_growth(total: int, on_progress: OnProgress) -> Iterator[None]:
    """Report the growth of the process's memory in the block as progress, out of ``total`` bytes.

    Transformers reports none, and the engine takes a worker without progress for hung. If memory
    doesn't grow, nothing is reported. Another thread calls ``on_progress`` while the block runs.
    """
    ended = threading.Event()
    before = most = _resident_bytes()

    def look() -> None:
        nonlocal most
        while not ended.wait(LOOK_SECONDS):
            now = _resident_bytes()
            if now > most:
                most = now
                on_progress("weights", min(now - before, total - 1), total)

    on_progress("weights", 0, total)
    thread = threading.Thread(target=look, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    on_progress("weights", total, total)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
