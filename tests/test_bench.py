"""The benchmark's own parts: what makes a run valid, its prompts, table and subprocesses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import attrs
import pytest

from bench.prompts import exact_prompts
from bench.report import Measurement, save, table
from bench.servers import Server, ServerFailed, running
from bench.throughput import InvalidRun, check, check_agreement
from trioserve.load import Record, Run, figures_of, send
from trioserve.model_files import locate, open_model


def record(text: str = "some text", tokens: int = 4, error: str = "") -> Record:
    return Record(
        started=0.0,
        chunks=[0.1, 0.4],
        first_text=0.1,
        text=text,
        prompt_tokens=8,
        completion_tokens=tokens,
        error=error,
    )


def run_of(*records: Record, duration: float = 1.0) -> Run:
    return Run(concurrency=len(records), records=list(records), duration=duration)


def test_prompts_have_exactly_the_tokens_asked_for_and_differ() -> None:
    tokenizer = open_model(locate("smollm2-135m")).load_tokenizer()
    prompts = exact_prompts(tokenizer, 20, 128, seed=3)
    assert {len(tokenizer.encode(prompt).ids) for prompt in prompts} == {128}
    assert len(set(prompts)) == 20
    assert prompts == exact_prompts(tokenizer, 20, 128, seed=3)
    assert not set(prompts) & set(exact_prompts(tokenizer, 20, 128, seed=4))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(error="HTTP 500"), "HTTP 500"),
        (record(tokens=3), "8 tokens in and 3 out"),
        (record(text=""), "no text"),
    ],
)
def test_a_run_is_invalid_if_one_answer_is_not_what_was_asked_for(
    bad: Record, message: str
) -> None:
    check("server", run_of(record(), record()), 8, 4)
    with pytest.raises(InvalidRun, match=message):
        check("server", run_of(record(), bad), 8, 4)


def test_servers_must_begin_most_answers_alike() -> None:
    ours = run_of(record("the same beginning, then a"), record("the same beginning, then b"))
    check_agreement([ours, run_of(record("the same beginning; c"), record("another"))])
    with pytest.raises(InvalidRun, match="0 of 2"):
        check_agreement([ours, run_of(record("quite different"), record("another"))])
    check_agreement([ours])


def test_the_table_has_medians_and_the_ratio_of_each_round() -> None:
    def measured(server: str, round: int, duration: float) -> Measurement:
        figures = figures_of(run_of(record(), duration=duration))
        return Measurement(server=server, round=round, figures=figures)

    # 4 tokens a run: 4, 2 and 1 tokens/s against 1, 1 and 2.
    measurements = [measured("ours", i, duration) for i, duration in enumerate((1.0, 2.0, 4.0))]
    measurements += [measured("peer", i, duration) for i, duration in enumerate((4.0, 4.0, 2.0))]
    _, _, ours, peer = table(measurements, ["ours", "peer"]).splitlines()
    assert ours.startswith("| 1 | ours | 2.0 | 4 2 1 | 1.00 | 100 · 100 | 300.0 · 300.0 | 100.0 |")
    assert peer.startswith("| 1 | peer | 1.0 | 1 1 2 | 2.00 |")


def test_results_are_saved_with_every_figure(tmp_path: Path) -> None:
    figures = figures_of(run_of(record()))
    measurement = Measurement(server="ours", round=0, figures=figures)
    text = save(tmp_path, "name", [measurement], {"scenario": {"rounds": 1}}).read_text()
    for name in (*attrs.asdict(figures), "processor", "rounds"):
        assert f'"{name}"' in text


ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "hi"}]}\\n\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def script(code: str) -> Server:
    return Server(
        name="script",
        argv=lambda port: [sys.executable, "-c", code, str(port)],
        fields={},
        versions={},
    )


async def test_a_server_runs_within_its_block_and_is_gone_after_it(tmp_path: Path) -> None:
    async with running(script(ANSWERS), tmp_path / "log") as server:
        assert (await send(server.target, {})).text == "hi"
        assert server.peak_memory_bytes() > 1 << 20
        pid = server.process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


BALLAST = """
import subprocess, sys
child = "held = b'x' * (64 << 20); print(flush=True); import time; time.sleep(60)"
worker = subprocess.Popen(
    [sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True
)
worker.stdout.readline()
try:
    exec(ANSWERS)
finally:
    worker.kill()
"""


async def test_memory_includes_a_worker_in_a_session_of_its_own(tmp_path: Path) -> None:
    stop = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); "
    code = BALLAST.replace("exec(ANSWERS)", f"{stop}exec({ANSWERS!r})")
    async with running(script(code), tmp_path / "log") as server:
        assert server.peak_memory_bytes() > 64 << 20


async def test_a_server_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no such model"):
        async with running(script("raise SystemExit('no such model')"), tmp_path / "log"):
            pytest.fail("it never was healthy")
