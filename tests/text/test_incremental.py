"""Token by token against everything at once, for every kind of tokenizer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.support import text_tokenizers
from trioserve.model_files import locate, open_model
from trioserve.text.incremental import ByteDecoder, TokenBytes, WindowDecoder
from trioserve.text.tokenizer import Tokenizer

BYTE_LEVEL = text_tokenizers.byte_level()
FALLBACK = text_tokenizers.byte_fallback()
METASPACE = text_tokenizers.metaspace()
WORDS = text_tokenizers.words()
SMOLLM2 = open_model(locate("smollm2-135m")).load_tokenizer()

TEXTS = [
    *text_tokenizers.SAMPLE,
    "👨‍👩‍👧‍👦🏳️‍🌈 \U0001d518\U0001d52b\U0001d526 \U0010ffff",
    "한글과 漢字とかな交じり文",
    " leading and trailing ",
    "a real \ufffd in the text",
]


def ids_of(backend: tokenizers.Tokenizer, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    known = st.integers(0, backend.get_vocab_size() - 1)
    return st.lists(known, max_size=max_size)


def byte_ids(backend: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of single bytes, most of them of characters of several bytes, and of some others."""
    names = TokenBytes.of(backend)
    assert names is not None
    single = {names[id]: id for id in range(backend.get_vocab_size()) if len(names[id]) == 1}
    data = st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=3))
    return st.lists(data, max_size=10).map(
        lambda chunks: [single[bytes([byte])] for byte in b"".join(chunks)]
    )


def joined(
    backend: tokenizers.Tokenizer,
    ids: Sequence[int],
    prompt: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> str:
    decoder = Tokenizer(backend).incremental_decoder(
        prompt, skip_special_tokens=skip_special_tokens
    )
    return "".join([decoder.push(id) for id in ids]) + decoder.flush()


@given(st.one_of(ids_of(BYTE_LEVEL), byte_ids(BYTE_LEVEL)), st.booleans())
def test_byte_level_joins_to_the_whole_decode(ids: list[int], skip: bool) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert joined(BYTE_LEVEL, ids, skip_special_tokens=skip) == whole


def fallback_text(ids: list[int], *, skip: bool) -> str:
    """Return the whole decode, but with only the bad bytes of a byte-fallback run replaced."""
    data = b""
    for id in ids:
        token = FALLBACK.id_to_token(id)
        if skip and token in ("<unk>", "<s>", "</s>"):
            continue
        if token.startswith("<0x"):
            data += bytes.fromhex(token[3:5])
        else:
            data += token.replace("▁", " ").encode()
    text = data.decode("utf-8", "replace")
    return text.removeprefix(" ")


@given(st.one_of(ids_of(FALLBACK), byte_ids(FALLBACK)), st.booleans())
def test_byte_fallback_joins_to_the_whole_decode(ids: list[int], skip: bool) -> None:
    got = joined(FALLBACK, ids, skip_special_tokens=skip)
    assert got == fallback_text(ids, skip=skip)
    if "\ufffd" not in got:
        assert got == FALLBACK.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("backend", [METASPACE, WORDS], ids=["metaspace", "words"])
@given(data=st.data(), skip=st.booleans())
def test_other_tokenizers_join_to_the_whole_decode(
    backend: tokenizers.Tokenizer, data: st.DataObject, skip: bool
) -> None:
    assert TokenBytes.of(backend) is None
    ids = data.draw(ids_of(backend))
    whole = backend.decode(ids, skip_special_tokens=skip)
    assert joined(backend, ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize(
    "backend", [BYTE_LEVEL, FALLBACK, SMOLLM2], ids=["bytes", "fallback", "smollm2"]
)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_out_whole_and_never_in_halves(
    backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = tokenizer.incremental_decoder([])
    deltas = [decoder.push(id) for id in ids]
    assert decoder.flush() == ""
    whole = tokenizer.decode(ids)
    assert "".join(deltas) == whole
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")
    sent = ""
    for number, delta in enumerate(deltas, 1):
        sent += delta
        data = b"".join(tokenizer.token_bytes(id) for id in ids[:number])
        certain = data.decode("utf-8", "ignore")
        assert sent == (certain.removeprefix(" ") if backend is FALLBACK else certain)


@given(
    st.one_of(ids_of(BYTE_LEVEL, 6), byte_ids(BYTE_LEVEL)),
    st.one_of(ids_of(BYTE_LEVEL, 6), byte_ids(BYTE_LEVEL)),
)
def test_only_a_character_that_the_output_goes_on_with_comes_out_of_the_prompt(
    prompt: list[int], ids: list[int]
) -> None:
    table = Tokenizer(BYTE_LEVEL)
    special = table.special_ids
    before = b"".join(table.token_bytes(id) for id in prompt if id not in special)
    after = b"".join(table.token_bytes(id) for id in ids if id not in special)
    unfinished = next(
        (before[-n:] for n in (3, 2, 1) if len(before) >= n and is_beginning(before[-n:])), b""
    )
    goes_on = bool(after) and is_beginning_or_character(unfinished + after[:1])
    expected = (unfinished if goes_on else b"") + after
    assert joined(BYTE_LEVEL, ids, prompt) == expected.decode("utf-8", "replace")


def is_beginning(data: bytes) -> bool:
    """Return whether ``data`` is a character's first bytes, with more to come."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def is_beginning_or_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return is_beginning(data)


def test_a_prompt_that_ends_within_a_character_does_not_leak() -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    single = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    pepper = [single[bytes([byte])] for byte in "🌶".encode()]
    for number in (1, 2, 3):
        prompt = [*tokenizer.encode("Hello world "), *pepper[:number]]
        assert joined(BYTE_LEVEL, [*pepper[number:], *tokenizer.encode(" ok")], prompt) == "🌶 ok"
        assert joined(BYTE_LEVEL, tokenizer.encode("plain"), prompt) == "plain"
        assert joined(BYTE_LEVEL, [], prompt) == ""


def test_bytes_that_only_look_like_going_on_with_the_prompt_s_character() -> None:
    table = Tokenizer(BYTE_LEVEL)
    single = {table.token_bytes(id): id for id in range(table.vocab_size)}
    # ED A1 would be half a surrogate pair, E0 80 an overlong form: neither begins a character.
    for lead, bad in ((b"\xed", b"\xa1"), (b"\xe0", b"\x80"), (b"\xf4", b"\x90")):
        assert joined(BYTE_LEVEL, [single[bad]], [single[lead]]) == "\ufffd"


def test_the_leading_space_stays_after_a_prompt_and_goes_at_the_start() -> None:
    the = [FALLBACK.token_to_id("▁the")]
    assert joined(FALLBACK, the, [FALLBACK.token_to_id("a")]) == " the"
    assert joined(FALLBACK, the) == "the"
    bos = [FALLBACK.token_to_id("<s>")]
    assert joined(FALLBACK, the, bos) == "the"
    assert joined(FALLBACK, the, bos, skip_special_tokens=False) == " the"
    world = [METASPACE.token_to_id("▁world")]
    hello = METASPACE.token_to_id("▁hello")
    assert joined(METASPACE, world, [hello]) == " world"
    assert joined(METASPACE, world, [hello] + [METASPACE.token_to_id("<s>")] * 20) == " world"
    assert joined(METASPACE, world) == "world"
    assert joined(METASPACE, world, [METASPACE.token_to_id("<s>")]) == "world"


def test_ids_past_the_vocabulary_add_nothing() -> None:
    ids = [BYTE_LEVEL.token_to_id("a"), 100_000, BYTE_LEVEL.token_to_id("b")]
    assert joined(BYTE_LEVEL, ids) == "ab" == BYTE_LEVEL.decode(ids)


def test_what_can_not_become_a_character_is_replaced_at_once_or_at_the_end() -> None:
    table = TokenBytes.of(BYTE_LEVEL)
    assert table is not None
    single = {table[id]: id for id in range(BYTE_LEVEL.get_vocab_size())}
    decoder = ByteDecoder.after([], table)
    assert decoder.push(single[b"\xe4"]) == ""
    assert decoder.push(single[b"\xe4"]) == "\ufffd"
    assert decoder.push(single[b"a"]) == "\ufffda"
    assert decoder.push(single[b"\xf0"]) == ""
    assert decoder.flush() == "\ufffd"


def test_a_real_replacement_character_waits_for_a_few_tokens_at_most() -> None:
    decoder = WindowDecoder.after([], METASPACE.decode)
    real = METASPACE.token_to_id("\ufffd")
    deltas = [decoder.push(real) for _ in range(WindowDecoder.MAX_PENDING)]
    assert deltas[:-1] == [""] * (WindowDecoder.MAX_PENDING - 1)
    assert deltas[-1] == "\ufffd" * WindowDecoder.MAX_PENDING


@pytest.mark.parametrize("backend", [BYTE_LEVEL, METASPACE], ids=["bytes", "window"])
def test_invalid_bytes_cost_the_same_however_many_came_before(
    backend: tokenizers.Tokenizer,
) -> None:
    name = "\u0122" if backend is BYTE_LEVEL else "\ufffd"  # the byte 0x80, a real U+FFFD
    bad = backend.token_to_id(name)
    decoder = Tokenizer(backend).incremental_decoder([])

    def seconds(number: int) -> float:
        started = time.thread_time()
        for _ in range(number):
            decoder.push(bad)
        return time.thread_time() - started

    first = min(seconds(100) for _ in range(10))
    for _ in range(10):
        seconds(1000)
    last = min(seconds(100) for _ in range(10))
    # A decoder that goes over all that is undecided again is 20 times slower by now.
    assert last < 8 * first


def decoded(backend: tokenizers.Tokenizer, ids: list[int], **options: bool) -> str:
    decoder = Tokenizer(backend).incremental_decoder([], **options)
    return "".join(map(decoder.push, ids)) + decoder.flush()


@pytest.mark.parametrize(
    "backend",
    [text_tokenizers.byte_level(), text_tokenizers.byte_fallback(), text_tokenizers.metaspace()],
)
def test_no_decoder_but_a_word_level_one_puts_spaces_between_special_tokens(
    backend: tokenizers.Tokenizer,
) -> None:
    special = sorted(Tokenizer(backend).special_ids) * 2
    whole = backend.decode(special, skip_special_tokens=False)
    assert whole
    assert " " not in whole
    for spaces in (True, False):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert decoded(backend, special, **options) == whole


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    backend = text_tokenizers.words()
    one, start = backend.token_to_id("one"), backend.token_to_id("<s>")
    ids = [start, start, one, start, start, start, one, one]
    keep = {"skip_special_tokens": False}
    assert decoded(backend, ids, **keep) == backend.decode(ids, skip_special_tokens=False)
    assert decoded(backend, ids, **keep, spaces_between_special_tokens=False) == (
        "<s><s> one <s><s><s> one one"
    )
    for spaces in (True, False):
        assert decoded(backend, ids, spaces_between_special_tokens=spaces) == "one one one"
