"""Work that is read from files: ShareGPT's conversations, and traces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trioserve.load import (
    CountedTexts,
    DataError,
    GuessedTexts,
    Texts,
    TraceRow,
    Turn,
    load_sharegpt,
    load_trace,
    scaled_lengths,
    trace_work,
)
from trioserve.model_files import locate, open_model

GUESSED = GuessedTexts()


@pytest.fixture(scope="module")
def counted() -> CountedTexts:
    return CountedTexts(open_model(locate("smollm2-135m")).load_tokenizer())


# -- ShareGPT's files


def spoken(*texts: str, speakers: tuple[str, str] = ("human", "gpt")) -> dict[str, Any]:
    turns = [{"from": speakers[n % 2], "value": text} for n, text in enumerate(texts)]
    return {"id": "x", "conversations": turns}


def sentence(size: int) -> str:
    return "abcd" * size


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_a_sharegpt_file_is_read_and_filtered_as_vllm_does(tmp_path: Path) -> None:
    kept = spoken(sentence(10), sentence(20), sentence(30), sentence(40))
    dropped = [
        spoken(sentence(10)),
        spoken("short", sentence(20)),
        spoken(sentence(10), "ok"),
        spoken(sentence(1025), sentence(20)),
        spoken(sentence(1000), sentence(1049)),
        spoken(sentence(10), sentence(20), speakers=("gpt", "human")),
    ]
    path = write(tmp_path / "s.json", json.dumps([*dropped, kept]))
    (one,) = load_sharegpt(path, GUESSED, 1)
    assert one.turns == (Turn(prompt=sentence(10), max_tokens=20),)
    (whole,) = load_sharegpt(path, GUESSED, 1, turns=5)
    assert [(turn.prompt, turn.max_tokens) for turn in whole.turns] == [
        (sentence(10), 20), (sentence(30), 40)
    ]  # fmt: skip
    prompts = {one.turns[0].prompt for one in load_sharegpt(path, GUESSED, 50, output_tokens=7)}
    assert prompts == {sentence(10), sentence(1000)}


def test_a_small_file_is_used_again_and_its_order_is_drawn(tmp_path: Path) -> None:
    many = [spoken(sentence(5 + n), sentence(9)) for n in range(20)]
    path = write(tmp_path / "s.json", json.dumps(many))
    first, second = (load_sharegpt(path, GUESSED, 20, seed=seed) for seed in (1, 2))
    assert first != second
    assert sorted(str(one.turns[0].prompt) for one in first) == sorted(
        str(one.turns[0].prompt) for one in second
    )
    assert len(load_sharegpt(path, GUESSED, 30)) == 30


def test_lines_of_messages_are_read_too(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": sentence(9)}, {"role": "assistant", "content": sentence(8)}
    ]  # fmt: skip
    path = write(tmp_path / "s.jsonl", json.dumps({"messages": messages}) + "\n\n")
    (one,) = load_sharegpt(path, GUESSED, 1)
    assert one.turns == (Turn(prompt=sentence(9), max_tokens=8),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file"),
        ("[1]", "isn't in ShareGPT's form"),
        ("nonsense", "isn't in ShareGPT's form"),
        ("[]", "no conversation of a fitting length"),
    ],
)
def test_files_of_conversations_that_are_none_are_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_sharegpt(path, GUESSED, 1)


# -- traces


MOONCAKE = """\
{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 9]}
{"timestamp": 30535, "input_length": 1200, "output_length": 26, "hash_ids": [46, 47, 10]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""
AZURE_LINES = """\
{"TIMESTAMP": "2024-05-12T00:00:00.003700Z", "ContextTokens": 4808, "GeneratedTokens": 10}
{"TIMESTAMP": "2024-05-12T00:00:00.055700Z", "ContextTokens": 110, "GeneratedTokens": 27}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
"""
OWN = '[{"timestamp": 2.5, "input_tokens": 3, "output_tokens": 4}, {"timestamp": 1, \
"messages": [{"role": "user", "content": "hi"}], "completion_tokens": 5}]'


@pytest.mark.parametrize(
    ("content", "gap", "lengths"),
    [
        (MOONCAKE, 3.053, [(1030, 52), (1200, 26)]),
        (AZURE, 0.052, [(4808, 10), (110, 27)]),
        (AZURE_LINES, 0.052, [(4808, 10), (110, 27)]),
        (BURSTGPT, 40.0, [(472, 18), (1087, 230)]),
        (OWN, 1.5, [(0, 5), (3, 4)]),
    ],
    ids=["mooncake", "azure", "azure lines", "burstgpt", "own"],
)
def test_traces_are_read_in_the_forms_that_there_are(
    tmp_path: Path, content: str, gap: float, lengths: list[tuple[int, int]]
) -> None:
    path = write(tmp_path / "trace", content)
    rows = load_trace(path)
    assert rows[1].at - rows[0].at == pytest.approx(gap, abs=1e-5)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == lengths
    assert load_trace(path, most=1) == rows[:1]


def test_the_unit_of_a_traces_times_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", MOONCAKE)
    assert load_trace(path, unit="s")[0].at == 27482
    path = write(tmp_path / "trace", BURSTGPT)
    assert load_trace(path, unit="ms")[0].at == 0.005


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Machine with clocks hours from UTC that change in the night of 2023-11-05."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    "dates",
    [
        ("2023-11-05T00:30:00.5", "2023-11-05T03:30:00.500"),
        ("2023-11-05 00:30:00+00:00", "2023-11-05 03:30:00.0000000+00:00"),
        ("2023-11-05T00:30:00.9799600", "2023-11-05T03:30:00.9799600Z"),
        ("2023-11-05T00:30:00.5+00:00", "2023-11-05T04:30:00.50+01:00"),
    ],
)
def test_dates_are_told_apart_by_their_zone_and_not_by_their_digits(
    new_york: None, tmp_path: Path, dates: tuple[str, str]
) -> None:
    lines = [json.dumps({"timestamp": d, "input_tokens": 1, "output_tokens": 1}) for d in dates]
    first, second = load_trace(write(tmp_path / "trace", "\n".join(lines)))
    assert second.at - first.at == pytest.approx(3 * 3600, abs=1e-5)


@pytest.mark.parametrize("texts", [GUESSED, "counted"])
def test_equal_blocks_of_a_trace_are_equal_text(
    texts: Texts | str, counted: CountedTexts, tmp_path: Path
) -> None:
    source = counted if isinstance(texts, str) else texts
    rows = load_trace(write(tmp_path / "trace", MOONCAKE))
    first, second = (str(one.turns[0].prompt) for one in trace_work(rows, source))
    assert first[:3000] == second[:3000]
    assert first.split()[1025:] != second.split()[1025:1030]
    if source is counted:
        assert abs(counted.count(first) - 1030) <= 3
        assert abs(counted.count(second) - 1200) <= 3
    else:
        assert (len(first.split()), len(second.split())) == (1030, 1200)


def test_lengths_are_scaled_with_the_blocks_in_common(tmp_path: Path) -> None:
    rows = scaled_lengths(load_trace(write(tmp_path / "trace", MOONCAKE)), 0.1)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(103, 5), (120, 3)]
    first, second = (str(one.turns[0].prompt).split() for one in trace_work(rows, GUESSED))
    assert (len(first), len(second)) == (103, 120)
    assert first[:102] == second[:102]  # two blocks of 51
    (row,) = scaled_lengths([TraceRow(at=0.0, input_tokens=0, output_tokens=3, prompt="it")], 0.1)
    assert (row.input_tokens, row.output_tokens, row.prompt) == (0, 1, "it")


def test_rows_without_blocks_are_words_of_their_own() -> None:
    rows = [TraceRow(at=0.0, input_tokens=50, output_tokens=1)] * 2
    first, second = (str(one.turns[0].prompt) for one in trace_work(rows, GUESSED))
    assert first != second
    assert trace_work(rows, GUESSED) == trace_work(rows, GUESSED)
    whole = TraceRow(at=0.0, input_tokens=0, output_tokens=3, prompt="as it is")
    (one,) = trace_work([whole], GUESSED)
    assert one.turns == (Turn(prompt="as it is", max_tokens=3),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file"),
        ("", "holds no requests"),
        ("{", "neither JSON lines nor CSV"),
        ('{"input_length": 3, "output_length": 3}', "request 1: 'timestamp' is missing"),
        ('{"timestamp": 3, "output_length": 3}', "request 1: 'input_length' is missing"),
        ("timestamp,input_tokens,output_tokens\n1,2,3\n1,0,3\n", "request 2: lengths must be"),
        ("timestamp,input_tokens,output_tokens\nnow,2,3\n", "request 1: Invalid isoformat"),
        ("timestamp,input_tokens,output_tokens\n1,many,3\n", "request 1: invalid literal"),
    ],
)
def test_traces_that_are_none_are_refused_by_their_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "trace"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_trace(path)
