"""Tokenizer files with replacements that make texts longer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import text_tokenizers
from trioserve.model_files.huggingface import read_tokenizer
from trioserve.protocol.errors import ModelLoadError


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(single: list[Any], ids: list[int] | None = None) -> dict[str, Any]:
    tokens = {"x": {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}} if ids else {}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": tokens,
    }


DOUBLING = replacing({"String": "a"}, "aa")


def written(folder: Path, **parts: Any) -> Path:
    description = json.loads(text_tokenizers.byte_level().to_str()) | parts
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(description))
    return path


@pytest.mark.parametrize(
    ("parts", "growth"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 30}}, 1 << 30),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 9000}}, 1 << 40),
        ({"normalizer": replacing({"Regex": ""}, "x" * 100)}, 101),
        ({"normalizer": replacing({"String": "ab"}, "x" * 1000)}, 500),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 80}}, 81),
        ({"decoder": replacing({"String": "a"}, "x" * 70)}, 70),
        ({"post_processor": template([TEXT] * 65)}, 65),
        (
            {"post_processor": {"type": "Sequence", "processors": [template([TEXT] * 9)] * 3}},
            729,
        ),
    ],
    ids=[
        *("doubling", "often", "regex", "plain", "prepend", "decoder", "template"),
        "several templates",
    ],
)
def test_a_file_that_makes_texts_far_longer_is_refused(
    parts: dict[str, Any], growth: int, tmp_path: Path
) -> None:
    (part,) = parts
    with pytest.raises(ModelLoadError, match=f"its {part} makes texts up to {growth} times as"):
        read_tokenizer(written(tmp_path, **parts))


def test_a_template_of_very_many_tokens_is_refused(tmp_path: Path) -> None:
    processor = template([TEXT, {"SpecialToken": {"id": "x", "type_id": 0}}] * 2, ids=[1] * 600)
    with pytest.raises(ModelLoadError, match="puts 1200 tokens around a text; at most 1024"):
        read_tokenizer(written(tmp_path, post_processor=processor))
    processor = template([TEXT, {"SpecialToken": {"id": "x", "type_id": 0}}], ids=[1] * 600)
    assert len(read_tokenizer(written(tmp_path, post_processor=processor)).encode("a").ids) == 601


def test_templates_of_no_sense_are_errors(tmp_path: Path) -> None:
    for piece in ({"SpecialToken": {"id": [5]}}, {"Sequence": 5}, {"SpecialToken": 5}, 5):
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json is damaged"):
            read_tokenizer(written(tmp_path, post_processor=template([piece])))


def test_very_many_added_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="it has 262145 added tokens; at most 262144"):
        read_tokenizer(written(tmp_path, added_tokens=[{}] * (2**18 + 1)))


def test_a_very_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 1 << 30)
    with pytest.raises(ModelLoadError, match="more than 268435456 bytes"):
        read_tokenizer(path)


def test_usual_replacements_are_taken(tmp_path: Path) -> None:
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        replacing({"String": " "}, "\u2581"),
        replacing({"Regex": " {2,}"}, " "),
        replacing({"String": "``"}, '"'),
        replacing({"String": "x"}, ""),
        {"type": "NFKC"},
    ]
    normalizer = {"type": "Sequence", "normalizers": steps}
    tokenizer = read_tokenizer(written(tmp_path, normalizer=normalizer))
    assert tokenizer.normalizer.normalize_str("xa b") == "\u2581a\u2581b"


@pytest.mark.parametrize("text", ["[]", "{", "[" * 200_000, '{"normalizer": 3}', "\udc80"])
def test_what_is_no_tokenizer_is_an_error_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is damaged"):
        read_tokenizer(path)
