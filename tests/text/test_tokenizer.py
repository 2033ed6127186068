"""The tokenizer, and its task: requests passed on, refused, dropped, and their order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import pytest
import tokenizers
import trio
import trio.testing

from tests.support import text_tokenizers
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.protocol.wire import from_ints
from trioserve.requests.prompt_size import characters_of, characters_of_contents
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from trioserve.requests.request import Request, State, Times
from trioserve.requests.request import Sequence as RequestSequence
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_task import INLINE_CHARACTERS, MAX_THREADS, TokenizerTask

TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    bos_token="<s>",
)
LONG = "the long prompt " * INLINE_CHARACTERS


def make_request(prompt: Prompt, *, sequences: int = 1) -> Request:
    request = Request(
        id="r",
        prompt=prompt,
        params=SamplingParams(),
        stream=Stream(StreamBudget(1 << 20, 1 << 20)),
        times=Times(arrived=0.0),
    )
    for index in range(sequences):
        request.sequences.append(
            RequestSequence(request=request, index=index, sampler=SamplerParams())
        )
    return request


def user(text: Any) -> ChatPrompt:
    return ChatPrompt(messages=({"role": "user", "content": text},))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(text_tokenizers.byte_level(), TEMPLATE)


@attrs.frozen
class Running:
    """A tokenizer task under way."""

    requests: trio.MemorySendChannel[Request]
    prepared: trio.MemoryReceiveChannel[Request]


async def start(nursery: trio.Nursery, tokenizer: Tokenizer) -> Running:
    requests, inbox = trio.open_memory_channel[Request](math.inf)
    submit, prepared = trio.open_memory_channel[Request](math.inf)
    nursery.start_soon(TokenizerTask(tokenizer).run, inbox, submit)
    return Running(requests, prepared)


async def prepare(tokenizer: Tokenizer, *requests: Request) -> list[Request]:
    """Put all through the task at once; those that it sent on, in its order."""
    async with trio.open_nursery() as nursery:
        running = await start(nursery, tokenizer)
        for request in requests:
            running.requests.send_nowait(request)
        running.requests.close()
        return [request async for request in running.prepared]


class GatedTokenizer(Tokenizer):
    """Tokenizer that blocks the encoding of long texts until the gate opens, and records them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self.gate = threading.Event()
        self.entered: list[str] = []
        self._arrivals = threading.Semaphore(0)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > INLINE_CHARACTERS:
            self.entered.append(text)
            self._arrivals.release()
            assert self.gate.wait(20)
        return super().encode(text, add_special_tokens=add_special_tokens)

    async def wait_arrivals(self, number: int) -> None:
        for _ in range(number):
            assert await trio.to_thread.run_sync(self._arrivals.acquire, True, 20)


@pytest.mark.parametrize("text", [*text_tokenizers.SAMPLE, "", " x ", "<s> in </s> text"])
def test_encode_and_decode_are_the_backend_s(tokenizer: Tokenizer, text: str) -> None:
    backend = text_tokenizers.byte_level()
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_added_to_text_and_not_to_a_chat() -> None:
    tokenizer = Tokenizer(text_tokenizers.byte_fallback(), TEMPLATE)
    assert tokenizer.prompt_ids(TextPrompt("a"))[0] == 1
    assert tokenizer.prompt_ids(TextPrompt("a", add_special_tokens=False))[0] != 1
    assert tokenizer.prompt_ids(user("a")).count(1) == 1


def test_a_tokenizer_file_can_not_truncate_or_pad() -> None:
    backend = tokenizers.Tokenizer.from_str(text_tokenizers.byte_level().to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    text = "more than three tokens"
    expected = text_tokenizers.byte_level().encode(text).ids
    assert Tokenizer(backend).encode(text) == expected


def test_token_text_and_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(0) == "<s>"
    assert tokenizer.token_bytes(0) == b"<s>"
    half = tokenizer.encode("\x80")[0]
    assert tokenizer.token_bytes(half) == "\x80".encode()[:1]
    assert tokenizer.token_text(half) == "\ufffd"
    (space_word,) = [i for i in tokenizer.encode("over the") if tokenizer.token_text(i) == " the"]
    assert tokenizer.token_bytes(space_word) == b" the"
    assert tokenizer.token_text(100_000) == ""
    words = Tokenizer(text_tokenizers.words())
    assert (words.token_text(1), words.token_bytes(1)) == ("one", b"one")


def vllm_bad_words(encode: Callable[[str], list[int]], words: Sequence[str]) -> list[list[int]]:
    """Return the words' tokens by vLLM's rule, word by word, on a backend of its own."""
    spellings: list[list[int]] = []
    for word in words:
        for space in ("", " "):
            ids = encode(space + word.lstrip())
            if not space or (ids[0] != spellings[-1][0] and len(ids) == len(spellings[-1])):
                spellings.append(ids)
    return spellings


@pytest.mark.parametrize(
    "backend",
    [text_tokenizers.byte_level(), text_tokenizers.byte_fallback(), text_tokenizers.words()],
)
def test_bad_words_are_spelled_with_and_without_a_space(backend: tokenizers.Tokenizer) -> None:
    words = ["the", " the", "quick", "stop", "one two", "你", "t", "<s>"]
    expected = vllm_bad_words(
        lambda text: backend.encode(text, add_special_tokens=False).ids, words
    )
    assert Tokenizer(backend).bad_word_ids(words) == expected


def test_a_bad_word_at_a_text_s_beginning_and_within_it(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.decode(ids) for ids in tokenizer.bad_word_ids(["the", " stop"])]
    # " stop" is two tokens where "stop" is one.
    assert texts == ["the", " the", "stop"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["fine", "  "], "at least one token, got '  '"),
        (["a\ud800"], "character 1 is no valid Unicode"),
        (["x" * 1000] * 9, "at most 8192 characters together, got 9000"),
    ],
)
def test_bad_words_that_are_refused(tokenizer: Tokenizer, words: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tokenizer.bad_word_ids(words)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize("backend", [text_tokenizers.byte_level(), text_tokenizers.byte_fallback()])
def test_vocab_size_is_past_the_largest_id(backend: tokenizers.Tokenizer) -> None:
    size = Tokenizer(backend).vocab_size
    assert backend.id_to_token(size - 1) is not None
    assert backend.id_to_token(size) is None


@pytest.mark.parametrize(
    ("prompt", "param", "reason"),
    [
        (TextPrompt(""), "prompt", "no tokens"),
        (TextPrompt("a\ud800b"), "prompt", "character 1 is no valid Unicode"),
        (TokensPrompt(()), "prompt", "no tokens"),
        (TokensPrompt((1, 100_000)), "prompt", "token id 100000 is not in the vocabulary"),
        (TokensPrompt((5, -1)), "prompt", "token id -1"),
        (user("a\ud800b"), "messages", "is no valid Unicode"),
        (user(7), "messages", "a string or a list"),
        (ChatPrompt(messages=("x",)), "messages", "an object"),  # type: ignore[arg-type]
    ],
)
async def test_bad_prompts_are_rejected_and_the_next_goes_through(
    tokenizer: Tokenizer, prompt: Prompt, param: str, reason: str
) -> None:
    bad, good = make_request(prompt, sequences=2), make_request(TextPrompt("fine"))
    assert await prepare(tokenizer, bad, good) == [good]
    assert bad.admitted.is_set()
    assert isinstance(bad.rejection, InvalidRequest)
    assert bad.rejection.param == param
    assert reason in str(bad.rejection)
    assert all(sequence.state is State.FINISHED for sequence in bad.sequences)
    assert not good.admitted.is_set()


async def test_arguments_for_media_are_refused_where_none_are_read(tokenizer: Tokenizer) -> None:
    given: list[dict[str, Any]] = [
        {"mm_processor_kwargs": {"url": "x"}},
        {"media_io_kwargs": {"video": {"fps": 1}}},
    ]
    requests = [make_request(TextPrompt("a", **fields)) for fields in given]
    last = make_request(TextPrompt("a", mm_processor_kwargs={}, media_io_kwargs={}))
    assert await prepare(tokenizer, *requests, last) == [last]
    for fields, request in zip(given, requests, strict=True):
        (name,) = fields
        assert isinstance(request.rejection, InvalidRequest)
        assert request.rejection.param == name
        assert str(request.rejection).startswith(f"{name} isn't served")


async def test_a_chat_is_rendered_as_it_is_encoded(tokenizer: Tokenizer) -> None:
    assert await tokenizer.render(user("hi")) == "<s>user: hi"
    rendered = tokenizer.encode("<s>user: hi", add_special_tokens=False)
    assert tokenizer.prompt_ids(user("hi")) == rendered
    with pytest.raises(InvalidRequest, match="--chat-template") as caught:
        await Tokenizer(text_tokenizers.byte_level()).render(user("hi"))
    assert caught.value.param == "messages"


async def test_a_chat_without_a_template_is_told_how_to_give_one() -> None:
    request = make_request(user("hi"))
    assert await prepare(Tokenizer(text_tokenizers.byte_level()), request) == []
    assert "--chat-template" in str(request.rejection)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("short"),
        TextPrompt("<s>", add_special_tokens=False),
        TextPrompt(LONG),
        TokensPrompt((3, 2, 1)),
        user("short"),
        user([{"type": "text", "text": LONG}]),
        ChatPrompt(messages=({"role": "user"},), template_arguments={"tools": [{"x": LONG}]}),
    ],
    ids=["short", "special", "long", "tokens", "chat", "long-chat", "long-tools"],
)
async def test_the_task_gives_what_prompt_ids_gives(tokenizer: Tokenizer, prompt: Prompt) -> None:
    request = make_request(prompt, sequences=2)
    assert await prepare(tokenizer, request) == [request]
    expected: Prompt = prompt
    if isinstance(prompt, ChatPrompt):
        assert tokenizer.chat_template is not None
        text = tokenizer.chat_template.render(prompt)
        expected = TextPrompt(text, add_special_tokens=False)
    assert request.prompt_ids == tokenizer.prompt_ids(expected)
    assert request._prompt_column == from_ints(request.prompt_ids)
    assert [sequence.state for sequence in request.sequences] == [State.TOKENIZING] * 2
    assert not request.admitted.is_set()


@pytest.mark.parametrize("text", ["short", LONG])
async def test_the_task_puts_the_prefix_before_a_prompt(tokenizer: Tokenizer, text: str) -> None:
    request = make_request(TextPrompt(text))
    request.prefix_ids = (5, 6, 7)
    await prepare(tokenizer, request)
    assert request.prompt_ids == [5, 6, 7, *tokenizer.encode(text)]
    assert request._prompt_column == from_ints(request.prompt_ids)


async def test_a_crowd_of_short_prompts_comes_through_whole(tokenizer: Tokenizer) -> None:
    texts = [f"prompt number {number} " * 20 for number in range(40)]
    assert sum(map(len, texts)) > 4 * INLINE_CHARACTERS
    requests = [make_request(TextPrompt(text)) for text in texts]
    prepared = await prepare(tokenizer, *requests)
    assert sorted(map(id, prepared)) == sorted(map(id, requests))
    for request, text in zip(requests, texts, strict=True):
        assert request.prompt_ids == tokenizer.encode(text)


async def test_long_prompts_hold_up_nobody_and_are_few_at_once() -> None:
    tokenizer = GatedTokenizer(text_tokenizers.byte_level())
    long_ones = [make_request(TextPrompt(LONG)) for _ in range(MAX_THREADS + 2)]
    short_ones = [make_request(TextPrompt("short")) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        running = await start(nursery, tokenizer)
        for request in [*long_ones, *short_ones]:
            running.requests.send_nowait(request)
        assert [await running.prepared.receive() for _ in short_ones] == short_ones
        await tokenizer.wait_arrivals(MAX_THREADS)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(tokenizer.entered) == MAX_THREADS
        tokenizer.gate.set()
        running.requests.close()
        rest = [request async for request in running.prepared]
    assert sorted(map(id, rest)) == sorted(map(id, long_ones))


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(LONG),
        user(LONG),
        user([{"type": "text", "text": LONG}]),
        ChatPrompt(messages=({"role": "user"},), template_arguments={"tools": [{"x": LONG}]}),
        ChatPrompt(messages=({"role": "assistant", "tool_calls": [{"arguments": LONG}]},)),
        ChatPrompt(messages=({"role": LONG},)),
    ],
)
def test_whatever_is_long_in_a_prompt_is_counted(prompt: Prompt) -> None:
    assert len(LONG) <= characters_of(prompt) < len(LONG) + 100
    assert characters_of(user("short")) < 50


@pytest.mark.parametrize("odd", [None, 5, "text", [[["x"]]], {"role": None, "content": [3, None]}])
def test_the_size_of_a_malformed_chat_is_a_number(odd: Any) -> None:
    prompt = ChatPrompt(messages=(odd,))
    assert 0 < characters_of(prompt) < 60
    assert 0 < characters_of_contents(prompt) < 60


def finish(requests: Sequence[Request]) -> None:
    for request in requests:
        for sequence in request.sequences:
            sequence.move_to(State.FINISHED)


async def test_requests_that_have_ended_are_dropped_at_every_point() -> None:
    tokenizer = GatedTokenizer(text_tokenizers.byte_level())
    before = make_request(TextPrompt("ended before"))
    finish([before])
    encoding = [make_request(TextPrompt(LONG)) for _ in range(MAX_THREADS)]
    queued = make_request(TextPrompt(LONG + "queued"))
    alive = make_request(TextPrompt(LONG + "alive"))
    async with trio.open_nursery() as nursery:
        running = await start(nursery, tokenizer)
        for request in [before, *encoding]:
            running.requests.send_nowait(request)
        await tokenizer.wait_arrivals(MAX_THREADS)
        for request in [queued, alive]:
            running.requests.send_nowait(request)
        running.requests.close()
        await trio.testing.wait_all_tasks_blocked(0.01)
        finish([*encoding, queued])
        tokenizer.gate.set()
        assert [request async for request in running.prepared] == [alive]
    assert LONG + "queued" not in tokenizer.entered
    assert not before.admitted.is_set()
    assert before.prompt_ids == []


async def test_cancelling_leaves_a_thread_behind_and_does_not_wait_for_it() -> None:
    tokenizer = GatedTokenizer(text_tokenizers.byte_level())
    request = make_request(TextPrompt(LONG))
    async with trio.open_nursery() as nursery:
        running = await start(nursery, tokenizer)
        running.requests.send_nowait(request)
        await tokenizer.wait_arrivals(1)
        nursery.cancel_scope.cancel()
    assert request.prompt_ids == []
    with pytest.raises(trio.EndOfChannel):
        running.prepared.receive_nowait()
    tokenizer.gate.set()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("backend", [text_tokenizers.byte_level(), text_tokenizers.byte_fallback()])
def test_a_prompt_is_cut_as_the_tokenizer_s_own_truncation_does(
    backend: tokenizers.Tokenizer, special: bool, keep: int, side: str
) -> None:
    reference = tokenizers.Tokenizer.from_str(backend.to_str())
    reference.enable_truncation(keep, direction=side)
    tokenizer = Tokenizer(backend)
    for text in ["the stop and the top", "a", *text_tokenizers.SAMPLE]:
        ids = tokenizer.prompt_ids(TextPrompt(text, special), keep=keep, cut_side=side)
        assert len(ids) <= keep
        if keep > tokenizer.backend.num_special_tokens_to_add(False):
            assert ids == reference.encode(text, add_special_tokens=special).ids
        assert tokenizer.prompt_ids(TextPrompt(text, special), keep=10**6) == tokenizer.encode(
            text, add_special_tokens=special
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_ids_and_chats_are_cut_too(tokenizer: Tokenizer, side: str) -> None:
    end = slice(-3, None) if side == "left" else slice(3)
    assert tokenizer.prompt_ids(TokensPrompt((9, 8, 7, 6)), keep=3, cut_side=side) == [
        *(9, 8, 7, 6)[end]
    ]
    chat = user("one two three four")
    whole = tokenizer.prompt_ids(chat)
    assert len(whole) > 3
    assert tokenizer.prompt_ids(chat, keep=3, cut_side=side) == whole[end]


class CountingBackend:
    """A backend that knows how many characters it was given to encode."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.encoded += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_will_be_cut_off_anyway_is_not_encoded(side: str) -> None:
    text = " ".join(map(str, range(20_000)))
    backend = CountingBackend(text_tokenizers.byte_level())
    tokenizer = Tokenizer(cast(tokenizers.Tokenizer, backend))
    ids = tokenizer.prompt_ids(TextPrompt(text), keep=10, cut_side=side)
    assert backend.encoded < 1000
    whole = text_tokenizers.byte_level().encode(text).ids
    assert ids == (whole[-10:] if side == "left" else whole[:10])


@pytest.mark.parametrize("text", ["a few words", LONG])
async def test_the_task_cuts_prompts(tokenizer: Tokenizer, text: str) -> None:
    request = make_request(TextPrompt(text))
    request.params = SamplingParams(truncation_side="right")
    request.max_prompt_tokens = 3
    assert await prepare(tokenizer, request) == [request]
    assert request.prompt_ids == tokenizer.encode(text)[:3]


async def test_a_crowd_of_every_kind_is_encoded_as_each_alone(tokenizer: Tokenizer) -> None:
    """Check that a batch leaves out what it can't encode, and that a refused text spoils no
    other.
    """
    prompts: list[Prompt] = []
    for number in range(30):
        text = f"prompt number {number} " * 40
        prompts += [
            TextPrompt(text),
            TextPrompt(text, add_special_tokens=False),
            user(text),
            TokensPrompt((number + 1, 2)),
        ]
    refused = [TextPrompt("\ud800" * 500), ChatPrompt(messages=({"content": "no role" * 100},))]
    requests = [make_request(prompt) for prompt in (*prompts, *refused)]
    cut = make_request(TextPrompt("cut off " * 200))
    cut.max_prompt_tokens = 7
    await prepare(tokenizer, *requests, cut)
    for request, prompt in zip(requests, prompts, strict=False):
        assert request.prompt_ids == tokenizer.prompt_ids(prompt)
    assert isinstance(requests[-2].rejection, InvalidRequest)
    assert cut.prompt_ids == tokenizer.prompt_ids(cut.prompt, keep=7)


@pytest.mark.parametrize("is_listed", [True, False])
def test_media_stand_in_a_template_that_reads_parts_and_in_any_other(is_listed: bool) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if is_listed:
        source = (
            "{% for m in messages %}{% for part in m.content %}"
            "{% if part.type == 'image' or 'audio' in part %}({{ part.type }})"
            "{% else %}{{ part.text }}{% endif %} {% endfor %}{% endfor %}"
        )
    template = ChatTemplate(source, image_token="(image)", audio_token="(audio)")
    content = [{"type": "image"}, "and", {"type": "audio"}, {"type": "text", "text": "differ"}]
    prompt = ChatPrompt(messages=[{"role": "user", "content": content}])
    assert template.render(prompt).split() == ["(image)", "and", "(audio)", "differ"]
    reader = ChatTemplate(source, image_token="(image)")
    with pytest.raises(InvalidRequest, match="has the type 'audio'"):
        reader.render(prompt)
