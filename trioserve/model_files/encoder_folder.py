"""The JSON files of an encoder's folder, by transformers and sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioserve.model_files.config import MAX_LAYERS, MAX_SIZE
from trioserve.model_files.encoder_config import Activation, EncoderConfig, EncoderTask
from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import read_object
from trioserve.model_files.sentence_modules import (
    MODULES,
    SentenceModules,
    activation_of_class,
    read_sentence_modules,
)
from trioserve.protocol.errors import ModelLoadError

_FAMILIES = {
    "Bert": "bert",
    "DistilBert": "distilbert",
    "MPNet": "mpnet",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
}
_TASKS: dict[str, EncoderTask] = {
    "Model": "embed",
    # Embedding models often keep the class name of a masked language model, without its head.
    "ForMaskedLM": "embed",
    "ForSequenceClassification": "classify",
}
_ARCHITECTURES = {
    start + end: (family, task)
    for start, family in _FAMILIES.items()
    for end, task in _TASKS.items()
}

_DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}
"""DistilBERT's field names in config.json."""

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_MAX_LABELS = 1 << 16
_MPNET_PADDING_IDX = 1
"""MPNet's padding index, whatever its config.json says."""
_MPNET_BUCKETS = 32


def encoder_task(folder: Path) -> EncoderTask | None:
    """Return the task of the encoder in ``folder``; None if it isn't a known encoder.

    Raises:
        ModelLoadError: config.json is missing or damaged.
    """
    architecture = _architecture(read_object(folder / "config.json"))
    known = _ARCHITECTURES.get(architecture or "")
    return None if known is None else known[1]


def read_encoder_config(folder: Path) -> EncoderConfig:
    """Return the configuration of the encoder in ``folder``.

    Raises:
        ModelLoadError: A file is missing or damaged, or the model is unsupported.
    """
    path = folder / "config.json"
    values = read_object(path)
    family, task = _family_and_task(path, values)
    fields = Fields(path, values, {})
    names = _DISTILBERT_NAMES if family == "distilbert" else {n: n for n in _DISTILBERT_NAMES}
    _refuse_unserved(fields)
    hidden_size = fields.integer(names["hidden_size"])
    num_heads = fields.integer(names["num_attention_heads"])
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"{path} has {names['num_attention_heads']} = {num_heads}, which can't share "
            f"{names['hidden_size']} = {hidden_size}"
        )
    padding_idx = _padding_idx(fields, family)
    num_rows = fields.integer("max_position_embeddings")
    num_positions = num_rows if padding_idx is None else num_rows - padding_idx - 1
    if num_positions < 1:
        raise ModelLoadError(
            f"{path} has max_position_embeddings = {num_rows}, which leaves no position behind "
            f"pad_token_id = {padding_idx}"
        )
    steps = _steps(folder, hidden_size, values, task)
    labels = _labels(fields) if task == "classify" else ()
    has_types = family not in ("distilbert", "mpnet")
    num_types = fields.integer("type_vocab_size", 2) if has_types else 0
    sentence = _optional(folder / "sentence_bert_config.json")
    tokenizer = _optional(folder / "tokenizer_config.json")
    return EncoderConfig(
        family=family,
        task=task,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(names["intermediate_size"]),
        num_layers=fields.integer(names["num_hidden_layers"], most=MAX_LAYERS),
        num_heads=num_heads,
        max_position_embeddings=num_rows,
        padding_idx=padding_idx,
        relative_buckets=_relative_buckets(fields, family),
        type_vocab_size=num_types,
        marks_pairs=num_types > 1 and _marks_pairs(tokenizer, family),
        layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=_activation(fields, names["hidden_act"]),
        max_length=min(num_positions, _max_length(sentence, tokenizer, num_positions)),
        pooling=steps.pooling,
        dense=steps.dense,
        normalize=steps.normalize,
        labels=labels,
        independent_labels=fields.get("problem_type") == "multi_label_classification",
        head_activation="relu" if family == "distilbert" else "tanh",
        score_activation=_score_activation(folder, fields, len(labels)),
        lower_case=sentence.flag("do_lower_case"),
    )


def _optional(path: Path) -> Fields:
    return Fields(path, read_object(path, required=False), {})


def _architecture(values: Mapping[str, Any]) -> str | None:
    """Return the first architecture in config.json, or the bare model's class by its type."""
    named = values.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    types = {family: f"{start}Model" for start, family in _FAMILIES.items()}
    return types.get(str(values.get("model_type")))


def _family_and_task(path: Path, values: Mapping[str, Any]) -> tuple[str, EncoderTask]:
    architecture = _architecture(values)
    if architecture is None:
        raise ModelLoadError(f"{path} names no architecture: it is no encoder's folder")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelLoadError(f"{path}: the architecture {architecture} isn't served; {known} are")
    return _ARCHITECTURES[architecture]


def _refuse_unserved(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise ModelLoadError(f"{fields.path}: weights with a quantization_config aren't served")
    kind = fields.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise ModelLoadError(
            f"{fields.path}: position_embedding_type {kind!r} isn't served; 'absolute' is"
        )
    if fields.flag("is_decoder"):
        raise ModelLoadError(f"{fields.path}: is_decoder isn't served with this architecture")


def _padding_idx(fields: Fields, family: str) -> int | None:
    if family == "mpnet":
        return _MPNET_PADDING_IDX
    if family in ("roberta", "xlm-roberta"):
        return fields.integer("pad_token_id", 1, least=0)
    return None


def _relative_buckets(fields: Fields, family: str) -> int:
    if family != "mpnet":
        return 0
    buckets = fields.integer("relative_attention_num_buckets", _MPNET_BUCKETS)
    if buckets != _MPNET_BUCKETS:
        raise ModelLoadError(
            f"{fields.path}: relative_attention_num_buckets {buckets} isn't served; "
            f"{_MPNET_BUCKETS} is"
        )
    return buckets


def _steps(
    folder: Path, hidden_size: int, values: Mapping[str, Any], task: EncoderTask
) -> SentenceModules:
    """Return the steps after the encoder; the mean without sentence-transformers' files."""
    steps = read_sentence_modules(folder, hidden_size)
    if task == "classify":
        if steps is not None and steps.pooling is not None:
            raise ModelLoadError(
                f"{folder / MODULES} has a Pooling, but the model has a head that classifies"
            )
        return SentenceModules(pooling=None)
    if steps is None and str(_architecture(values)).endswith("ForMaskedLM"):
        raise ModelLoadError(
            f"{folder} has no {MODULES}, and its architecture predicts words: "
            "it wasn't trained to embed texts"
        )
    if steps is None or steps.pooling is None:
        return SentenceModules(pooling="mean")
    return steps


def _activation(fields: Fields, name: str) -> Activation:
    written = fields.get(name)
    written = "gelu" if written is None else written
    if not isinstance(written, str) or written not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelLoadError(f"{fields.path}: {name} {written!r} isn't served; {known} are")
    return _ACTIVATIONS[written]


def _max_length(sentence: Fields, tokenizer: Fields, default: int) -> int:
    """Return the most tokens of a text: sentence-transformers' limit, else the tokenizer's."""
    if sentence.get("max_seq_length") is not None:
        return sentence.integer("max_seq_length")
    written = tokenizer.get("model_max_length")
    if isinstance(written, (int, float)) and written > MAX_SIZE:
        return default  # transformers writes 1e30 for no limit.
    return tokenizer.integer("model_max_length", default)


def _marks_pairs(tokenizer: Fields, family: str) -> bool:
    """Return True if the texts of a pair have types. Only BERT has them, and may omit them."""
    names = tokenizer.get("model_input_names")
    if names is not None and not isinstance(names, list):
        raise tokenizer.error("model_input_names", names)
    return family == "bert" and (names is None or "token_type_ids" in names)


def _labels(fields: Fields) -> tuple[str, ...]:
    """Return the names of the labels, with transformers' default names."""
    written = fields.get("id2label")
    if written is None:
        count = fields.integer("num_labels", 2, most=_MAX_LABELS)
        return tuple(f"LABEL_{label}" for label in range(count))
    if not isinstance(written, dict) or not written:
        raise fields.error("id2label", written)
    labels = [written.get(str(label)) for label in range(len(written))]
    if not all(isinstance(label, str) for label in labels):
        raise fields.error("id2label", written)
    return tuple(map(str, labels))


def _score_activation(folder: Path, fields: Fields, num_labels: int) -> Activation:
    """Return the activation of scores, by the fields of sentence-transformers' CrossEncoder."""
    default: Activation = "sigmoid" if num_labels == 1 else "identity"
    own = _optional(folder / "config_sentence_transformers.json")
    if own.get("activation_fn") is not None:
        return activation_of_class(own, "activation_fn", default)
    nested = fields.get("sentence_transformers")
    if isinstance(nested, dict) and nested.get("activation_fn") is not None:
        return activation_of_class(Fields(fields.path, nested, {}), "activation_fn", default)
    return activation_of_class(fields, "sbert_ce_default_activation_function", default)
