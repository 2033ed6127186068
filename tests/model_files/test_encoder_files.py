"""The configuration read from an encoder's folder, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.encoders import (
    CONFIG,
    DENSE,
    JSON_FILES,
    MODULES,
    POOLING,
    check_encoder,
    write_encoder,
)
from tests.support.tiny_encoders import make_encoder
from tests.support.tiny_models import make_tiny
from trioserve.model_files import EncoderConfig, locate, open_encoder, task_of
from trioserve.model_files.encoder_config import Dense
from trioserve.protocol.errors import ModelLoadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "encoder")


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; ... takes one away."""
    values = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({n: value for n, value in values.items() if value is not ...}))


def error_of(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_encoder(folder).load_tokenizer()
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestConfig:
    def test_everything_that_the_files_say(self, folder: Path) -> None:
        assert open_encoder(folder).config == EncoderConfig(
            family="roberta",
            task="embed",
            vocab_size=100,
            hidden_size=8,
            intermediate_size=12,
            num_layers=1,
            num_heads=2,
            max_position_embeddings=24,
            padding_idx=1,
            type_vocab_size=2,
            marks_pairs=False,
            layer_norm_eps=1e-5,
            activation="gelu",
            max_length=16,
            pooling="mean",
            dense=(
                Dense(
                    folder="2_Dense", in_features=8, out_features=3, bias=True, activation="tanh"
                ),
            ),
            normalize=True,
            lower_case=True,
        )

    def test_without_the_files_of_sentence_transformers(self, folder: Path) -> None:
        for name in JSON_FILES:
            if name != "config.json":
                (folder / name).unlink()
        config = open_encoder(folder).config
        assert config.max_length == 24 - 2
        assert config.first_position == 2
        assert (config.pooling, config.dense, config.normalize) == ("mean", (), False)
        assert config.num_outputs == 8

    def test_the_tokenizers_length_counts_where_there_is_no_other(self, folder: Path) -> None:
        rewrite(folder / "sentence_bert_config.json", max_seq_length=None)
        assert open_encoder(folder).config.max_length == 20
        rewrite(folder / "tokenizer_config.json", model_max_length=int(1e30))
        assert open_encoder(folder).config.max_length == 22

    def test_no_length_is_past_the_positions(self, folder: Path) -> None:
        rewrite(folder / "sentence_bert_config.json", max_seq_length=1000)
        assert open_encoder(folder).config.max_length == 22

    @pytest.mark.parametrize(
        ("written", "pooling"),
        [
            ({"pooling_mode": "cls"}, "cls"),
            ({"pooling_mode": "lasttoken"}, "last"),
            ({"pooling_mode": ["max"]}, "max"),
            ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
            ({"pooling_mode_max_tokens": True}, "max"),
            ({"pooling_mode_lasttoken": True}, "last"),
            ({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}, "mean"),
            ({}, "mean"),
        ],
    )
    def test_poolings_in_either_spelling(
        self, folder: Path, written: dict[str, Any], pooling: str
    ) -> None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(written))
        assert open_encoder(folder).config.pooling == pooling

    def test_labels(self, tmp_path: Path) -> None:
        head = "ForSequenceClassification"
        labels = {0: "no", 1: "perhaps", 2: "yes"}
        folder = make_encoder("bert", tmp_path, head, id2label=labels)
        config = open_encoder(folder).config
        assert (config.task, config.labels) == ("classify", ("no", "perhaps", "yes"))
        assert (config.pooling, config.num_outputs) == (None, 3)
        assert config.marks_pairs
        rewrite(folder / "config.json", id2label=None)
        assert open_encoder(folder).config.labels == ("LABEL_0", "LABEL_1")
        rewrite(folder / "config.json", id2label=None, num_labels=1)
        assert open_encoder(folder).config.labels == ("LABEL_0",)

    def test_what_makes_scores_of_logits(self, tmp_path: Path) -> None:
        folder = make_encoder("bert", tmp_path, "ForSequenceClassification", num_labels=1)
        identity = "torch.nn.modules.linear.Identity"
        assert open_encoder(folder).config.score_activation == "sigmoid"
        rewrite(folder / "config.json", sbert_ce_default_activation_function=identity)
        assert open_encoder(folder).config.score_activation == "identity"
        sigmoid = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
        rewrite(folder / "config.json", sentence_transformers=sigmoid)
        assert open_encoder(folder).config.score_activation == "sigmoid"
        rewrite(folder / "config_sentence_transformers.json", activation_fn=identity)
        assert open_encoder(folder).config.score_activation == "identity"

    def test_lower_case(self, folder: Path) -> None:
        tokenizer = open_encoder(folder).load_tokenizer()
        assert tokenizer.encode("THE cat").ids == tokenizer.encode("the cat").ids
        rewrite(folder / "sentence_bert_config.json", do_lower_case=False)
        tokenizer = open_encoder(folder).load_tokenizer()
        assert tokenizer.encode("THE cat").ids != tokenizer.encode("the cat").ids

    def test_tasks(self, folder: Path, tmp_path: Path) -> None:
        assert task_of(folder) == "embed"
        head = "ForSequenceClassification"
        assert task_of(make_encoder("distilbert", tmp_path / "labels", head)) == "classify"
        assert task_of(make_tiny("llama2", tmp_path / "llama2")) == "generate"
        assert task_of(locate("smollm2-135m")) == "generate"

    def test_the_checksum_covers_the_layers_behind_the_pooling(self, folder: Path) -> None:
        before = open_encoder(folder).checksum()
        path = folder / "2_Dense" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
        assert open_encoder(folder).checksum() != before


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}
REFUSALS: list[tuple[str, Any, str]] = [
    ("config.json", {**CONFIG, "architectures": ["T5Model"]}, "architecture T5Model isn't served"),
    ("config.json", {"hidden_size": 8}, "names no architecture"),
    ("config.json", {**CONFIG, "hidden_size": "8"}, "hidden_size = '8'"),
    ("config.json", {**CONFIG, "hidden_size": None}, "has no hidden_size"),
    ("config.json", {**CONFIG, "num_attention_heads": 3}, "num_attention_heads = 3"),
    ("config.json", {**CONFIG, "num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
    ("config.json", {**CONFIG, "pad_token_id": 23}, "max_position_embeddings = 24"),
    ("config.json", {**CONFIG, "pad_token_id": -1}, "pad_token_id = -1"),
    ("config.json", {**CONFIG, "hidden_act": "mish"}, "hidden_act 'mish'"),
    ("config.json", {**CONFIG, "hidden_act": {}}, "hidden_act {}"),
    ("config.json", {**CONFIG, "layer_norm_eps": 0}, "layer_norm_eps = 0"),
    ("config.json", {**CONFIG, "position_embedding_type": "relative_key"}, "'relative_key'"),
    ("config.json", {**CONFIG, "is_decoder": True}, "is_decoder isn't served"),
    ("config.json", {**CONFIG, "quantization_config": {}}, "quantization_config"),
    ("config.json", {**CONFIG, **CLASSIFIER}, "modules.json has a Pooling"),
    (
        "config.json",
        {**CONFIG, "architectures": ["MPNetModel"], "relative_attention_num_buckets": 16},
        "relative_attention_num_buckets 16",
    ),
    (
        "config.json",
        {**CONFIG, "architectures": ["DistilBertModel"], "dim": 8, "n_heads": 0},
        "n_heads = 0",
    ),
    ("modules.json", {}, "not a JSON array"),
    ("modules.json", [], "of nothing"),
    ("modules.json", [1], "without type and path"),
    ("modules.json", MODULES[1:], "steps Pooling,Dense,Normalize aren't served"),
    ("modules.json", [*MODULES, MODULES[2]], "Dense aren't served"),
    ("modules.json", [{**MODULES[0], "type": "mine.Transformer"}], "code of its own"),
    ("modules.json", [{**MODULES[0], "path": "0_BERT"}], "transformer in '0_BERT'"),
    ("modules.json", [MODULES[0], {**MODULES[1], "path": "../x"}], "path = '../x'"),
    ("modules.json", [MODULES[0], {**MODULES[1], "path": "none"}], "config.json is missing"),
    ("1_Pooling/config.json", {**POOLING, "embedding_dimension": 9}, "embedding_dimension = 9"),
    ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "pooling_mode"),
    ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "'weightedmean' isn't served"),
    ("1_Pooling/config.json", {"pooling_mode_cls_token": 1}, "pooling_mode_cls_token = 1"),
    ("2_Dense/config.json", {**DENSE, "in_features": 7}, "in_features = 7"),
    ("2_Dense/config.json", {**DENSE, "out_features": 0}, "out_features = 0"),
    ("2_Dense/config.json", {**DENSE, "use_residual": True}, "use_residual"),
    ("2_Dense/config.json", {**DENSE, "activation_function": "os.system"}, "'os.system'"),
    ("2_Dense/config.json", {**DENSE, "activation_function": 3}, "activation_function = 3"),
    ("2_Dense/config.json", {**DENSE, "module_input_name": "token_embeddings"}, "input_name"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length = 0"),
    ("sentence_bert_config.json", {"max_seq_length": 4}, "adds 4 tokens to a pair"),
    ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case = 'no'"),
    ("tokenizer_config.json", {"model_input_names": "input_ids"}, "model_input_names"),
]


class TestRefusals:
    @pytest.mark.parametrize(("name", "value", "message"), REFUSALS)
    def test_a_file_that_can_not_be_right(
        self, folder: Path, name: str, value: Any, message: str
    ) -> None:
        (folder / name).write_text(json.dumps(value))
        said = error_of(folder)
        assert message in said
        assert str(folder) in said

    @pytest.mark.parametrize("labels", [{"0": "a", "2": "b"}, {"0": 1}, {}, ["a"]])
    def test_labels(self, folder: Path, labels: Any) -> None:
        (folder / "modules.json").unlink()
        rewrite(folder / "config.json", **CLASSIFIER, id2label=labels)
        assert "id2label" in error_of(folder)

    def test_a_model_that_predicts_words(self, folder: Path) -> None:
        (folder / "modules.json").unlink()
        rewrite(folder / "config.json", architectures=["RobertaForMaskedLM"])
        assert "has no modules.json" in error_of(folder)

    def test_weights_that_are_missing(self, folder: Path) -> None:
        (folder / "2_Dense" / "model.safetensors").unlink()
        assert "2_Dense has no model.safetensors" in error_of(folder)
        (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
        assert "convert it to safetensors" in error_of(folder)

    def test_the_folder_that_is_damaged_here_can_be_loaded(self, folder: Path) -> None:
        assert check_encoder(folder)
