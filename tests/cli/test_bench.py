"""``trioserve bench``: its options, its errors, and whole runs against a server and an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench_command import QUICK, SHORT, fake, run
from trioserve.cli import bench, commands
from trioserve.cli.bench_options import BENCH_GROUPS, BenchOptions
from trioserve.cli.flags import bench_options, embedded_config
from trioserve.cli.parser import build_parsers, parse
from trioserve.cli.usage import UsageError
from trioserve.config import EngineConfig
from trioserve.config.options import options_of
from trioserve.protocol.machine import extra_advice

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRIOSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def options(*argv: str) -> BenchOptions:
    return bench_options(vars(parse(["bench", *argv])))


# -- options


def test_without_options_it_asks_the_server_on_this_machine() -> None:
    assert options() == BenchOptions(url="http://127.0.0.1:8000")
    assert options("https://h/v1").url == "https://h/v1"


def test_lists_are_given_at_once_or_flag_by_flag() -> None:
    assert options("--concurrency", "1", "8", "32").concurrency == (1, 8, 32)
    given = options("--request-rate", "1", "--request-rate=2.5", "--header", "A:b", "C: d")
    assert given.request_rate == (1.0, 2.5)
    assert given.header == ("A:b", "C: d")
    limits = options("--goodput", "ttft:500", "tpot:50.5", "e2el:9").limits
    assert limits == {"ttft": 500.0, "tpot": 50.5, "e2el": 9.0}
    assert options("--extra-body", '{"top_p": 0.5}').extra_fields == {"top_p": 0.5}


def test_help_shows_every_option_with_its_default() -> None:
    _, parsers = build_parsers()
    text = " ".join(parsers["bench"].format_help(everything=True).split())
    for option in options_of(BenchOptions):
        assert option.flag in text
        if option.default_text is not None:
            assert f"(default: {option.default_text})" in text
        else:
            assert option.default in (None, ())
    for group in BENCH_GROUPS.values():
        assert group.title in text


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--concurrency 8 0", "--concurrency must be a whole number of at least 1; got 0"),
        ("--concurrency many", "--concurrency must be a whole number of at least 1; got 'many'"),
        ("--request-rate 0", "--request-rate must be a number above 0; got 0"),
        ("--range-ratio 1", "--range-ratio must be a number from 0 to 0.99; got 1.0"),
        ("--cancel-rate 2", "--cancel-rate must be a number from 0 to 1; got 2.0"),
        ("--dataset books", "--dataset must be one of random, fixed, shared-prefix, chat, "),
        ("--arrivals bursts", "--arrivals must be one of poisson, constant; got 'bursts'"),
        ("--goodput ttft:fast", "--goodput must be ttft:MS, tpot:MS or e2el:MS; got 'ttft:fast'"),
        ("--header nonsense", "--header must be NAME:VALUE in one line; got 'nonsense'"),
        ("--extra-body [1]", "--extra-body must be a JSON object; got '[1]'"),
        ("--num-prompts 0", "--num-prompts must be a whole number of at least 1; got 0"),
        ("--concurrency 1 --request-rate 2", "--request-rate can't be given with --concurrency"),
        ("--trace x --request-rate 2", "--trace can't be given with --request-rate"),
        ("--max-concurrency 2", "--max-concurrency needs --request-rate or --trace"),
        ("--dataset sharegpt", "--data must be given with --dataset sharegpt"),
        ("--data x", "--data needs --dataset sharegpt"),
        ("--prompt x", "--prompt needs --dataset fixed"),
        ("--json-schema x", "--json-schema needs --dataset json"),
        ("--records", "--records needs --json"),
        ("--cancel-events 3", "--cancel-events needs --cancel-rate above 0"),
        ("--cancel-rate 1 --cancel-seconds 3 1", "--cancel-seconds must be one number, or two"),
        (
            "--cancel-rate 1 --cancel-seconds 3 --cancel-events 1",
            "--cancel-events can't be given with --cancel-seconds",
        ),
        ("--turns 3", "--turns needs --dataset chat or sharegpt"),
        ("--think-time 3", "--think-time needs --dataset chat"),
        ("--embedded m --model x", "--model needs a server, not --embedded"),
        ("--engine-option a=1", "--engine-option needs --embedded"),
        ("--embedded m http://x", "--embedded can't be given with a URL"),
        ("--embedded m --engine-option max-num-seq=3", "--engine-option: the engine has no option"),
        ("--embedded m --engine-option max-num-seqs=0", "--engine-option max_num_seqs must be a"),
        ("--mock-worker 10ms", "--mock-worker needs --embedded"),
        ("--embedded m --mock-worker soon", "--mock-worker must be a step's time"),
        ("--concurency 3", "unknown: --concurency; did you mean --concurrency?"),
        ("ftp://x", "URL: expected a URL such as http://127.0.0.1:8000, got 'ftp://x'"),
        ("--insecure", "--insecure needs a URL that begins with https://"),
        ("https://h --ca-file /no/file", "--ca-file: /no/file can't be used: "),
        ("--json /no/folder/x.json", "--json: there is no folder /no/folder"),
        ("--html /no/folder/x.html", "--html: there is no folder /no/folder"),
        ("--json /", "--json: / is a folder"),
        ("--html /", "--html: / is a folder"),
        ("--plots /dev/null/x", "--plots: /dev/null is no folder"),
        ("--request-rate inf", "--request-rate inf needs --num-prompts, since all are sent"),
        ("--request-rate 2 inf", "--request-rate inf can't be measured with other rates"),
        ("--dataset chat --think-time inf", "--think-time must be a finite number; got inf"),
        ("--cancel-rate 1 --cancel-seconds 1 inf", "--cancel-seconds must be a finite number"),
        ("--trace x --trace-speed inf", "--trace-speed must be a finite number; got inf"),
        ("--trace x --trace-scale inf", "--trace-scale must be a finite number; got inf"),
        ("--request-timeout inf", "--request-timeout must be a finite number; got inf"),
        ("--temperature inf", "--temperature must be a finite number; got inf"),
        (
            "--trace x --dataset json",
            "--dataset can't be given with --trace, which has its own prompts",
        ),
        ("--trace x --output-tokens 3", "--output-tokens can't be given with --trace, which has"),
        ("--trace x --prefix-groups 3", "--prefix-groups can't be given with --trace, which has"),
        ("--trace-speed 2", "--trace-speed needs --trace"),
        ("--trace-scale 2", "--trace-scale needs --trace"),
        ("--trace-unit ms", "--trace-unit needs --trace"),
        ("--arrivals constant", "--arrivals needs --request-rate"),
        ("--prefix-groups 2", "--prefix-groups needs --dataset shared-prefix"),
        ("--dataset json --prefix-tokens 2", "--prefix-tokens needs generated prompts"),
        ("--dataset json --input-tokens 2", "--input-tokens needs generated prompts"),
        ("--dataset fixed --prompt x --range-ratio 0.5", "--range-ratio needs generated pr"),
        ("--concurrency 2 32 --num-prompts 10", "--num-prompts must be at least 32, one for each"),
        ("--header X-A:a\tb", "--header x-a must be one line of printable characters"),
        ("--header a:b A:c", "--header a can't be given twice"),
        ("--api-key k --header authorization:b", "--header authorization can't be given twice, or"),
        ("http://me:word@h", "URL: a name and a password in it aren't sent: give --api-key or "),
        ("me:word@h:1/v1", "URL: a name and a password in it aren't sent: give --api-key or "),
        ("--embedded m --tokenizer /no/such", "--tokenizer: /no/such"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_flag_and_limit(
    argv: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "open_engine", fake)
    try:
        code = commands.main(["bench", *argv.split(" ")])
    except SystemExit as ended:
        code = int(str(ended.code))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"trioserve bench: {line}")
    assert err.count("\n") == 1


def test_plots_without_matplotlib_are_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flag, value in (("--plots", "p"), ("--html", "p.html")):
        assert commands.main(["bench", flag, str(tmp_path / value)]) == 2
        assert capsys.readouterr().err == (
            f"trioserve bench: {flag} needs matplotlib: {extra_advice('bench')}\n"
        )


def test_an_embedded_engine_takes_options_and_variables() -> None:
    given = options("--embedded", "m", "--engine-option", "max-num-seqs=3", "device=cpu")
    config = embedded_config(given, {"TRIOSERVE_DTYPE": "float32", "TRIOSERVE_DEVICE": "cuda"})
    assert config == EngineConfig("m", max_num_seqs=3, device="cpu", dtype="float32")
    assert embedded_config(options(), {}) is None
    with pytest.raises(UsageError, match="TRIOSERVE_MAX_NUM_SEQS must be a whole number"):
        embedded_config(options("--embedded", "m"), {"TRIOSERVE_MAX_NUM_SEQS": "no"})


def test_help_and_options_need_no_engine() -> None:
    program = "import sys; from trioserve.cli.flags import bench_options; "
    program += "from trioserve.cli.parser import parse; "
    program += "bench_options(vars(parse(['bench']))); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert {"trio", "tokenizers", "numpy", "rich"}.isdisjoint(done.stdout.split())


# -- whole runs


def test_an_embedded_sweep_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "open_engine", fake)
    run(
        *("--embedded", "fake", "--concurrency", "1", "3", "--goodput", "e2el:60000", *QUICK),
        *("--json", str(tmp_path / "x.json"), "--records"),
        *("--plots", str(tmp_path / "plots"), "--html", str(tmp_path / "x.html")),
    )
    out, err = capsys.readouterr()
    assert "1 stream: 6 requests in " in out
    assert "3 streams: 6 requests in " in out
    assert out.splitlines()[-3].startswith("load")
    assert "asking fake at an embedded engine" in err
    whole = json.loads((tmp_path / "x.json").read_text())
    assert whole["options"]["concurrency"] == [1, 3]
    assert whole["target"]["engine_options"] == {}
    assert whole["exact_prompt_lengths"] is True
    assert not {"api_key", "header"} & set(whole["options"])
    first, second = whole["runs"]
    for one in (first, second):
        assert one["figures"]["prompt_tokens"] == 48
        assert one["figures"]["completion_tokens"] == 36
        assert one["figures"]["good_per_second"] == one["figures"]["requests_per_second"]
        assert len(one["records"]) == 6
    assert not {r["text"] for r in first["records"]} & {r["text"] for r in second["records"]}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        *("load.png", "ttft.png", "itl.png", "timeline-1-stream.png", "timeline-3-streams.png")
    }
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")


def test_a_trace_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "open_engine", fake)
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n5,6,8\n6,10,4\n7,8,6\n")
    run(
        *("--embedded", "fake", "--trace", str(trace), "--trace-speed", "20"),
        *("--trace-scale", "0.5"),
        *("--json", str(tmp_path / "x.json"), "--records"),
    )
    (one,) = json.loads((tmp_path / "x.json").read_text())["runs"]
    records = one["records"]
    assert [record["prompt_tokens"] for record in records] == [3, 5, 4]
    assert [record["completion_tokens"] for record in records] == [4, 2, 3]
    assert [record["scheduled"] for record in records] == pytest.approx([0, 0.05, 0.1])
    assert one["label"] == "trace"
    run("--embedded", "fake", "--trace", str(tmp_path / "none"), code=1)
    assert "none can't be read: No such file" in capsys.readouterr().err


DATASETS: dict[str, tuple[str, ...]] = {
    "random": ("--range-ratio", "0.5", "--prefix-tokens", "3"),
    "fixed": ("--prompt", "Say it."),
    "shared-prefix": ("--prefix-groups", "2", "--prefix-tokens", "9"),
    "chat": ("--turns", "2"),
    "sharegpt": ("--data", "DATA", "--cancel-rate", "0.5", "--cancel-seconds", "5"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_can_be_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but json, for which the fake engine knows no grammars."""
    monkeypatch.setattr(bench, "open_engine", fake)
    conversation = [
        {"from": speaker, "value": "some words " * 4} for speaker in ("human", "gpt") * 2
    ]
    (tmp_path / "data").write_text(json.dumps([{"conversations": conversation}]))
    more = [str(tmp_path / "data") if text == "DATA" else text for text in DATASETS[name]]
    run(
        *("--embedded", "fake", "--dataset", name, *more, "--concurrency", "6"),
        *(SHORT if name in ("fixed", "sharegpt") else QUICK),
        *("--json", str(tmp_path / "x.json")),
    )
    whole = json.loads((tmp_path / "x.json").read_text())
    figures = whole["runs"][0]["figures"]
    assert (figures["failed"], figures["cancelled"]) == (0, 0)
    assert figures["completed"] == (12 if name == "chat" else 6)
    tokens = figures["prompt_tokens"] / figures["completed"]
    low, high = {
        "random": (3 + 4, 3 + 12),
        "fixed": (7, 7),
        "shared-prefix": (17, 17),
        "chat": (8, 200),
        "sharegpt": (44, 44),
    }[name]
    assert low <= tokens <= high
    if name != "random":
        assert figures["completion_tokens"] == 6 * figures["completed"]


def test_a_server_that_refuses_ignore_eos_leads_to_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "open_engine", fake)
    refused = ("--embedded", "fake", "--extra-body", '{"ignore_eos": "odd"}')
    run(*refused, *QUICK, code=1)
    assert capsys.readouterr().err.endswith("(--no-ignore-eos leaves it out)\n")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server over an engine without a model, which wants a key."""
    command = [sys.executable, "-m", "tests.support.fake_server", "serve", "fake", "--port", "0"]
    command += ["--log-level", "error", "--api-key", "secret"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].strip()
        process.kill()


def test_a_server_is_measured_over_http(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run(url, *QUICK, "--request-rate", "50", "--json", str(tmp_path / "x.json"))
    out, err = capsys.readouterr()
    assert out.startswith("50 requests/s: 6 requests in ")
    assert "0 failed, 0 left early" in out
    assert f"asking fake at {url}\n" in err
    assert "no tokenizer: prompts are nearly as long as asked" in err
    assert "secret" not in (tmp_path / "x.json").read_text()
    whole = json.loads((tmp_path / "x.json").read_text())
    assert whole["target"]["path"] == "/v1/completions"
    assert whole["runs"][0]["figures"]["completion_tokens"] == 36


def test_the_client_may_have_as_many_connections_as_the_system_allows(url: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        run(url, "--api-key", "secret", *QUICK)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_chats_whose_clients_leave_are_no_failure(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = (url + "/v1", "--api-key", "secret", "--dataset", "chat", "--turns", "2", *QUICK)
    chats += ("--output-tokens", "100")  # more than a busy machine puts into an event
    run(*chats, "--cancel-rate", "0.4", "--cancel-events", "2", "--concurrency", "6")
    first = capsys.readouterr().out.splitlines()[0]
    assert "0 failed" in first
    assert "0 left early" not in first
    run(*chats, "--cancel-rate", "1", "--cancel-events", "2", "--concurrency", "6", code=1)
    out, err = capsys.readouterr()
    assert "0 requests in" in out.splitlines()[0]
    assert "6 streams: nothing could be measured, since every client left early\n" in err


def test_failed_requests_are_told_and_exit_with_1(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("--api-key", "secret", "--model", "other", *QUICK)
    run(url, *wrong, code=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "trioserve: a request of the warm-up failed: HTTP 404: " in err
    run(url, *wrong, "--warmup", "0", code=1)
    out, _ = capsys.readouterr()
    assert "0 requests in" in out
    assert "6 failed" in out
    assert "6 x HTTP 404: HTTP 404: " in out


def test_servers_that_cannot_be_asked_are_told_in_a_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(url, code=1)
    assert capsys.readouterr().err == (
        f"trioserve: {url} refuses with 401: give the right --api-key\n"
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        run(address, code=1)
    err = capsys.readouterr().err
    assert err.startswith(f"trioserve: {address} can't be reached: ")
    assert err.endswith(": Connection refused\n")
