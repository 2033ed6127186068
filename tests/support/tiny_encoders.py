"""Small random encoders on disk, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

__all__ = ["FAMILIES", "encoder_tokenizer", "make_encoder", "write_sentence_modules"]

_SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
_DISTILBERT_SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "bert_tanh": ("Bert", {**_SIZES, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "distilbert": ("DistilBert", _DISTILBERT_SIZES),
    "mpnet": ("MPNet", {**_SIZES, "pad_token_id": 1}),
    "roberta": ("Roberta", {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm_roberta": ("XLMRoberta", {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
}
"""Family -> (the prefix of transformers' classes, fields of its configuration)."""

_SPECIAL = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
}


def make_encoder(
    family: str, folder: Path, head: str = "Model", *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a model of ``family`` into ``folder``: config.json, float32 weights, tokenizer.

    ``head`` is the rest of the name of transformers' class: ``Model``,
    ``ForSequenceClassification`` or ``ForMaskedLM``; ``overrides`` are fields of its configuration.
    Returns ``folder``.
    """
    import torch
    import transformers

    prefix, fields = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**fields, **overrides})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}{head}")(config).to(torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name.lower():
                    parameter.normal_(1.0, 0.2)
    model.save_pretrained(folder)
    style = "roberta" if "roberta" in family or family == "mpnet" else "bert"
    encoder_tokenizer(style).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 40 if style == "bert" else 38,
        "pad_token": "[PAD]" if style == "bert" else "<pad>",
    }
    if prefix == "Bert":
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def encoder_tokenizer(style: str) -> tokenizers.Tokenizer:
    """Word pieces of single letters, between the special tokens of BERT or RoBERTa."""
    special = _SPECIAL[style]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), "the", "##er", "##ing"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = special[1] if style == "bert" else special[3]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=style == "bert")
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    if style == "bert":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    else:
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def write_sentence_modules(
    folder: Path, *steps: tuple[str, dict[str, Any]], **sentence: Any
) -> None:
    """Write modules.json with the transformer and ``steps``, (class, its config.json) each.

    ``sentence`` are fields of sentence_bert_config.json.
    """
    entries = [("Transformer", "")]
    for index, (name, config) in enumerate(steps, 1):
        place = f"{index}_{name}"
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "config.json").write_text(json.dumps(config))
        entries.append((name, place))
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (name, place) in enumerate(entries)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps(sentence))
