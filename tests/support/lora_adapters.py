"""PEFT adapters with random weights, and the models that they make when they are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from gpu.slots import Row, SlotTable
from gpu.weights.expected import expected_tensors
from gpu.weights.fused import FUSED_MODULES
from gpu.weights.packed_modules import PACKED_MODULES
from tests.support.plans import GREEDY
from trioserve.model_files import open_model
from trioserve.protocol.wire import OpenSlot, Plan, from_ints

__all__ = ["ALL_PARTS", "OF_ATTENTION", "make_adapter", "merge", "rows_of", "write_adapter"]

ALL_PARTS = tuple(part for parts in PACKED_MODULES.values() for part in parts)
FUSED_PARTS = (*FUSED_MODULES, "self_attn.o_proj", "mlp.down_proj")
"""Parts of a layer of Phi 3."""
OF_ATTENTION = tuple(part for part in ALL_PARTS if part.startswith("self_attn."))


def make_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    parts: tuple[str, ...] | None = None,
    ranks: dict[str, int] | None = None,
    dtype: Any = np.float32,
    **config: Any,
) -> Path:
    """Write an adapter for ``model`` into ``folder``, strong enough to change what is generated.

    ``parts`` are all that may have updates if they aren't given: those of attention in a model with
    experts. ``ranks`` are those of single parts; ``config`` are fields of adapter_config.json.
    """
    shape_of_model = open_model(model).config
    shapes = expected_tensors(shape_of_model)
    if shape_of_model.family == "phi3":
        shapes = _fused(shapes)
        parts = parts or FUSED_PARTS
    if parts is None:
        parts = ALL_PARTS if shape_of_model.experts is None else OF_ATTENTION
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        part = name.removesuffix(".weight").partition("layers.")[2].partition(".")[2]
        if part not in parts:
            continue
        own = (ranks or {}).get(part, rank)
        stem = "base_model.model." + name.removesuffix("weight")
        outputs, inputs = shape
        a = draw.standard_normal((own, inputs)) / np.sqrt(inputs)
        b = draw.standard_normal((outputs, own)) * 0.4
        tensors[stem + "lora_A.weight"] = a.astype(dtype)
        tensors[stem + "lora_B.weight"] = b.astype(dtype)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({part.rpartition(".")[2] for part in parts}),
        "rank_pattern": {part.rpartition(".")[2]: own for part, own in (ranks or {}).items()},
        **config,
    }
    return write_adapter(folder, fields, tensors)


def _fused(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors as files of Phi 3 have them."""
    fused = dict(shapes)
    for whole, modules in FUSED_MODULES.items():
        for name in [each for each in shapes if f"{modules[0]}." in each]:
            parts = [fused.pop(name.replace(modules[0], module)) for module in modules]
            fused[name.replace(modules[0], whole)] = (sum(each[0] for each in parts), parts[0][1])
    return fused


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write both files of an adapter into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Write the model that PEFT makes of both into ``folder``, with the model's tokenizer."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def rows_of(numbers: Sequence[int], count: int = 2) -> list[Row]:
    """Rows of ``count`` tokens each, with adapters of these numbers; 0 for none."""
    slots = SlotTable(num_pages=64, page_size=64, max_model_len=64, vocab_size=300)
    slots.adapters = numbers
    opened = [
        OpenSlot(
            slot=slot,
            generation=1,
            tokens=from_ints([5] * count),
            prompt_length=count,
            computed=0,
            pages=from_ints([slot]),
            sampler=GREEDY,
            adapter=number,
        )
        for slot, number in enumerate(numbers)
    ]
    places, counts = from_ints(range(len(numbers))), from_ints([count] * len(numbers))
    return slots.apply(Plan(number=1, opened=opened, row_slots=places, row_counts=counts))
