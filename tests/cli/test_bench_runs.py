"""``trioserve bench``: runs that end early, traces, odd servers, and what is told all the same."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_command import EMBEDDED, QUICK, fake, run
from trioserve.cli import bench
from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.bench_points import is_chat, points_of, read_trace, streams_of
from trioserve.load.measure import MeasureError, measure
from trioserve.load.sharegpt import DataError
from trioserve.load.texts import GuessedTexts


@pytest.fixture(autouse=True)
def an_engine_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRIOSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(bench, "open_engine", fake)


# -- results of a part of what was to be measured


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (MeasureError("it is gone"), 1)]
)
def test_what_was_measured_before_a_later_point_ended_everything_is_written(
    error: BaseException,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def some(target: Any, point: Any, **more: Any) -> Any:
        if point.concurrency == 2:
            raise error
        return await measure(target, point, **more)

    monkeypatch.setattr(bench, "measure", some)
    file, page = tmp_path / "x.json", tmp_path / "x.html"
    outputs = ("--json", str(file), "--html", str(page), "--plots", str(tmp_path / "plots"))
    run(*EMBEDDED, "--concurrency", "1", "2", "3", *outputs, code=code)
    whole = json.loads(file.read_text())
    assert [one["label"] for one in whole["runs"]] == ["1 stream"]
    assert whole["not_measured"] == ["2 streams", "3 streams"]
    assert page.exists()
    assert (tmp_path / "plots" / "timeline-1-stream.png").exists()
    err = capsys.readouterr().err
    assert "not measured: 2 streams; 3 streams\n" in err
    assert "Traceback" not in err
    assert code == 130 or err.endswith("trioserve: it is gone\n")


def test_nothing_is_written_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any, **__: Any) -> None:
        raise MeasureError("it is gone")

    monkeypatch.setattr(bench, "warm_up", none)
    run(*EMBEDDED, "--json", str(tmp_path / "x.json"), code=1)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_a_failure_with_the_name_of_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(*EMBEDDED, "--json", "/dev/full", code=1)
    assert "/dev/full can't be written: No space left on device" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for flag, name in (("--json", "x.json"), ("--html", "x.html"), ("--plots", "a/b")):
        run(*EMBEDDED, flag, str(tmp_path / name), code=2)
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"trioserve bench: {flag}: {tmp_path} can't be written to\n")


def test_equal_points_are_told_apart(tmp_path: Path) -> None:
    outputs = ("--json", str(tmp_path / "x.json"), "--plots", str(tmp_path))
    run(*EMBEDDED, "--concurrency", "2", "2", "1", "2", *outputs)
    labels = [one["label"] for one in json.loads((tmp_path / "x.json").read_text())["runs"]]
    assert labels == ["2 streams", "2 streams (2)", "1 stream", "2 streams (3)"]
    timelines = {path.name for path in tmp_path.glob("timeline-*")}
    assert timelines == {
        *("timeline-1-stream.png", "timeline-2-streams.png"),
        *("timeline-2-streams-2.png", "timeline-2-streams-3.png"),
    }


# -- points


def test_all_requests_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*EMBEDDED, "--request-rate", "inf", "--json", str(tmp_path / "x.json"), "--records")
    assert capsys.readouterr().out.startswith("all at once: 6 requests in ")
    (one,) = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert {record["scheduled"] for record in one["records"]} == {0.0}
    assert one["figures"]["rate"] is None


def test_fewer_prompts_than_streams_are_fewer_streams_by_default() -> None:
    assert streams_of(BenchOptions(num_prompts=3)) == (3,)
    assert streams_of(BenchOptions(num_prompts=30)) == streams_of(BenchOptions()) == (8,)


def test_prompts_are_made_in_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by: list[threading.Thread] = []

    def made(*given: Any) -> Any:
        made_by.append(threading.current_thread())
        return points_of(*given)

    monkeypatch.setattr(bench, "points_of", made)
    run(*EMBEDDED)
    assert made_by != [threading.main_thread()]
    # The line that a terminal sees meanwhile is in no file.
    assert capsys.readouterr().err == "asking fake at an embedded engine\n"


# -- traces


def rows(tmp_path: Path, *rows: dict[str, Any]) -> str:
    file = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 0, "output_tokens": 40, "input_tokens": 4, **row} for row in rows)
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_clients_of_a_trace_leave_too(tmp_path: Path) -> None:
    # Enough tokens for clients to leave in time, though a busy machine joins chunks.
    trace = rows(tmp_path, *[{"output_tokens": 400}] * 6)
    options = BenchOptions(trace=trace, cancel_rate=0.5, seed=1)
    (point,), _ = points_of(options, GuessedTexts())
    leaving = [turn.cancel for one in point.work for turn in one.turns if turn.cancel]
    assert 0 < len(leaving) < 6
    assert all(cancel.events is not None and 1 <= cancel.events <= 200 for cancel in leaving)
    run(
        *("--embedded", "fake", "--trace", trace, "--cancel-rate", "0.5", "--seed", "1"),
        *("--json", str(tmp_path / "x.json")),
    )
    (one,) = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert one["figures"]["cancelled"] == len(leaving)


def test_clients_leave_in_the_first_half_of_each_answer(tmp_path: Path) -> None:
    trace = rows(tmp_path, *({"output_tokens": n} for n in (1, 2, 3, 8, 400) * 20))
    (point,), _ = points_of(BenchOptions(trace=trace, cancel_rate=1.0), GuessedTexts())
    drawn: dict[int, set[int]] = {}
    for one in point.work:
        (turn,) = one.turns
        assert turn.cancel is not None
        assert turn.cancel.events is not None
        drawn.setdefault(turn.max_tokens or 0, set()).add(turn.cancel.events)
    assert drawn[1] == drawn[2] == drawn[3] == {1}
    assert drawn[8] == {1, 2, 3, 4}
    assert 100 < max(drawn[400]) <= 200


USER = {"role": "user", "content": "hi"}


def test_a_trace_with_messages_is_a_chats(tmp_path: Path) -> None:
    options = BenchOptions(trace=rows(tmp_path, {}, {"messages": [USER]}))
    assert is_chat(options, read_trace(options))
    asked = BenchOptions(trace=options.trace, endpoint="completions")
    assert not is_chat(asked, read_trace(asked))
    plain = BenchOptions(trace=rows(tmp_path, {}, {"prompt": "hi"}))
    assert not is_chat(plain, read_trace(plain))


CALL = {"role": "assistant", "tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize(
    ("messages", "endpoint", "reason"),
    [
        ([USER, CALL], "completions", "a message with no text can be sent to a chat"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "completions",
            "a message with no text can be sent to a chat",
        ),
        ([USER, "hi"], "auto", "a message must be an object with a role; got 'hi'"),
        ([{"content": "hi"}], "auto", "a message must be an object with a role; got "),
    ],
)
def test_messages_that_cannot_be_sent_are_told_before_the_run(
    messages: list[Any],
    endpoint: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = rows(tmp_path, {"messages": [USER]}, {"messages": messages})
    run("--embedded", "fake", "--trace", trace, "--endpoint", endpoint, code=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"trioserve: {trace}, request 2")
    assert reason in err


def test_a_chat_may_have_messages_without_a_text(tmp_path: Path) -> None:
    options = BenchOptions(trace=rows(tmp_path, {"messages": [USER, CALL]}))
    (point,), _ = points_of(options, GuessedTexts())
    assert point.work[0].turns[0].messages == (USER, CALL)
    with pytest.raises(DataError, match="can't be read"):
        points_of(BenchOptions(trace=str(tmp_path / "none")), GuessedTexts())


# -- servers


Answer = Callable[[dict[str, Any]], bytes]
"""The events with which a server answers a request's body."""


@contextlib.contextmanager
def serving(answer: Answer, seen: list[list[tuple[str, str]]] | None = None) -> Iterator[str]:
    """Open a server of its own thread. ``seen`` gets the headers of every request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(b'{"data": [{"id": "one"}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.reply(answer(json.loads(body)))

        def reply(self, body: bytes) -> None:
            if seen is not None:
                seen.append([(name.lower(), value) for name, value in self.headers.items()])
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*, usage: bool) -> bytes:
    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    counts = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
    shown = [{"choices": [choice]}, *([counts] if usage else [])]
    texts = [json.dumps(event) for event in shown]
    return "".join(f"data: {text}\n\n" for text in [*texts, "[DONE]"]).encode()


UNCOUNTED = "trioserve: the server counts no tokens (usage at the end of the stream): "


@pytest.mark.parametrize("warm_ups", ["1", "0"])
def test_a_server_that_counts_no_tokens_is_told_in_a_line(
    warm_ups: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And by the warm-up already, where there is one."""
    asked: list[int] = []

    def answer(body: dict[str, Any]) -> bytes:
        asked.append(body["max_tokens"])
        return events(usage=False)

    with serving(answer) as url:
        run(url, *QUICK, "--warmup", warm_ups, code=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"{UNCOUNTED}give --tokenizer"
    assert "Traceback" not in err
    assert len(asked) == (1 if warm_ups == "1" else 6)


def test_one_answer_without_a_count_fails_and_loses_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def answer(body: dict[str, Any]) -> bytes:
        asked.append(body["max_tokens"])
        return events(usage=len(asked) != 3)

    with serving(answer) as url:
        run(url, *QUICK, "--warmup", "1", "--json", str(tmp_path / "x.json"), code=1)
    (one,) = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert (one["figures"]["completed"], one["figures"]["failed"]) == (5, 1)
    assert "1 x no usage: the server named no number of tokens" in capsys.readouterr().out


def test_a_header_is_sent_once_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    seen: list[list[tuple[str, str]]] = []
    with serving(lambda _: events(usage=True), seen) as url:
        run(url, *QUICK, "--header", "authorization:Basic abc", "accept: text/plain")
    for headers in seen:
        assert [value for name, value in headers if name == "authorization"] == ["Basic abc"]
        assert [value for name, value in headers if name == "accept"] == ["text/plain"]


def test_a_key_of_several_lines_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    run(code=2)
    assert capsys.readouterr().err == (
        "trioserve bench: $OPENAI_API_KEY must be one line of printable characters\n"
    )
    run("--api-key", "secret\n", code=2)
    assert capsys.readouterr().err.startswith("trioserve bench: --api-key must be one line")
