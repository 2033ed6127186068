"""Malformed adapters: an error of one line that names the file, and little memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpu.lora.reading import read_adapter
from tests.fuzz.adapters import CONFIG, check_adapter, write_adapter_folder
from tests.fuzz.model_seeds import write_folder
from trioserve.model_files import ModelConfig, open_model
from trioserve.protocol.errors import ModelLoadError

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter_folder(tmp_path / "adapter")


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return open_model(write_folder(tmp_path / "model")).config


def refusal(folder: Path, config: ModelConfig) -> str:
    """Return what is said of the adapter in ``folder``, which must be refused, and cost little."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError) as caught:
            read_adapter(folder, config, 8)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(str(folder))
    return message


def rewritten(folder: Path, **changes: Any) -> None:
    """Change the entry of the first tensor in the header of the adapter's weights."""
    data = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    entries[next(iter(entries))].update(changes)
    written = json.dumps(entries).encode()
    header = struct.pack("<Q", len(written)) + written
    (folder / WEIGHTS).write_bytes(header + data[8 + length :])


def test_the_adapter_to_be_damaged_can_be_loaded(folder: Path) -> None:
    assert check_adapter(folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"r": 2**63}, "r = 9223372036854775808"),
        ({"r": True}, "r = True"),
        ({"r": "4\n"}, r"r = '4\n'"),
        ({"lora_alpha": 1e300}, "lora_alpha = 1e+300"),
        ({"lora_alpha": -0.0}, "lora_alpha = -0.0"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000"),
        ({"rank_pattern": [["q_proj", 3]]}, "rank_pattern = [["),
        ({"rank_pattern": {"o_proj": None}}, "no o_proj"),
        ({"rank_pattern": {"\x1b[2J": 2}}, r"rank_pattern = '\x1b[2J'"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "q_proj = nan"),
        ({"peft_type": {"LORA": 1}}, "peft_type = {'LORA': 1}"),
        ({"init_lora_weights": ["gaussian"]}, "init_lora_weights = ['gaussian']"),
        ({"modules_to_save": ["m" * 50] * 1000}, "modules_to_save"),
    ],
)
def test_fields_of_the_wrong_type_or_size(
    fields: dict[str, Any], reason: str, folder: Path, config: ModelConfig
) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    message = refusal(folder, config)
    assert reason in message
    assert len(message) < 4000


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"r":', "NaN", "\0", '"r"'])
def test_what_is_no_configuration(text: str, folder: Path, config: ModelConfig) -> None:
    (folder / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refusal(folder, config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [2**31, 2**31]}, "a bad entry in its header"),
        ({"shape": [2**62, 2**62]}, "a bad entry in its header"),
        ({"shape": [3]}, "a bad entry in its header"),
        ({"data_offsets": [0, 2**62]}, "a bad entry in its header"),
        ({"data_offsets": [2**62, 2**62 + 128]}, "is truncated"),
        ({"dtype": "F64"}, "a bad entry in its header"),
        ({"dtype": "X9"}, "has the type X9"),
        ({"dtype": "\n"}, r"has the type \n"),
        ({"dtype": ["F16"]}, "a bad entry in its header"),
    ],
)
def test_entries_that_can_not_be(
    changes: dict[str, Any], reason: str, folder: Path, config: ModelConfig
) -> None:
    rewritten(folder, **changes)
    message = refusal(folder, config)
    assert reason in message
    assert WEIGHTS in message


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**63, 2**64 - 1])
def test_lengths_of_the_header_that_can_not_be(
    length: int, folder: Path, config: ModelConfig
) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + bytes(100))
    assert "no safetensors header" in refusal(folder, config)


def test_names_that_can_t_be_printed(folder: Path, config: ModelConfig) -> None:
    header = b'{"\\u001b[2J\\n": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    assert r"holds \x1b[2J\n, which isn't served" in refusal(folder, config)


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_a_link_to_a_device_is_not_read(name: str, folder: Path, config: ModelConfig) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert name in refusal(folder, config)
