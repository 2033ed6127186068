"""Texts that are too long, and texts at which the tokenizer's own code panics."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from tests.text.test_tokenizer import make_request, prepare, user
from trioserve.model_files.native import Panic, panics_raised
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.requests.prompts import TextPrompt
from trioserve.testing.fake_encoder import fake_encoder_config
from trioserve.testing.fake_engine import byte_tokenizer
from trioserve.text import bounded_encoder, encoder_tokenizer, guarded
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.encoder_tokenizer import EncoderTokenizer
from trioserve.text.tokenizer import Tokenizer

DEADLY = "a" * 60 + "!"
"""A text at which :func:`panicking`'s pattern is tried 2**60 times."""
ENCODER = fake_encoder_config("embed")
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")


def panicking() -> tokenizers.Tokenizer:
    """Return a tokenizer with a pattern of exponential time, so that the library gives up."""
    backend = byte_tokenizer()
    split = pre_tokenizers.Split(Regex("(?:a|aa)+$|b"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def test_a_panic_is_an_ordinary_exception() -> None:
    backend = panicking()
    with pytest.raises(Panic, match="retry-limit"), panics_raised():
        backend.encode_batch_fast([DEADLY])
    with pytest.raises(KeyboardInterrupt), panics_raised():
        raise KeyboardInterrupt


async def test_a_text_at_which_the_tokenizer_panics_is_refused() -> None:
    tokenizer = Tokenizer(panicking(), TEMPLATE)
    for text in (DEADLY, DEADLY * 1000):
        with pytest.raises(InvalidRequest, match=r"can't be encoded: .*retry-limit"):
            tokenizer.encode(text)
        with pytest.raises(InvalidRequest, match="can't be encoded"):
            tokenizer.prompt_ids(TextPrompt(text), keep=100)
        fine = {TextPrompt("fine"), TextPrompt("fine " * 500)}
        requests = [make_request(prompt) for prompt in (TextPrompt(text), user(text), *fine)]
        assert {request.prompt for request in await prepare(tokenizer, *requests)} == fine
        assert all(request.ended for request in requests[:2])
    with pytest.raises(InvalidRequest, match="a word in bad_words: the text can't be encoded"):
        tokenizer.bad_word_ids([DEADLY])


def test_an_encoder_refuses_it_too() -> None:
    tokenizer = EncoderTokenizer(panicking(), ENCODER)
    with pytest.raises(InvalidRequest, match=r"can't be encoded: .*retry-limit"):
        tokenizer.encode_batch(["fine", DEADLY])


def test_a_prompt_that_is_far_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), TEMPLATE)
    tokenizer.bound(100)
    encoded: list[int] = []
    counted = bounded_encoder.room_to_encode
    monkeypatch.setattr(
        bounded_encoder, "room_to_encode", lambda size: encoded.append(size) or counted(size)
    )
    most = tokenizer.max_characters
    with pytest.raises(ContextTooLong, match=f"at most {most} are encoded: this model's maximum"):
        tokenizer.prompt_ids(TextPrompt("x" * (most + 1)))
    assert not encoded
    with pytest.raises(ContextTooLong, match=r"at least \d+ tokens in the prompt"):
        tokenizer.prompt_ids(TextPrompt("x" * most))
    assert encoded == [bounded_encoder.PART_CHARACTERS]
    with pytest.raises(InvalidRequest, match=f"at most {most} are encoded"):
        tokenizer.encode("x" * (most + 1))
    assert len(tokenizer.encode("x" * most)) == most


def test_a_longer_context_takes_longer_texts() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.max_characters == guarded.FEWEST_MAX_CHARACTERS
    tokenizer.bound(1 << 20)
    assert tokenizer.max_characters == guarded.CHARACTERS_PER_TOKEN << 20


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_long_text_a_part_is_cut(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(chr(97 + place * place % 26) for place in range(3000))
    tokenizer = Tokenizer(byte_tokenizer())
    expected = tokenizer.prompt_ids(TextPrompt(text), keep=400, cut_side=side)
    monkeypatch.setattr(bounded_encoder, "PART_CHARACTERS", 200)
    assert tokenizer.prompt_ids(TextPrompt(text), keep=400, cut_side=side) == expected
    assert len(expected) == 400


def test_memory_is_given_back_behind_a_large_text(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(guarded, "trim_memory", lambda: given_back.append(True))
    tokenizer = Tokenizer(byte_tokenizer())
    tokenizer.encode("x" * 1000)
    assert not given_back
    tokenizer.encode("x" * (guarded.LARGE_CHARACTERS + 1))
    assert given_back == [True]


def test_an_encoder_s_texts_are_encoded_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = EncoderTokenizer(byte_tokenizer(), ENCODER)
    texts = ["ab", ("cd", "efg"), "h" * 40, "i", "j"]
    expected = tokenizer.encode_batch(texts)
    monkeypatch.setattr(encoder_tokenizer, "_GROUP_CHARACTERS", 8)
    assert tokenizer.encode_batch(texts) == expected
    most = guarded.max_characters(ENCODER.max_length)
    with pytest.raises(InvalidRequest, match=f"at most {most} are encoded"):
        tokenizer.encode_batch(["fine", "x" * (most + 1)])
