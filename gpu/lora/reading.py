"""PEFT adapters on disk: adapter_config.json and adapter_model.safetensors, checked and read.

The names and shapes of all tensors are known from the model and the configuration, so nothing is
allocated that they don't account for, whatever a file says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from gpu.lora.config import LoraConfig
from gpu.weights.blocks import BFLOAT16, FLOAT16, FLOAT32, Numbers
from gpu.weights.expected import expected_tensors
from gpu.weights.fused import FUSED_MODULES, in_rotated_order
from gpu.weights.packed_modules import PACKED_MODULES
from gpu.weights.reading import check_finite, read_bytes
from trioserve.model_files import ModelConfig
from trioserve.model_files.peft_files import (
    CONFIG_NAME,
    read_adapter_config,
    read_adapter_header,
)
from trioserve.model_files.shards import Shard
from trioserve.protocol.errors import ModelLoadError

_NAME = re.compile(
    r"base_model\.model\.(model\.layers\.(\d{1,6})\.(self_attn\.(?:[qkvo]|qkv)_proj|"
    r"mlp\.(?:gate|up|down|gate_up)_proj))\.lora_([AB])\.weight",
    re.ASCII,
)
_OF_EXPERTS = re.compile(r"\.(block_sparse_moe|mlp\.experts|mlp\.gate)\.")
_PARTS = [part for parts in (*PACKED_MODULES.values(), FUSED_MODULES) for part in parts]
_SPLIT = {part for parts in FUSED_MODULES.values() for part in parts}
"""Parts of a layer that have one matrix together in Phi 3."""
_DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}


@attrs.frozen(eq=False)
class LowRankUpdate:
    """The update of one projection W: ``scale * b @ a``. Both are bfloat16 or float32."""

    a: Numbers  # [rank, inputs]
    b: Numbers  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        """The rank of its matrices."""
        return len(self.a)


@attrs.frozen(eq=False, kw_only=True)
class LoraWeights:
    """The updates of an adapter, by layer and part, such as ``mlp.up_proj``."""

    updates: Mapping[tuple[int, str], LowRankUpdate]
    checksum: str
    """Checksum of both files, in hexadecimal."""

    @property
    def rank(self) -> int:
        """The largest rank of its updates."""
        return max(update.rank for update in self.updates.values())


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> LoraWeights:
    """Read the adapter in ``folder`` for a model of this shape.

    Raises:
        ModelLoadError: the files are missing, damaged, another model's, or hold what isn't served;
            one line says what and names it.
    """
    path = folder / CONFIG_NAME
    data = read_adapter_config(path)
    lora = LoraConfig.parse(data, path, max_rank)
    shard = read_adapter_header(folder)
    parts = _check(shard, lora, config)
    digest = hashlib.blake2b(data, digest_size=16)
    found: dict[tuple[int, str], dict[str, Numbers]] = {}
    for (layer, part, letter), numbers in _read(shard, parts, digest.update):
        found.setdefault((layer, part), {})[letter] = numbers
    updates: dict[tuple[int, str], LowRankUpdate] = {}
    model = expected_tensors(config)
    for (layer, part), both in sorted(found.items()):
        stem = f"model.layers.{layer}."
        scale = lora.scale_of(stem + part)
        first = 0
        for module, outputs in _modules_of(part, stem, model).items():
            b = in_rotated_order(f"{module}.", both["B"][first : first + outputs], config)
            updates[layer, module] = LowRankUpdate(both["A"], b, scale)
            first += outputs
    return LoraWeights(updates=updates, checksum=digest.hexdigest())


_Key = tuple[int, str, str]


def _modules_of(part: str, stem: str, model: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the modules that a part of a layer consists of, and the rows of each."""
    modules = FUSED_MODULES.get(part, (part,))
    return {module: model[f"{stem}{module}.weight"][0] for module in modules}


def _check(shard: Shard, lora: LoraConfig, config: ModelConfig) -> dict[str, _Key]:
    """Layer, part and letter of each tensor by name; all of them are as the model wants them."""
    model = expected_tensors(config)
    others = _SPLIT if config.family == "phi3" else FUSED_MODULES.keys()
    keys: dict[str, _Key] = {}
    for name, shape in shard.shapes.items():
        match = _NAME.fullmatch(name)
        if match is None and _OF_EXPERTS.search(name):
            raise ModelLoadError(
                f"{shard.path} holds {name}, which isn't served: adapters of experts and their "
                "routers aren't, those of attention are"
            )
        if match is None:
            served = (part.rpartition(".")[2] for part in _PARTS if part not in others)
            raise ModelLoadError(
                f"{shard.path} holds {name}, which isn't served: only lora_A and lora_B of "
                f"{', '.join(served)} are"
            )
        module, layer, part, letter = match.groups()
        if part in others:
            raise ModelLoadError(
                f"{shard.path} holds {name}, but a {config.family} model has no such matrix: "
                "they don't belong together"
            )
        own = f"{module.removesuffix(part)}{FUSED_MODULES.get(part, (part,))[0]}.weight"
        if own not in model and int(layer) < config.num_layers:
            raise ModelLoadError(
                f"{shard.path} holds {name}, but that layer of the model has experts: "
                "they don't belong together"
            )
        if own not in model:
            raise ModelLoadError(
                f"{shard.path} holds {name}, but the model has {config.num_layers} layers: "
                "they don't belong together"
            )
        inputs = model[own][1]
        outputs = sum(_modules_of(part, module.removesuffix(part), model).values())
        rank = lora.rank_of(module)
        expected = (rank, inputs) if letter == "A" else (outputs, rank)
        if shape != expected:
            raise ModelLoadError(
                f"{shard.path}: tensor {name} is {list(shape)}, and the model with a rank of "
                f"{rank} asks for {list(expected)}: they don't belong together"
            )
        if shard.dtypes[name] not in _DTYPES:
            raise ModelLoadError(
                f"{shard.path}: tensor {name} has the type {shard.dtypes[name]}, which isn't "
                f"read; {', '.join(_DTYPES)} are"
            )
        keys[name] = (int(layer), part, letter)
    if not keys:
        raise ModelLoadError(f"{shard.path} holds no tensors: the adapter changes nothing")
    whole = set(keys.values())
    for name, (layer_number, part, letter) in keys.items():
        other = "B" if letter == "A" else "A"
        if (layer_number, part, other) not in whole:
            raise ModelLoadError(f"{shard.path} holds {name} without its lora_{other}")
    return keys


def _read(
    shard: Shard, keys: Mapping[str, _Key], digest: Callable[[bytes | memoryview], None]
) -> Iterator[tuple[_Key, Numbers]]:
    """Yield the tensors, none of them rounded."""
    try:
        with shard.path.open("rb", buffering=0) as file:
            for name, key in keys.items():
                raw = read_bytes(shard.path, file, shard.offsets[name], shard.num_bytes[name])
                digest(name.encode())
                digest(raw.data)
                tensor = raw.view(_DTYPES[shard.dtypes[name]]).reshape(shard.shapes[name])
                check_finite(shard.path, name, tensor)
                as_read = BFLOAT16 if tensor.dtype == BFLOAT16 else FLOAT32
                yield key, tensor.astype(as_read, copy=False)
    except OSError as error:
        raise ModelLoadError(f"{shard.path} can't be read: {error.strerror}") from error
