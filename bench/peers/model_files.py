"""The default model in other forms: GGUF files in other number formats, a Hugging Face folder.

``python -m bench.peers.model_files MODEL FOLDER`` writes the folder. Comparisons do that in a
process of its own: a page of torch's library in their memory would count less for the servers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.peers.environments import KEPT
from bench.servers import MODEL
from trioserve.model_files import locate, open_model

FORMATS = ("bf16", "q8_0", "q4_1")
"""Formats of the model; the last is that of its own file."""
_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
_REPLACED = ("general.architecture", "general.file_type")


def gguf_file(format: str, model: str = MODEL, kept: Path = KEPT) -> Path:
    """Return the GGUF file of ``model`` in ``format``, written to ``kept`` if need be.

    The numbers are those of the model's own file, dequantized to float32 and rounded.
    """
    if format not in FORMATS:
        raise ValueError(f"formats are {', '.join(FORMATS)}, not {format!r}")
    original = Path(locate(model))
    if format not in _TYPES:
        return original
    path = kept / f"{Path(model).stem}-{format}.gguf"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _convert(original, part, format)
        part.rename(path)
    return path


def _convert(original: Path, path: Path, format: str) -> None:
    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPES[format])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _REPLACED:
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        # Vectors, such as the weights of norms, are float32 in every format.
        kind = _TYPES[format] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hugging_face_folder() -> Path:
    """Return the default model as a Hugging Face folder in bfloat16, written if need be."""
    folder = KEPT / f"{MODEL}-bfloat16"
    if not folder.exists():
        command = [sys.executable, "-m", "bench.peers.model_files", MODEL, str(folder)]
        subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[2])
    return folder


def write_folder(model: str, folder: Path) -> Path:
    """Write ``model``, which has to be a plain llama, to ``folder`` in bfloat16.

    The tokenizer is ours, because transformers builds another pre-tokenizer from a GGUF file. No id
    ends a sequence: both sides of a comparison are to produce every token asked for.
    """
    import safetensors.torch
    import torch

    from bench.random_model import llama_config
    from gpu.weights.tensors import load_weights

    files = open_model(locate(model))
    config = files.config
    if config.family != "llama" or config.rope_scaling is not None:
        raise ValueError(f"only plain llama models are converted, {model} is {config.family}")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = dict(load_weights(files, torch.bfloat16, lambda done, total: None))
    safetensors.torch.save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    files.load_tokenizer().save(str(part / "tokenizer.json"))
    described: dict[str, dict[str, Any]] = {
        "config.json": {
            **llama_config(config),
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "attention_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": None,
        },
        "generation_config.json": {"eos_token_id": -1, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": files.bos_token,
            "eos_token": files.eos_token,
            "pad_token": files.eos_token,
            "chat_template": files.chat_template,
            "model_max_length": config.max_position_embeddings,
        },
    }
    for name, values in described.items():
        (part / name).write_text(json.dumps(values, indent=2))
    part.rename(folder)
    return folder


if __name__ == "__main__":
    write_folder(sys.argv[1], Path(sys.argv[2]))
