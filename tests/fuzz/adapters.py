"""Adapters as PEFT saves them: damaged ones are read, or refused in a line that names the file."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.numpy import save

from gpu.lora.config import UNSERVED
from gpu.lora.store import AdapterStore
from gpu.lora.torch_adapters import TorchAdapter
from tests.fuzz.limits import address_space_bounded
from tests.fuzz.model_seeds import HIDDEN, write_folder
from tests.fuzz.target import Target
from tests.fuzz.values import JSON, NUMBERS, TEXTS
from trioserve.model_files import ModelConfig, open_model

__all__ = ["TARGETS", "check_adapter", "write_adapter_folder"]

MEMORY = 256 << 20
"""Far more than a file of kilobytes may cost, and less than any number out of one would take."""
MAX_MESSAGE_CHARACTERS = 4000
MAX_RANK = 8
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "o_proj"],
    "rank_pattern": {"o_proj": 2},
    "alpha_pattern": {"model.layers.0.self_attn.o_proj": 3},
    "bias": "none",
    "use_rslora": False,
    "init_lora_weights": True,
}
_CONFIG_NAME, _WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"


@functools.cache
def _folder() -> Path:
    """Return a folder for the files of this run, which lasts as long as the process."""
    _keep.append(tempfile.TemporaryDirectory(prefix="trioserve-fuzz-"))
    return Path(_keep[-1].name)


_keep: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _model() -> ModelConfig:
    return open_model(write_folder(_folder() / "model")).config


def _tensors() -> dict[str, Any]:
    chance = np.random.default_rng(0)
    ranks = {"q_proj": 4, "o_proj": 2}
    return {
        f"base_model.model.model.layers.0.self_attn.{part}.lora_{letter}.weight": chance.normal(
            0, 0.2, (rank, HIDDEN) if letter == "A" else (HIDDEN, rank)
        ).astype(np.float16 if part == "q_proj" else np.float32)
        for part, rank in ranks.items()
        for letter in "AB"
    }


@functools.cache
def _parts() -> dict[str, bytes]:
    return {_CONFIG_NAME: json.dumps(CONFIG).encode(), _WEIGHTS_NAME: save(_tensors())}


def write_adapter_folder(folder: Path, changed: dict[str, bytes] | None = None) -> Path:
    """Return an adapter for the seeds' model; ``changed`` are its files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in {**_parts(), **(changed or {})}.items():
        (folder / name).write_bytes(data)
    return folder


def check_adapter(folder: Path) -> bool:
    """Load the adapter in ``folder`` as a worker does; whether it could be loaded."""
    config = _model()
    store = AdapterStore[TorchAdapter](
        config, MAX_RANK, lambda adapter: TorchAdapter.of(adapter, config, torch.bfloat16)
    )
    with address_space_bounded(MEMORY):
        answer = store.load({"number": 1, "path": str(folder), "checksum": ""})
    if "error" not in answer:
        assert list(store) == [1]
        assert 1 <= answer["rank"] <= MAX_RANK
        return True
    message = answer["error"]
    assert not store
    assert message.isprintable(), message
    assert len(message) < MAX_MESSAGE_CHARACTERS
    assert message.startswith(str(folder)), message
    return False


def _check_files(changed: dict[str, bytes]) -> None:
    check_adapter(write_adapter_folder(_folder() / "changed", changed))


_NAMES = (*CONFIG, *UNSERVED, "fan_in_fan_out", "target_modules", "revision")
_WORDS = st.sampled_from(("LORA", "IA3", "CAUSAL_LM", "none", "all", "gaussian", "pissa", "eva"))
_PATTERNS = st.dictionaries(
    st.sampled_from(("q_proj", "o_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj"))
    | st.sampled_from(("layers", "(a+)+$", ".", "_proj"))
    | TEXTS,
    st.integers(0, 2 * MAX_RANK) | NUMBERS | JSON,
    max_size=3,
)
_CONFIGS = st.dictionaries(
    st.sampled_from(_NAMES),
    st.integers(0, 2 * MAX_RANK) | NUMBERS | JSON | _WORDS | _PATTERNS,
    max_size=4,
)
_SIZES = st.sampled_from((0, 1, 2, 4, HIDDEN, MAX_RANK + 1)) | NUMBERS
_TENSOR_CHANGES = st.dictionaries(
    st.integers(0, 3),
    st.fixed_dictionaries(
        {},
        optional={
            "data_offsets": st.tuples(NUMBERS, NUMBERS).map(list) | JSON,
            "shape": st.lists(_SIZES, max_size=4) | JSON,
            "dtype": st.sampled_from(("F32", "F16", "BF16", "F64", "I8", "F8_E4M3")) | JSON,
        },
    ),
    max_size=2,
)
_STEM = "base_model.model.model.layers."
_RENAMED = st.dictionaries(
    st.integers(0, 3),
    TEXTS
    | st.sampled_from(
        (
            *(f"{_STEM}1.self_attn.q_proj.lora_A.weight", f"{_STEM}0.mlp.up_proj.lora_B.weight"),
            *(f"{_STEM}00.self_attn.q_proj.lora_A.weight", f"{_STEM}999999.mlp.up_proj.lora_A"),
            *("base_model.model.lm_head.lora_A.weight", f"{_STEM}0.self_attn.q_proj.lora_C.weight"),
        )
    ),
    max_size=2,
)


def _check_structures(drawn: tuple[dict[str, Any], dict[int, Any], dict[int, str]]) -> None:
    fields, changes, renamed = drawn
    data = _parts()[_WEIGHTS_NAME]
    length = struct.unpack("<Q", data[:8])[0]
    entries = list(json.loads(data[8 : 8 + length]).items())
    for place, change in changes.items():
        entries[place][1].update(change)
    for place, name in renamed.items():
        entries[place] = (name, entries[place][1])
    header = json.dumps(dict(entries)).encode()
    _check_files(
        {
            _CONFIG_NAME: json.dumps({**CONFIG, **fields}).encode(),
            _WEIGHTS_NAME: struct.pack("<Q", len(header)) + header + data[8 + length :],
        }
    )


TARGETS = (
    Target(
        "adapter_config",
        lambda data: _check_files({_CONFIG_NAME: data}),
        seeds=lambda: [_parts()[_CONFIG_NAME]],
    ),
    Target(
        "adapter_weights",
        lambda data: _check_files({_WEIGHTS_NAME: data}),
        seeds=lambda: [_parts()[_WEIGHTS_NAME]],
    ),
    Target("adapter_structures", _check_structures, st.tuples(_CONFIGS, _TENSOR_CHANGES, _RENAMED)),
)

torch.set_num_threads(1)
