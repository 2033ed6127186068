"""Texts and pairs to ids, cut off as ``tokenizers`` and transformers do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_encoders import encoder_tokenizer, make_encoder
from trioserve.model_files import open_encoder
from trioserve.protocol.errors import InvalidRequest
from trioserve.text.encoder_tokenizer import EncoderTokenizer, longest_first


def counting_tokenizer() -> tokenizers.Tokenizer:
    """``a`` and ``b`` are its words."""
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 40))
def test_longest_first_is_the_librarys(first: int, second: int, room: int) -> None:
    tokenizer = counting_tokenizer()
    tokenizer.enable_truncation(room, strategy="longest_first")
    ids = tokenizer.encode("a " * first, "b " * second).ids
    assert longest_first(first, second, room) == (ids.count(0), ids.count(1))


@pytest.fixture(scope="module", params=["bert", "distilbert", "xlm_roberta"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(request.param, tmp_path_factory.mktemp(request.param))


def tokenizer_of(folder: Path, **changes: Any) -> EncoderTokenizer:
    files = open_encoder(folder)
    return EncoderTokenizer(files.load_tokenizer(), attrs.evolve(files.config, **changes))


INPUTS: list[str | tuple[str, str]] = [
    "The cat.",
    "",
    ("the cat", "a dog"),
    ("", "a dog"),
    ("the " * 60, "a dog"),
    ("the cat", "dogs " * 60),
    ("over " * 9, "under " * 9),
    "words " * 60,
]


def test_ids_and_types_are_transformers(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tokenizer_of(folder)
    encoded = ours.encode_batch(INPUTS)
    for given_, got in zip(INPUTS, encoded, strict=True):
        wanted = theirs([given_], truncation="longest_first")
        whole = theirs([given_])
        assert got.ids == wanted["input_ids"][0]
        assert got.type_ids == wanted.get("token_type_ids", [[0] * len(got.ids)])[0]
        assert got.num_tokens == len(whole["input_ids"][0])
        assert got == (ours.encode(*given_) if isinstance(given_, tuple) else ours.encode(given_))


def test_what_fits_exactly_is_whole(folder: Path) -> None:
    encoded = tokenizer_of(folder, max_length=9).encode("a b c", "d")
    added = tokenizer_of(folder).backend.num_special_tokens_to_add(True)
    assert encoded.num_tokens == 4 + added
    assert tokenizer_of(folder, max_length=4 + added).encode("a b c", "d") == encoded
    cut = tokenizer_of(folder, max_length=3 + added).encode("a b c", "d")
    assert len(cut.ids) == 3 + added
    assert cut.num_tokens == encoded.num_tokens


def test_types_are_zero_where_the_model_does_not_want_them(folder: Path) -> None:
    encoded = tokenizer_of(folder, marks_pairs=False).encode("the cat", "a dog")
    assert set(encoded.type_ids) == {0}


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    backend = encoder_tokenizer("bert")
    backend.enable_truncation(3)
    backend.enable_padding(length=30)
    tokenizer = EncoderTokenizer(backend, open_encoder(folder).config)
    assert len(tokenizer.encode("a b c d").ids) == 6


def test_half_a_character_is_refused_by_its_place(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="character 2 is no valid Unicode"):
        tokenizer_of(folder).encode_batch(["fine", ("fine too", "ab\ud800"), "fine"])


def test_a_text_without_tokens_is_refused(folder: Path) -> None:
    tokenizer = EncoderTokenizer(counting_tokenizer(), open_encoder(folder).config)
    with pytest.raises(InvalidRequest, match="no tokens"):
        tokenizer.encode("")


def test_no_texts(folder: Path) -> None:
    assert tokenizer_of(folder).encode_batch([]) == []
