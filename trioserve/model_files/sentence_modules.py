"""The files of sentence-transformers beside a model: the steps after its hidden states.

``modules.json`` lists the steps and their folders: the transformer, a pooling, and optionally
linear layers and a normalization. Old and new spellings of fields are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs

from trioserve.model_files.encoder_config import Activation, Dense, Pooling
from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import read_array, read_object
from trioserve.protocol.errors import ModelLoadError

MODULES = "modules.json"
_MAX_DENSE = 16
_FOLDER = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)
_STEPS = re.compile(r"Transformer(,Pooling(,Dense)*(,Normalize)?)?")
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "max": "max"}
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "GELU": "gelu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "Tanh": "tanh",
}


@attrs.frozen(kw_only=True)
class SentenceModules:
    """The steps after the transformer. ``pooling`` is None if there are none."""

    pooling: Pooling | None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False


def read_sentence_modules(folder: Path, hidden_size: int) -> SentenceModules | None:
    """Return the steps of the model in ``folder``; None without a modules.json.

    ``hidden_size`` is the size of the transformer's hidden states.

    Raises:
        ModelLoadError: A file is missing or damaged, or a step isn't supported.
    """
    path = folder / MODULES
    if not path.exists():
        return None
    steps = [_step(path, entry) for entry in read_array(path)]
    names = ",".join(name for name, _ in steps)
    if not _STEPS.fullmatch(names) or len(steps) > _MAX_DENSE:
        raise ModelLoadError(
            f"{path}: the steps {names or 'of nothing'} aren't served; "
            "Transformer,Pooling,Dense,Normalize are"
        )
    if steps[0][1]:
        raise ModelLoadError(
            f"{path} has the transformer in {steps[0][1]!r}, which isn't served: "
            "move its files to the model's folder"
        )
    if len(steps) == 1:
        return SentenceModules(pooling=None)
    pooling = _pooling(folder / steps[1][1] / "config.json", hidden_size)
    dense: list[Dense] = []
    size = hidden_size
    for name, place in steps[2:]:
        if name == "Dense":
            dense.append(_dense(folder, place, size))
            size = dense[-1].out_features
    return SentenceModules(
        pooling=pooling, dense=tuple(dense), normalize=steps[-1][0] == "Normalize"
    )


def activation_of_class(fields: Fields, name: str, default: Activation) -> Activation:
    """Return the activation in a field, which is the path of a class of torch.

    Raises:
        ModelLoadError: The class isn't supported.
    """
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise fields.error(name, value)
    known = value.startswith("torch.nn.modules.") and _ACTIVATIONS.get(value.rpartition(".")[2])
    if not known:
        raise ModelLoadError(f"{fields.path}: {name} {value!r} isn't served")
    return known


def _step(path: Path, entry: Any) -> tuple[str, str]:
    """Return a step's class name and folder."""
    kind, place = (
        (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    )
    if not isinstance(kind, str) or not isinstance(place, str):
        raise ModelLoadError(f"{path} has a step without type and path: fetch it again")
    if not kind.startswith("sentence_transformers."):
        raise ModelLoadError(f"{path}: the step {kind} is code of its own, which isn't served")
    if place and not _FOLDER.fullmatch(place):
        raise ModelLoadError(f"{path} has path = {place!r}, which names no folder beside it")
    return kind.rpartition(".")[2], place


def _pooling(path: Path, hidden_size: int) -> Pooling:
    fields = Fields(path, read_object(path), {})
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if fields.integer(name, hidden_size) != hidden_size:
            raise ModelLoadError(
                f"{path} has {name} = {fields.get(name)}, and the model's hidden_size is "
                f"{hidden_size}: they don't belong together"
            )
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_POOLINGS.items() if fields.flag(name)] or ["mean"]
    if isinstance(modes, list) and len(modes) == 1:
        modes = modes[0]
    if not isinstance(modes, str) or modes not in _POOLINGS:
        known = ", ".join(_POOLINGS)
        raise ModelLoadError(f"{path}: pooling_mode {modes!r} isn't served; {known} are")
    return _POOLINGS[modes]


def _dense(folder: Path, place: str, size: int) -> Dense:
    path = folder / place / "config.json"
    fields = Fields(path, read_object(path), {})
    in_features = fields.integer("in_features")
    if in_features != size:
        raise ModelLoadError(
            f"{path} has in_features = {in_features}, and {size} numbers come out of the step "
            "before: they don't belong together"
        )
    for name in ("module_input_name", "module_output_name"):
        if fields.get(name) not in (None, "sentence_embedding"):
            raise ModelLoadError(f"{path}: {name} {fields.get(name)!r} isn't served")
    if fields.flag("use_residual"):
        raise ModelLoadError(f"{path}: use_residual isn't served")
    return Dense(
        folder=place,
        in_features=in_features,
        out_features=fields.integer("out_features"),
        bias=fields.get("bias") is None or fields.flag("bias"),
        activation=activation_of_class(fields, "activation_function", "tanh"),
    )
