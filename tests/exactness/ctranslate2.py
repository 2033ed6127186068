"""Whisper models in CTranslate2's format, rewritten as folders of Hugging Face's libraries."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

Tensor = np.ndarray[Any, Any]
_FLOAT16, _FLOAT32 = 4, 0
_DTYPES = {_FLOAT16: np.dtype("<f2"), _FLOAT32: np.dtype("<f4")}
_NORM = {"gamma": "weight", "beta": "bias"}
_TOP = {
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
}


def rewrite(source: Path, folder: Path) -> Path:
    """Write the English model in ``source`` to ``folder``, in its float16; return ``folder``."""
    import torch
    import transformers

    tensors = dict(_named(dict(_read(source / "model.bin"))))
    tokens = json.loads((source / "config.json").read_text())
    vocabulary, width = tensors["model.decoder.embed_tokens.weight"].shape
    depth = 1 + max(int(name.split(".")[3]) for name in tensors if ".layers." in name)
    heads = width // 64
    end = tokens["suppress_ids_begin"][-1]
    special = {
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": end + 1,
        "begin_suppress_tokens": tokens["suppress_ids_begin"],
        "suppress_tokens": [each for each in tokens["suppress_ids"] if each >= 0],
    }
    shape = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in (("layers", depth), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    config = transformers.WhisperConfig(
        vocab_size=vocabulary, d_model=width, num_mel_bins=80, **shape, **special
    )
    model: Any = transformers.WhisperForConditionalGeneration(config).half()
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"proj_out.weight"}, missing
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        **special,
        no_timestamps_token_id=vocabulary - 1502,
        is_multilingual=False,
        max_initial_timestamp_index=50,
        alignment_heads=tokens["alignment_heads"],
        max_length=448,
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    tokenizer.save_pretrained(folder)
    return folder


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file, by CTranslate2's names."""
    with path.open("rb") as file:
        _number(file, "I")
        _text(file)
        _number(file, "I")
        for _ in range(_number(file, "I")):
            name = _text(file)
            shape = [_number(file, "I") for _ in range(_number(file, "B"))]
            dtype, size = _DTYPES.get(_number(file, "B")), _number(file, "I")
            data = file.read(size)
            if dtype is not None and shape:
                yield name, np.frombuffer(data, dtype).reshape(shape)


def _named(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by transformers' names; those that are fused are cut."""
    for name, tensor in tensors.items():
        half, *rest = name.split("/")
        if name in _TOP:
            yield _TOP[name], tensor
        elif rest[0].startswith("conv"):
            yield f"model.{half}.{rest[0]}.{rest[1]}", tensor
        elif rest[0] == "layer_norm":
            yield f"model.{half}.layer_norm.{_NORM[rest[1]]}", tensor
        elif rest[0].startswith("layer_"):
            layer = f"model.{half}.layers.{rest[0].removeprefix('layer_')}"
            for own, part in _parts(rest[1:], tensor):
                yield f"{layer}.{own}", part


def _parts(rest: list[str], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer that one of CTranslate2's is."""
    block, product, kind = rest
    attention = {"self_attention": "self_attn", "attention": "encoder_attn"}.get(block)
    if product == "layer_norm":
        norm = "final" if attention is None else attention
        yield f"{norm}_layer_norm.{_NORM[kind]}", tensor
        return
    number = int(product.removeprefix("linear_"))
    if attention is None:
        yield f"fc{number + 1}.{kind}", tensor
        return
    fused = {("self_attn", 0): "qkv", ("encoder_attn", 0): "q", ("encoder_attn", 1): "kv"}
    names = fused.get((attention, number))
    if names is None:
        yield f"{attention}.out_proj.{kind}", tensor
        return
    for letter, part in zip(names, np.split(tensor, len(names)), strict=True):
        if (letter, kind) != ("k", "bias"):  # which are zeros
            yield f"{attention}.{letter}_proj.{kind}", part


def _number(file: IO[bytes], kind: str) -> int:
    size = struct.calcsize(kind)
    return int(struct.unpack(f"<{kind}", file.read(size))[0])


def _text(file: IO[bytes]) -> str:
    return file.read(_number(file, "H"))[:-1].decode()
