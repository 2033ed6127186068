"""The benchmark's own parts: what makes a run valid, its prompts and subprocesses."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import attrs
import pytest
import trio

from bench.compare import scenarios
from bench.compare.scenarios import CpuAfterLeave, InvalidRun, check, check_agreement
from bench.report import Rounds, run_script
from bench.servers import Server, ServerFailed, exact_prompts, running, tokenizer
from trioserve.load import Conversation, Record, Run, Turn, send


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
    prompts = exact_prompts(20, 128, seed=3)
    assert {len(tokenizer().encode(prompt).ids) for prompt in prompts} == {128}
    assert len({prompt[:20] for prompt in prompts}) == 20
    assert prompts == exact_prompts(20, 128, seed=3)
    for seed in (4, -3):
        assert not set(prompts) & set(exact_prompts(20, 128, seed=seed))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(error="HTTP 500"), "HTTP 500"),
        (record(tokens=3), "3 tokens out, not 4"),
        (attrs.evolve(record(), prompt_tokens=9), "9 tokens in, not 8"),
        (record(text=""), "no text"),
    ],
)
def test_a_run_is_invalid_if_one_answer_is_not_what_was_asked_for(
    bad: Record, message: str
) -> None:
    (prompt,) = exact_prompts(1, 8, seed=3)
    work = [Conversation(turns=(Turn(prompt=prompt, max_tokens=4),))]
    check(run_of(record(), record()), work)
    with pytest.raises(InvalidRun, match=message):
        check(run_of(record(), bad), work)
    left = attrs.evolve(bad, error="", cancelled=True)
    check(run_of(left), work)


def test_servers_must_begin_many_answers_alike() -> None:
    ours = ["the same beginning, then a", "the same beginning, then b"]
    one = {"ours": ours, "peer": ["the same beginning; c", "another"]}
    none = {"ours": ours, "same": ours, "peer": ["quite different", "another"]}
    check_agreement([one], "ours")
    check_agreement([none, {"ours": ours, "peer": ours}], "ours")
    with pytest.raises(InvalidRun, match="0 of 2 answers begin alike on ours and peer"):
        check_agreement([none], "ours")
    check_agreement([one, none], "ours")
    with pytest.raises(InvalidRun, match="1 of 6 answers"):
        check_agreement([one, none, none], "ours")
    check_agreement([{"ours": ours}, {"peer": ours}, {}], "ours")


def test_a_script_saves_its_table_with_the_machine_and_what_was_asked(tmp_path: Path) -> None:
    def measure(options: argparse.Namespace) -> str:
        return f"| {options.rounds} | {options.sizes} |"

    arguments = ["--sizes", "3", "4", "--save", str(tmp_path / "new")]
    assert run_script("name", measure, arguments, rounds=2, sizes=[1], quick=False) == 0
    saved = json.loads((tmp_path / "new" / "name.json").read_text())
    assert saved["table"] == "| 2 | [3, 4] |"
    assert saved["options"] == {"rounds": 2, "sizes": [3, 4], "quick": False}
    assert {"time", "machine", "versions"} <= saved.keys()


def test_figures_are_medians_and_ratios_are_of_the_same_round() -> None:
    rounds = Rounds()
    for ours, theirs in ((4.0, 2.0), (9.0, 3.0), (2.0, 2.0)):
        rounds.add("ours", rate=ours)
        rounds.add("theirs", rate=theirs)
    assert rounds.medians() == {"ours": {"rate": 4.0}, "theirs": {"rate": 2.0}}
    assert rounds.ratio("ours", "theirs", "rate") == 2.0


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


async def test_a_server_runs_within_its_block_and_is_gone_after_it() -> None:
    async with running(script(ANSWERS)) as server:
        assert (await send(server.target, {})).text == "hi"
        assert server.started < trio.current_time()
        assert server.family.pss_bytes() > 1 << 20
        assert server.family.cpu_seconds() > 0
        pid = server.process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


BALLAST = """
import signal, subprocess, sys
child = '''
import time
held = b'x' * (64 << 20)
until = time.process_time() + 0.3
while time.process_time() < until: pass
print(flush=True); time.sleep(60)
'''
worker = subprocess.Popen(
    [sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True
)
worker.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
try:
    exec(ANSWERS)
finally:
    worker.kill()
"""


async def test_memory_and_cpu_include_a_worker_in_a_session_of_its_own() -> None:
    code = BALLAST.replace("exec(ANSWERS)", f"exec({ANSWERS!r})")
    async with running(script(code)) as server:
        assert server.family.pss_bytes() > 64 << 20
        assert server.family.pss_bytes("Pss_Anon") > 64 << 20
        assert 0 < server.family.pss_bytes("Pss_File") < 64 << 20
        assert server.family.peak_resident_bytes() > 64 << 20
        assert server.family.cpu_seconds() > 0.3


async def test_a_server_that_dies_is_reported_with_its_last_lines() -> None:
    with pytest.raises(ServerFailed, match="no such model"):
        async with running(script("raise SystemExit('no such model')")):
            pytest.fail("it never was healthy")


# Streams for ever; once a client has left, it computes for 0.4 s more.
BURNS = """
import http.server, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.send_response(200); self.end_headers()
        try:
            while True:
                self.wfile.write(b'data: {"choices": [{"text": "hi"}]}\\n\\n'); time.sleep(0.01)
        except OSError:
            until = time.thread_time() + 0.4
            while time.thread_time() < until: pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_what_is_burnt_after_clients_have_left_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scenarios, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(scenarios, "QUIET_SECONDS", 0.6)
    (turn,) = CpuAfterLeave(clients=2, prompt_tokens=4).turns(0)
    async with running(script(BURNS)) as server:
        taken = await turn.measure(server)
    # Twice 0.4 s, and what Python's lock costs two threads that compute; ticks are 10 ms.
    assert 0.7 < taken.values["burnt_cpu_seconds"] < 2.0


async def test_clients_that_are_served_one_after_the_other_measure_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scenarios, "IDLE_SECONDS", 0.2)
    (turn,) = CpuAfterLeave(clients=2, prompt_tokens=4).turns(0)
    ends = ANSWERS.replace('"text": "hi"', '"text": "hi", "finish_reason": "length"')
    async with running(script(ends)) as server:
        with pytest.raises(InvalidRun, match="not all streams ran at the same time"):
            await turn.measure(server)
