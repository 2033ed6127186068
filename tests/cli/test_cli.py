"""The command line: its grammar, its errors, and the processes that it starts."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import trioserve
from trioserve.cli import commands
from trioserve.cli import serve as serve_module
from trioserve.cli.flags import engine_config, sampling_fields, server_config
from trioserve.cli.parser import SAMPLING_OPTIONS, build_parsers, parse
from trioserve.cli.signals import CUT_OFF
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.options import options_of
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
from trioserve.protocol.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
SERVER_OPTIONS = [option for cls in (EngineConfig, ServerConfig) for option in options_of(cls)]
NEEDED = {
    "max_requests_per_key": {"TRIOSERVE_API_KEY": "key"},
    "priority_api_key": {"TRIOSERVE_API_KEY": "key"},
    "kv_offloading_dir": {"TRIOSERVE_KV_OFFLOADING_BYTES": "1GiB"},
    "worker_listen": {"TRIOSERVE_WORKER_TLS": "folder"},
    "pipeline_parallel_layers": {"TRIOSERVE_PIPELINE_PARALLEL_SIZE": "2"},
    "nnodes": {
        "TRIOSERVE_DISTRIBUTED_EXECUTOR_BACKEND": "ray",
        "TRIOSERVE_TENSOR_PARALLEL_SIZE": "1024",
    },
} | {
    name: {"TRIOSERVE_SSL_CERTFILE": "certificate"}
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
}
"""Variables without which an option is refused."""


@pytest.fixture(autouse=True)
def no_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRIOSERVE_")]:
        monkeypatch.delenv(name)


def served(*argv: str, **environment: str) -> ServerConfig:
    return server_config(vars(parse(["serve", *argv])), environment)


@pytest.mark.parametrize("option", SERVER_OPTIONS, ids=[option.name for option in SERVER_OPTIONS])
def test_a_flag_gives_what_the_variable_gives(option: Any) -> None:
    if option.kind is bool:
        flag = [option.flag if not option.default else option.flag.replace("--", "--no-", 1)]
        text = str(not option.default)
    else:
        text = option.choices[-1] if option.choices else "x" if option.kind is str else "1024"
        text = "1" if option.high == 1 else text
        text = "http://x" if option.metavar in ("URL", "ORIGIN") else text
        text = "a=/b" if option.metavar == "NAME=PATH" else text
        text = "[::1]:7000" if option.metavar == "ADDRESS:PORT" else text
        text = "cuda:1" if option.metavar == "DEVICE" else text
        text = "3,2" if option.metavar == "N,N" else text
        text = '{"top_k": 5}' if option.metavar == "JSON" else text
        text = '{"image": 5}' if option.metavar in ("COUNTS", "ARGUMENTS") else text
        text = '{"video": {"fps": 5}}' if option.metavar == "SAMPLING" else text
        text = '{"method": "ngram"}' if option.metavar == "OBJECT" else text
        flag = [option.flag, text]
    needed = NEEDED.get(option.name, {})
    by_flag = served(*flag, **needed)
    by_variable = served(**{**needed, option.environment: text})
    assert by_flag == by_variable != served(**needed)


def test_a_flag_wins_over_its_variable_and_lists_are_spelled_twice() -> None:
    config = served(
        "--port", "1", "--api-key", "a", "--api-key=b", TRIOSERVE_PORT="2", TRIOSERVE_API_KEY="c,d"
    )
    assert config.port == 1
    assert config.api_key == ("a", "b")
    assert served(TRIOSERVE_API_KEY="c, d").api_key == ("c", "d")
    assert served("--max-body-size", "2MiB").max_body_size == 2 << 20


def test_the_model_is_named_chosen_by_a_variable_or_the_default() -> None:
    assert served().engine.model == "smollm2-135m"
    assert served(TRIOSERVE_MODEL="org/name").engine.model == "org/name"
    assert served("--port", "1", "here.gguf", TRIOSERVE_MODEL="m").engine.model == "here.gguf"


def test_arguments_and_flags_stand_in_any_order() -> None:
    arguments = vars(parse(["generate", "m", "--max-tokens", "5", "hello", "--seed", "-3"]))
    assert (arguments["model"], arguments["prompt"]) == ("m", "hello")
    assert sampling_fields(arguments) == {"max_tokens": 5}
    assert engine_config(arguments, {}).seed == -3


def test_sampling_flags_are_fields_of_the_sampling_parameters() -> None:
    texts = {"top_p": "0.5", "min_p": "0.5", "stop": "END", "min_tokens": "3"}
    argv = ["chat"]
    for option in SAMPLING_OPTIONS:
        argv += [option.flag] if option.kind is bool else [option.flag, texts.get(option.name, "2")]
    fields = sampling_fields(vars(parse([*argv, "--max-tokens", "9"])))
    assert set(fields) == {option.name for option in SAMPLING_OPTIONS}
    params = SamplingParams(**fields)
    assert (params.max_tokens, params.stop, params.ignore_eos) == (9, ("END",), True)
    assert sampling_fields(vars(parse(["chat"]))) == {}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("serve --max-num-seqs 0", "--max-num-seqs must be a whole number of at least 1; got 0"),
        ("serve --port many", "--port must be a whole number from 0 to 65535; got 'many'"),
        ("serve --max-num-seq 3", "unknown: --max-num-seq; did you mean --max-num-seqs?"),
        ("serve --port", "argument --port: expected one argument"),
        ("serve a b", "unknown: b"),
        ("generate m x --temperature -1", "--temperature must be a number from 0 to 100, got -1.0"),
        ("generate m x --top-k few", "--top-k must be a whole number; got 'few'"),
        ("generate m ", "the prompt is empty"),
        ("chat --url h --dtype float32", "--dtype is for a model that is loaded here"),
        ("chat --api-key x", "--api-key needs --url"),
        ("chat --url ftp://h", "URL: expected a URL such as"),
        ("chat --url http://me:word@h", "URL: a name and a password in it aren't sent"),
        ("generate", "the following arguments are required: MODEL"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(argv: str, line: str) -> None:
    code, out, err = run_cli(*argv.split(" "))
    assert code == 2
    assert out == ""
    assert err.startswith(f"trioserve {argv.split()[0]}: {line}")
    assert err.count("\n") == 1


def run_cli(
    *argv: str, environment: dict[str, str] | None = None, stdin: str = ""
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "trioserve", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_wrong_variable_is_named() -> None:
    environment = {"TRIOSERVE_PORT": "99999", "TRIOSERVE_PROT": "1"}
    code, _, err = run_cli("serve", environment=environment)
    assert code == 2
    assert err.splitlines() == [
        "trioserve: TRIOSERVE_PROT is no option; did you mean TRIOSERVE_PORT?",
        "trioserve serve: TRIOSERVE_PORT must be a whole number from 0 to 65535; got 99999",
    ]


def test_no_command_shows_the_commands_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.main([])
    assert caught.value.code == 2
    assert "serve a model over HTTP" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        commands.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"trioserve {trioserve.__version__}\n"


def test_help_fits_a_terminal_and_shows_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, commands = build_parsers()
    for command in commands.values():
        for everything in (False, True):
            lines = command.format_help(everything=everything).splitlines()
            assert max(map(len, lines)) <= 80
    text = " ".join(commands["serve"].format_help(everything=True).split())
    for option in SERVER_OPTIONS:
        assert option.flag in text
        if option.default_text is not None:
            assert f"(default: {option.default_text})" in text


def test_a_dump_that_is_asked_for_too_early_does_not_end_the_server() -> None:
    code = """
import os, signal, sys

class Asking:
    def find_spec(self, name, *_):
        if name == "trioserve.cli.serve":
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Asking())
sys.argv = ["trioserve", "serve", "/no/such/model"]
from trioserve.cli.commands import run
run()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr


def test_a_model_that_is_not_there_is_one_line() -> None:
    code, out, err = run_cli("serve", "/nowhere/model.gguf", "--log-format", "console")
    assert code == 1
    assert out == ""
    assert err == (
        "trioserve: /nowhere/model.gguf doesn't exist: no folder, file or Hub id has that name\n"
    )


class FakeServe:
    """Stands where trioserve.serve does: reports progress, listens, waits for the shutdown."""

    def __init__(
        self, *, then: Callable[[trio.Event], Any], starts: bool = True, num_cut: int = 0
    ) -> None:
        self.then = then
        self.starts = starts
        self.num_cut = num_cut
        self.cancelled = False

    async def __call__(
        self,
        config: ServerConfig,
        *,
        shutdown: trio.Event,
        on_progress: Any,
        mock: Any,
        task_status: Any,
    ) -> int:
        assert mock is None
        on_progress(wire.LoadingProgress(stage="weights", done=1, total=2))
        on_progress(wire.LoadingProgress(stage="weights", done=2, total=2))
        if self.starts:
            task_status.started(["http://127.0.0.1:1"])
        try:
            with trio.fail_after(30):
                await self.then(shutdown)
        except trio.Cancelled:
            self.cancelled = True
            raise
        return self.num_cut


@pytest.fixture
def serve_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeServe], int]]:
    def run(fake: FakeServe) -> int:
        monkeypatch.setattr(serve_module, "serve", fake)
        config = ServerConfig(engine=EngineConfig("a-model"), served_model_name="name")
        return trio.run(serve_module.run_server, config)

    # The tests themselves may run under nohup, which the server would keep to.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield run
    signal.signal(signal.SIGHUP, before)


def kill_this_process(*numbers: int) -> Callable[[trio.Event], Any]:
    async def then(shutdown: trio.Event) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            await trio.testing.wait_all_tasks_blocked(0.01)
        await shutdown.wait()
        if len(numbers) > 1:
            await trio.sleep_forever()

    return then


Serve = Callable[[FakeServe], int]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_drains(
    number: int, serve_as: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServe(then=kill_this_process(number))
    assert serve_as(fake) == 0
    assert not fake.cancelled
    assert capsys.readouterr().out == "Serving name at http://127.0.0.1:1\n"


def test_the_exit_code_says_whether_requests_were_cut_off(serve_as: Serve) -> None:
    fake = FakeServe(then=kill_this_process(signal.SIGTERM), num_cut=2)
    assert serve_as(fake) == CUT_OFF == 3


def test_a_server_that_outlives_its_terminal_keeps_to_that(serve_as: Serve) -> None:
    """As under nohup, the signal is ignored before the server starts."""

    async def then(shutdown: trio.Event) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not shutdown.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await shutdown.wait()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert serve_as(FakeServe(then=then)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_ends_at_once(serve_as: Serve) -> None:
    fake = FakeServe(then=kill_this_process(signal.SIGINT, signal.SIGTERM))
    assert serve_as(fake) == 128 + signal.SIGTERM
    assert fake.cancelled


def test_a_signal_while_loading_ends_at_once(serve_as: Serve) -> None:
    fake = FakeServe(then=kill_this_process(signal.SIGTERM), starts=False)
    assert serve_as(fake) == 128 + signal.SIGTERM
    assert fake.cancelled


def test_an_error_comes_out_of_the_server_unwrapped(serve_as: Serve) -> None:
    async def fail(_: trio.Event) -> None:
        raise EngineError("the worker died")

    with pytest.raises(EngineError, match="the worker died"):
        serve_as(FakeServe(then=fail))


def test_handlers_of_signals_are_as_before(serve_as: Serve) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    serve_as(FakeServe(then=kill_this_process(signal.SIGTERM)))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_generate_prints_the_continuation_of_a_prompt_from_stdin() -> None:
    argv = ["generate", "smollm2-135m", "--temperature", "0", "--max-tokens", "3"]
    code, out, err = run_cli(*argv, stdin="The capital of France is\n")
    assert code == 0, err
    assert "Paris" in out


def test_chat_answers_the_lines_of_a_pipe() -> None:
    argv = ["chat", "smollm2-135m", "--temperature", "0", "--max-tokens", "12"]
    question = "What is the capital of France?\n"
    code, out, err = run_cli(*argv, "--system", "Answer in English.", stdin=question)
    assert code == 0, err
    assert "Paris" in out
    assert " tokens, " in err


@pytest.mark.parametrize(
    "argv",
    [("generate", "smollm2-135m", "Once", "--max-tokens", "3"), ("doctor",), ("doctor", "--json")],
)
def test_output_that_can_not_be_written_is_one_line(argv: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "trioserve", *argv]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    line = "trioserve: the output can't be written: No space left on device\n"
    assert done.returncode == 1
    # A machine without compiled kernels is told so before.
    assert done.stderr.endswith(line)
    before = done.stderr.removesuffix(line).splitlines()
    assert all("in place of the compiled kernels" in each for each in before)


def test_doctor_finds_this_machine_fit() -> None:
    code, out, err = run_cli("doctor", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["healthy"] is True
    facts = {fact["name"]: fact for fact in itertools.chain(*report["sections"].values())}
    assert facts["trioserve"]["value"] == trioserve.__version__
    assert facts["cuda available"]["value"] in ("yes", "no")
    assert facts["smollm2-135m"]["state"] == "ok"


def test_the_server_process_serves_and_drains() -> None:
    command = [sys.executable, "-m", "trioserve", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            name, _, url = line.removeprefix("Serving ").partition(" at ")
            assert name == "smollm2-135m"
            address = url.strip().removeprefix("http://")
            connection = http.client.HTTPConnection(address, timeout=10)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
        finally:
            server.kill()
