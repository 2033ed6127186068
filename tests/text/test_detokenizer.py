"""From the scheduler's outputs to a caller's chunks: text, stop strings, cuts and failures."""

from __future__ import annotations

import codecs
import math
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.support import text_tokenizers
from trioserve.protocol.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    RequestAborted,
    SlowReader,
)
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.prompts import TextPrompt
from trioserve.requests.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    Times,
)
from trioserve.requests.stream import Chunk, Stream, StreamBudget, TokenLogprob
from trioserve.text.detokenizer import Detokenizer, SequenceText, stop_string_at_end
from trioserve.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(text_tokenizers.byte_level())
EOS = TOKENIZER.encode("</s>")[0]
LENGTH = Finish(FinishReason.LENGTH)
END_OF_SEQUENCE = Finish(FinishReason.STOP)
ABORT = Finish(FinishReason.ABORT)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def letters(text: str) -> tuple[int, ...]:
    """Return one token for each byte of ``text``."""
    single = {TOKENIZER.token_bytes(id): id for id in range(TOKENIZER.vocab_size)}
    return tuple(single[bytes([byte])] for byte in text.encode())


@attrs.define
class Delivery:
    """A request and what the detokenizer did for it."""

    request: Request
    detokenizer: Detokenizer = attrs.field(init=False)
    aborts: list[tuple[Sequence, Finish]] = attrs.field(factory=list)
    delivered: list[tuple[Sequence, Finish]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.detokenizer = Detokenizer(
            TOKENIZER,
            lambda sequence, finish: self.aborts.append((sequence, finish)),
            lambda sequence, finish: self.delivered.append((sequence, finish)),
        )

    def give(
        self,
        token_ids: tuple[int, ...] = (),
        finish: Finish | None = None,
        *,
        index: int = 0,
        logprobs: tuple[TokenLogprob, ...] | None = None,
    ) -> None:
        sequence = self.request.sequences[index]
        self.detokenizer.deliver(SequenceOutput(sequence, token_ids, logprobs, finish))

    def chunks(self) -> list[Chunk]:
        """Return the chunks as they were pushed, before the stream merges waiting ones."""
        return list(self.request.stream._pending)

    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks())

    def token_ids(self) -> tuple[int, ...]:
        return tuple(id for chunk in self.chunks() for id in chunk.token_ids)

    def end(self) -> tuple[str | None, int | str | None]:
        last = self.chunks()[-1]
        assert all(chunk.finish_reason is None for chunk in self.chunks()[:-1])
        return last.finish_reason, last.stop_reason


def delivery(*, sequences: int = 1, budget: int = 1 << 20, **params: Any) -> Delivery:
    request = Request(
        id="r",
        prompt=TextPrompt("prompt"),
        params=SamplingParams(**params),
        stream=Stream(StreamBudget(budget, 1 << 30)),
        times=Times(arrived=0.0),
        prompt_ids=list(ids_of("a prompt")),
    )
    for index in range(sequences):
        request.sequences.append(Sequence(request=request, index=index, sampler=SamplerParams()))
    return Delivery(request)


def test_tokens_go_out_at_once_and_characters_when_they_are_whole() -> None:
    case = delivery()
    first, second, third = letters("你")
    case.give((first, second))
    case.give((third, *letters("!")))
    case.give((), LENGTH)
    assert case.chunks() == [
        Chunk(text="", token_ids=(first, second)),
        Chunk(text="你!", token_ids=(third, *letters("!"))),
        Chunk(text="", finish_reason="length"),
    ]
    assert case.request.stream.closed
    assert case.aborts == []
    assert case.delivered == [(case.request.sequences[0], LENGTH)]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    case = delivery()
    case.give(letters("ok你")[:-1], LENGTH)
    assert case.text() == "ok\ufffd"


def test_outputs_without_tokens_or_finish_push_nothing() -> None:
    case = delivery()
    case.give()
    assert case.chunks() == []


def test_a_stop_string_cuts_text_ids_and_logprobs_at_the_token_that_completes_it() -> None:
    case = delivery(stop="STOP")
    ids = letters("go STOP it")
    case.give(ids[:4], logprobs=tuple(TokenLogprob(id, -1.0, "") for id in ids[:4]))
    assert case.text() == "go "
    case.give(ids[4:], logprobs=tuple(TokenLogprob(id, -1.0, "") for id in ids[4:]))
    assert case.text() == "go "
    assert case.token_ids() == letters("go STOP")
    entries = [entry for chunk in case.chunks() for entry in chunk.logprobs or ()]
    assert [entry.text for entry in entries] == list("go STOP")
    finish = Finish(FinishReason.STOP, stop_reason="STOP")
    assert case.end() == ("stop", "STOP")
    sequence = case.request.sequences[0]
    assert case.aborts == case.delivered == [(sequence, finish)]
    assert sequence.delivered
    assert case.request.stream.closed
    case.give(ids, LENGTH)  # what the worker had under way
    assert case.token_ids() == letters("go STOP")
    assert len(case.delivered) == 1


def test_include_keeps_the_stop_string_and_nothing_after_it() -> None:
    case = delivery(stop=["and"], include_stop_str_in_output=True)
    ids = (*ids_of("this"), *ids_of(" and then"))
    case.give(ids)
    assert case.text() == "this and"
    assert case.end() == ("stop", "and")


def test_text_held_back_comes_out_when_the_output_ends_otherwise() -> None:
    for finish, reason in ((LENGTH, "length"), (ABORT, "abort")):
        case = delivery(stop="STOP")
        case.give(letters("go ST"), finish)
        assert case.text() == "go ST"
        assert case.end() == (reason, None)
        assert case.aborts == []


def test_a_stop_id_has_no_text_and_its_id_is_there() -> None:
    case = delivery(stop="STOP")
    case.give((*letters("ST"), EOS), END_OF_SEQUENCE)
    assert (case.text(), case.token_ids()) == ("ST", (*letters("ST"), EOS))
    assert case.end() == ("stop", None)
    assert case.aborts == []


def test_a_stop_id_s_text_completes_no_stop_string_and_is_there_when_included() -> None:
    finish = Finish(FinishReason.STOP, stop_reason=letters("P")[0])
    for include, text in ((False, "STO"), (True, "STOP")):
        case = delivery(stop="STOP", include_stop_str_in_output=include)
        case.give(letters("STOP"), finish)
        assert (case.text(), case.end()) == (text, ("stop", letters("P")[0]))
        assert case.aborts == []


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    for skip, text in ((True, "ab"), (False, "a</s>b")):
        case = delivery(skip_special_tokens=skip)
        case.give((*letters("a"), EOS, *letters("b")), LENGTH)
        assert case.text() == text


def test_the_earlier_token_wins() -> None:
    stopped_before = delivery(stop="b")
    stopped_before.give((*letters("abc"), EOS), END_OF_SEQUENCE)
    assert stopped_before.end() == ("stop", "b")
    assert stopped_before.token_ids() == letters("ab")
    at_the_last = delivery(stop="c")
    at_the_last.give(letters("abc"), LENGTH)
    assert at_the_last.end() == ("stop", "c")
    aborted = delivery(stop="c")
    aborted.give(letters("abc"), ABORT)
    assert aborted.end() == ("stop", "c")


def test_the_flush_at_the_end_can_complete_a_stop_string() -> None:
    case = delivery(stop="\ufffd")
    case.give(letters("a你")[:2], LENGTH)
    assert (case.text(), case.end()) == ("a", ("stop", "\ufffd"))


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    case = delivery(stop="x", min_tokens=4)
    case.give(letters("axbxcx"))
    assert (case.text(), case.token_ids()) == ("axb", letters("axbx"))
    began_before = delivery(stop="bcd", min_tokens=4)
    began_before.give(letters("abcde"))
    assert (began_before.text(), began_before.token_ids()) == ("a", letters("abcd"))


def test_logprobs_get_texts_for_the_token_and_the_alternatives() -> None:
    case = delivery(logprobs=2)
    (word,) = ids_of(" the")
    half = letters("你")[0]
    given_ = TokenLogprob(word, -0.5, "", ((word, -0.5, ""), (EOS, -1.5, ""), (half, -2.0, "")))
    case.give((word,), logprobs=(given_,))
    (chunk,) = case.chunks()
    top = ((word, -0.5, " the"), (EOS, -1.5, "</s>"), (half, -2.0, "\ufffd"))
    assert chunk.logprobs == (TokenLogprob(word, -0.5, " the", top),)


def test_logprobs_of_tokens_that_were_asked_for_get_texts_too() -> None:
    case = delivery(logprobs=0, logprob_token_ids=[EOS])
    (word,) = ids_of(" the")
    case.give((word,), logprobs=(TokenLogprob(word, -0.5, "", (), ((EOS, -9.0, ""),), 4),))
    (chunk,) = case.chunks()
    assert chunk.logprobs == (TokenLogprob(word, -0.5, " the", (), ((EOS, -9.0, "</s>"),), 4),)


def test_a_stop_regex_ends_the_output_at_the_token_that_completes_it() -> None:
    case = delivery(stop_regex=[r"\n+\w+:"], stop=["never"])
    case.give(letters("Hi.\n"))
    case.give(letters("\nUser"))
    case.give(letters(": what?"), LENGTH)
    assert (case.text(), case.end()) == ("Hi.", ("stop", r"\n+\w+:"))
    assert case.token_ids() == letters("Hi.\n\nUser:")
    ((sequence, finish),) = case.aborts
    assert (sequence.delivered, finish) == (
        True,
        Finish(FinishReason.STOP, stop_reason=r"\n+\w+:"),
    )
    assert case.delivered == case.aborts


def test_a_stop_regex_stays_in_the_output_if_asked_and_waits_for_min_tokens() -> None:
    case = delivery(stop_regex="[xy]", min_tokens=4, include_stop_str_in_output=True)
    case.give(letters("axbyc"))
    assert (case.text(), case.token_ids(), case.end()) == (
        "axby",
        letters("axby"),
        ("stop", "[xy]"),
    )


def test_text_that_waits_for_a_stop_regex_comes_with_the_end() -> None:
    at_length = delivery(stop_regex=r"ab+c")
    at_length.give((*letters("xabb"), letters("你")[0]), LENGTH)
    assert (at_length.text(), at_length.end()) == ("xabb\ufffd", ("length", None))
    at_end = delivery(stop_regex=r"ab+c")
    at_end.give((*letters("xabb"), EOS), END_OF_SEQUENCE)
    assert (at_end.text(), at_end.end()) == ("xabb", ("stop", None))
    flushed = delivery(stop_regex=r"b\ufffd")
    flushed.give((*letters("xb"), letters("你")[0]), LENGTH)
    assert (flushed.text(), flushed.end()) == ("x", ("stop", r"b\ufffd"))


async def test_a_stop_regex_that_takes_too_long_is_the_request_s_error() -> None:
    case, other = delivery(stop_regex="[ab].{400}c", sequences=2), delivery()
    sender, receiver = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    bad = SequenceOutput(case.request.sequences[1], letters("a" * 400))
    good = SequenceOutput(other.request.sequences[0], letters("fine"))
    with sender:
        sender.send_nowait([bad, good])
    await case.detokenizer.run(receiver)
    assert other.text() == "fine"
    with pytest.raises(InvalidRequest, match="takes too long") as caught:
        await case.request.stream.take()
    assert caught.value.param == "stop_regex"
    assert [sequence for sequence, _ in case.aborts] == case.request.sequences
    assert case.delivered == case.aborts


def test_outputs_share_the_time_for_stop_regexes() -> None:
    case = delivery(stop_regex="x", sequences=3)
    case.give(letters("a"), index=1)
    budgets = {id(sequence.delivery._matcher._budget) for sequence in case.request.sequences}
    assert len(budgets) == 1


def test_sequences_are_decoded_apart_and_the_stream_ends_with_the_last() -> None:
    case = delivery(sequences=2, stop="!")
    case.give(letters("你")[:2], index=0)
    case.give(letters("a!"), index=1)
    assert not case.request.stream.closed
    case.give(letters("你")[2:], LENGTH, index=0)
    texts = ["".join(c.text for c in case.chunks() if c.index == index) for index in (0, 1)]
    assert texts == ["你", "a"]
    assert case.request.stream.closed
    assert len(case.delivered) == 2


@pytest.mark.parametrize(
    "finish",
    [
        Finish(FinishReason.ABORT, error=DeadlineExceeded("late")),
        Finish(FinishReason.ERROR, error=EngineError("broken")),
        Finish(FinishReason.ABORT, error=RequestAborted("shutdown")),
        Finish(FinishReason.ERROR),
    ],
)
async def test_an_error_is_raised_after_the_text_that_came(finish: Finish) -> None:
    case = delivery(stop="STOP")
    case.give(letters("so far ST"), finish)
    (chunk,) = await case.request.stream.take()
    assert (chunk.text, chunk.finish_reason) == ("so far ST", None)
    with pytest.raises(type(finish.error) if finish.error else EngineError) as caught:
        await case.request.stream.take()
    assert finish.error is None or caught.value is finish.error
    assert case.delivered == [(case.request.sequences[0], finish)]


async def test_an_error_of_one_output_ends_the_others_once() -> None:
    case = delivery(sequences=3)
    case.give(letters("done"), LENGTH, index=2)
    broken = Finish(FinishReason.ERROR, error=EngineError("no token is allowed"))
    case.give(letters("so far"), broken, index=1)
    case.give(letters("late"), LENGTH, index=0)
    first, second, third = case.request.sequences
    # The scheduler knows of the broken one, and has to be told of the one that still runs.
    assert case.aborts == [(first, Finish(FinishReason.ABORT, error=broken.error))]
    assert case.delivered == [(third, LENGTH), (second, broken), *case.aborts]
    chunks = await case.request.stream.take()
    assert [(chunk.index, chunk.text, chunk.finish_reason) for chunk in chunks] == [
        (2, "done", "length"),
        (1, "so far", None),
    ]
    with pytest.raises(EngineError, match="no token is allowed"):
        await case.request.stream.take()


async def test_a_slow_reader_ends_every_sequence_of_its_request() -> None:
    case = delivery(sequences=2, budget=300)
    while not case.request.stream.closed:
        case.give(letters("some text"), index=1)
    finishes = [finish for _, finish in case.aborts]
    assert [sequence.index for sequence, _ in case.aborts] == [0, 1]
    assert all(finish.reason is FinishReason.ABORT for finish in finishes)
    assert case.delivered == case.aborts
    assert all(sequence.delivered for sequence in case.request.sequences)
    await case.request.stream.take()
    with pytest.raises(SlowReader):
        await case.request.stream.take()


def test_a_reader_that_left_changes_nothing_for_the_others() -> None:
    case = delivery()
    case.request.stream.discard()
    case.give(letters("text"))
    case.give((), ABORT)
    assert case.chunks() == []
    assert case.delivered == [(case.request.sequences[0], ABORT)]


async def test_the_task_delivers_in_order_and_ends_with_its_channel() -> None:
    case, other = delivery(), delivery()
    sender, receiver = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    first, second = case.request.sequences[0], other.request.sequences[0]
    with sender:
        sender.send_nowait(
            [SequenceOutput(first, letters("a")), SequenceOutput(second, letters("x"))]
        )
        sender.send_nowait([SequenceOutput(first, letters("b"), finish=LENGTH)])
    await case.detokenizer.run(receiver)
    assert (case.text(), other.text()) == ("ab", "x")


async def test_what_goes_wrong_with_one_request_ends_only_that_one() -> None:
    case, other = delivery(), delivery()
    sender, receiver = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    bad = SequenceOutput(case.request.sequences[0], (-1,))
    good = SequenceOutput(other.request.sequences[0], letters("fine"))
    with sender:
        sender.send_nowait([bad, good])
    await case.detokenizer.run(receiver)
    assert other.text() == "fine"
    with pytest.raises(EngineError) as caught:
        await case.request.stream.take()
    assert isinstance(caught.value.__cause__, OverflowError)
    assert [sequence for sequence, _ in case.aborts] == case.request.sequences


@attrs.frozen
class Expected:
    text: str
    token_ids: tuple[int, ...]
    end: tuple[str, str | None]


def naive(ids: tuple[int, ...], params: SamplingParams) -> Expected:
    """Return the whole text, cut at its earliest end by a stop string, and the token of
    that end.
    """
    special = TOKENIZER.special_ids if params.skip_special_tokens else frozenset()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = []
    text = ""
    for number, id in enumerate(ids, 1):
        data = b"" if id in special else TOKENIZER.token_bytes(id)
        text += utf8.decode(data, final=number == len(ids))
        lengths.append(len(text))
    assert text == TOKENIZER.decode(ids, skip_special_tokens=params.skip_special_tokens)
    for end in range(1, len(text) + 1):
        number = next(n for n, length in enumerate(lengths, 1) if length >= end)
        found = [stop for stop in params.stop if text[:end].endswith(stop)]
        if found and number >= params.min_tokens:
            stop = max(found, key=len)
            cut = end if params.include_stop_str_in_output else end - len(stop)
            return Expected(text[:cut], ids[:number], ("stop", stop))
    return Expected(text, ids, ("length", None))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], SamplingParams, list[int]]:
    some_text = st.lists(st.sampled_from([*text_tokenizers.SAMPLE, "aab", " ", "abab"]), max_size=2)
    ids = list(ids_of("".join(draw(some_text)))[: draw(st.integers(0, 60))])
    for id in draw(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20)):
        ids.insert(draw(st.integers(0, len(ids))), id)
    skip = draw(st.booleans())
    text = TOKENIZER.decode(ids, skip_special_tokens=skip)
    stops = draw(st.lists(st.text("ab \ufffd", min_size=1, max_size=4), max_size=2))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 8))])
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=skip,
        min_tokens=draw(st.sampled_from([0, 1, 5, 20])),
    )
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    return tuple(ids), params, sorted(cuts)


@given(cases())
def test_deltas_join_to_the_whole_text_up_to_the_stop_string(
    case: tuple[tuple[int, ...], SamplingParams, list[int]],
) -> None:
    ids, params, cuts = case
    got = delivery(**attrs.asdict(params, recurse=False))
    got.request.prompt_ids = []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        got.give(ids[start:stop], LENGTH if stop == len(ids) else None)
    expected = naive(ids, params)
    assert (got.text(), got.token_ids(), got.end()) == (
        expected.text,
        expected.token_ids,
        expected.end,
    )


@given(
    words=st.lists(st.sampled_from(["a", "b", "é", "ab", "日", " ba", "c" * 9]), max_size=40),
    stop=st.lists(st.sampled_from(["ab", "ba", "éa", "日b", "aba", "cca"]), min_size=1, max_size=3),
    min_tokens=st.integers(0, 30),
    in_bytes=st.booleans(),
)
def test_a_stop_string_is_found_at_the_end_of_any_output(
    words: list[str], stop: list[str], min_tokens: int, in_bytes: bool
) -> None:
    found = delivery(stop=stop, min_tokens=min_tokens).request
    text = "".join(words)
    ids = letters(text) if in_bytes else ids_of(text)
    whole = SequenceText.all_of(found, TOKENIZER)[0]
    for place, token in enumerate(ids, 1):
        _, _, finish = whole.take((token,), None)
        at_end = stop_string_at_end(TOKENIZER, found, list(ids[:place]))
        assert at_end == (None if finish is None else finish.stop_reason)
        if finish is not None:
            return


def test_a_beam_that_ended_by_a_stop_string_keeps_its_score() -> None:
    made = delivery(stop=["lo"])
    made.give(ids_of("hello"), Finish(FinishReason.STOP, stop_reason="lo", beam_logprob=-2.5))
    (chunk,) = made.chunks()
    assert (chunk.text, chunk.stop_reason, chunk.beam_logprob) == ("hel", "lo", -2.5)
