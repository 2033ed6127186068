"""Folders of encoders: damaged ones are refused in one line, or loaded and computed."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.numpy import save

from gpu.models.encoder.loading import load_encoder
from gpu.weights.encoder import encoder_tensors
from tests.fuzz.limits import address_space_bounded
from tests.fuzz.target import Target
from tests.fuzz.values import JSON, NUMBERS
from tests.support.tiny_encoders import encoder_tokenizer
from trioserve.model_files import EncoderFiles, open_encoder, task_of
from trioserve.protocol.errors import ModelLoadError
from trioserve.text.encoder_tokenizer import EncoderTokenizer

__all__ = ["TARGETS", "check_encoder", "write_encoder"]

MEMORY = 256 << 20
MAX_MESSAGE_CHARACTERS = 4000
CONFIG: dict[str, Any] = {
    "architectures": ["RobertaModel"],
    "model_type": "roberta",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
POOLING = {"embedding_dimension": 8, "pooling_mode": "mean"}
DENSE = {
    "in_features": 8,
    "out_features": 3,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
MODULES = [
    {"type": f"sentence_transformers.models.{name}", "path": path}
    for name, path in (
        *(("Transformer", ""), ("Pooling", "1_Pooling")),
        *(("Dense", "2_Dense"), ("Normalize", "3_Normalize")),
    )
]
JSON_FILES: dict[str, Any] = {
    "config.json": CONFIG,
    "modules.json": MODULES,
    "1_Pooling/config.json": POOLING,
    "2_Dense/config.json": DENSE,
    "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": True},
    "tokenizer_config.json": {"model_max_length": 20, "model_input_names": ["input_ids"]},
    "config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"},
}


def write_encoder(folder: Path) -> Path:
    """Return an encoder in ``folder``, with every file that is read; returns ``folder``."""
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, value in JSON_FILES.items():
        (folder / name).write_text(json.dumps(value))
    encoder_tokenizer("roberta").save(str(folder / "tokenizer.json"))
    chance = np.random.default_rng(0)

    def weights(shapes: dict[str, tuple[int, ...]]) -> bytes:
        return save({n: chance.normal(0, 0.2, s).astype(np.float32) for n, s in shapes.items()})

    dense = {"linear.weight": (3, 8), "linear.bias": (3,)}
    (folder / "2_Dense" / "model.safetensors").write_bytes(weights(dense))
    (folder / "model.safetensors").write_bytes(b"")  # it only has to be there
    shapes = encoder_tensors(open_encoder(folder).config)
    (folder / "model.safetensors").write_bytes(weights(shapes))
    return folder


def check_encoder(folder: Path) -> bool:
    """Load the encoder in ``folder`` and let it read a pair; whether it could be loaded."""
    with address_space_bounded(MEMORY):
        try:
            task_of(folder)
            files = open_encoder(folder)
            tokenizer = EncoderTokenizer(files.load_tokenizer(), files.config)
            encoder = load_encoder(files, torch.float32, "cpu", lambda done, total: None)
            files.checksum()
        except ModelLoadError as error:
            message = str(error)
            assert message.isprintable(), message
            assert len(message) < MAX_MESSAGE_CHARACTERS
            return False
        _compute(files, tokenizer, encoder)
    return True


def _compute(files: EncoderFiles, tokenizer: EncoderTokenizer, encoder: Any) -> None:
    encoded = tokenizer.encode("hello there", "the cat")
    known = [min(id, files.config.vocab_size - 1) for id in encoded.ids]
    out = encoder.run([np.array(known)], [np.array(encoded.type_ids)])
    assert out.shape == (1, files.config.num_outputs)


@functools.cache
def _folder() -> Path:
    """Return a folder for the files of this run, which lasts as long as the process."""
    _keep.append(tempfile.TemporaryDirectory(prefix="trioserve-fuzz-"))
    return write_encoder(Path(_keep[-1].name))


_keep: list[tempfile.TemporaryDirectory[str]] = []


def _check_files(changed: dict[str, bytes]) -> None:
    folder = _folder()
    whole = {name: (folder / name).read_bytes() for name in changed}
    try:
        for name, data in changed.items():
            (folder / name).write_bytes(data)
        check_encoder(folder)
    finally:
        for name, data in whole.items():
            (folder / name).write_bytes(data)


def _check_file(name: str) -> Callable[[bytes], None]:
    return lambda data: _check_files({name: data})


def _seeds_of(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(_folder() / name).read_bytes()]


_ARCHITECTURES = st.sampled_from(("Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet")).flatmap(
    lambda family: st.sampled_from(("Model", "ForMaskedLM", "ForSequenceClassification")).map(
        lambda head: {"architectures": [family + head]}
    )
)
_MORE_FIELDS = (
    *("id2label", "num_labels", "position_embedding_type", "is_decoder", "quantization_config"),
    *("sentence_transformers", "sbert_ce_default_activation_function", "dim", "n_heads"),
    "relative_attention_num_buckets",
)
_OLD_POOLINGS = ("pooling_mode_cls_token", "pooling_mode_max_tokens", "word_embedding_dimension")
_STEPS = st.lists(
    st.sampled_from(MODULES) | st.dictionaries(st.sampled_from(("type", "path")), JSON), max_size=5
)


def _fields(of: dict[str, Any], *more: str) -> st.SearchStrategy[dict[str, Any]]:
    """``of`` with up to two fields, of its own or ``more``, of any type."""
    names = st.sampled_from((*of, *more))
    return st.dictionaries(names, NUMBERS | JSON, max_size=2).map(lambda new: {**of, **new})


_STRUCTURES = st.fixed_dictionaries(
    {},
    optional={
        "config.json": st.tuples(_fields(CONFIG, *_MORE_FIELDS), _ARCHITECTURES | st.just({})).map(
            lambda both: {**both[0], **both[1]}
        ),
        "modules.json": _STEPS | JSON,
        "1_Pooling/config.json": _fields(POOLING, *_OLD_POOLINGS),
        "2_Dense/config.json": _fields(DENSE, "use_residual", "module_input_name"),
        **{
            name: _fields(JSON_FILES[name])
            for name in (
                *("sentence_bert_config.json", "tokenizer_config.json"),
                "config_sentence_transformers.json",
            )
        },
    },
)


def _check_structures(drawn: dict[str, Any]) -> None:
    _check_files({name: json.dumps(value).encode() for name, value in drawn.items()})


TARGETS = (
    Target(
        "encoder_weights", _check_file("model.safetensors"), seeds=_seeds_of("model.safetensors")
    ),
    Target("encoder_config", _check_file("config.json"), seeds=_seeds_of("config.json")),
    Target("encoder_modules", _check_file("modules.json"), seeds=_seeds_of("modules.json")),
    Target("encoder_folder", _check_structures, _STRUCTURES),
)
