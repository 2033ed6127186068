"""Comparisons: the order of measurements, failures, tables and targets."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import trio

from bench.compare import __main__ as compare
from bench.compare import contest, scenarios
from bench.compare.__main__ import parts_of, table_name
from bench.compare.contest import Notes, Row, busy_cases, ratios, table
from bench.compare.scenarios import (
    PROMPTS,
    SHARED_PREFIX,
    THROUGHPUT,
    Burst,
    CpuAfterLeave,
    InvalidRun,
    Loads,
    Setting,
    Taken,
    Turn,
    options_of,
)
from bench.compare.targets import judge
from bench.peers.model_files import gguf_file
from bench.peers.servers import own_server
from bench.report import Verdict, verdict_table
from bench.servers import Running, Server, ServerFailed, exact_prompts, running
from trioserve.cli.bench_points import points_of
from trioserve.cli.usage import UsageError

OTHERS = ("llama.cpp", "vllm")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests measure nothing: they needn't wait until the machine has nothing else to do."""
    monkeypatch.setattr(contest, "_CALM_PATIENCE", 0.1)


def healthy(name: str) -> Server:
    """Open a server that only says that it is well."""
    code = (
        "import http.server as h, sys\n"
        "class Handler(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()"
    )
    argv = [sys.executable, "-c", code if name != "dead" else "raise SystemExit('no luck')"]
    return Server(
        name=name, format="bf16", argv=lambda port: [*argv, str(port)], fields={}, versions={}
    )


@attrs.define
class Fake:
    """A scenario without requests; each turn takes ``seconds``."""

    name: str = "fake"
    seconds: float = 0.0
    answers: dict[str, str] = attrs.field(factory=dict)
    asked: list[tuple[int, str]] = attrs.field(factory=list)
    alone: bool = False

    def warm_up(self) -> list[Turn]:
        return []

    def turns(self, round: int) -> list[Turn]:
        async def measure(one: Running) -> Taken:
            self.asked.append((round, one.server.name))
            await trio.sleep(self.seconds)
            answer = self.answers.get(one.server.name, "the same answer")
            if answer == "none":
                raise InvalidRun("it says nothing")
            return Taken(values={"rate": 1.0}, answers=[answer])

        return [Turn(case="one", measure=measure)]


async def contest_of(names: Sequence[str], scenario: Fake, **options: float) -> Notes:
    notes = Notes()
    servers = [healthy(name) for name in names]
    await contest.contest(
        servers,
        [scenario],
        notes,
        rounds=int(options.get("rounds", 2)),
        deadline=trio.current_time() + options.get("seconds", 60.0),
    )
    return notes


async def test_each_round_asks_everybody_and_another_one_first() -> None:
    fake = Fake()
    notes = await contest_of(["ours", "peer"], fake)
    assert fake.asked == [(0, "ours"), (0, "peer"), (1, "peer"), (1, "ours")]
    assert len(notes.rows) == 4
    assert not notes.failures
    assert notes.rows[0].values["elsewhere_cores"] >= 0
    assert "http.server" in notes.servers["fake"]["peer bf16"]["started_with"]


async def test_no_round_begins_that_will_not_end_in_time() -> None:
    fake = Fake(seconds=0.5)
    notes = await contest_of(["ours"], fake, rounds=9, seconds=0.1)
    assert [row.round for row in notes.rows] == [0]


async def test_a_failure_is_noted_and_leaves_the_others_figures() -> None:
    fake = Fake(answers={"mute": "none"})
    notes = await contest_of(["ours", "dead", "mute"], fake, rounds=1)
    assert [row.server for row in notes.rows] == ["ours"]
    dead, mute = notes.failures
    assert "no luck" in dead
    assert mute == "mute bf16: it says nothing"


async def test_figures_of_answers_that_differ_do_not_count() -> None:
    notes = await contest_of(["ours", "peer"], Fake(answers={"peer": "else"}), rounds=1)
    assert notes.rows == []
    assert "0 of 1 answers begin alike" in notes.failures[0]


class Alone:
    """A scenario whose turns start their server."""

    alone = True

    def warm_up(self) -> list[Turn]:
        return []

    def turns(self, round: int) -> list[Turn]:
        return [Turn(case="", measure=partial(self.measure, round))]


async def test_a_lonely_scenario_goes_on_after_a_server_has_failed() -> None:
    class Lonely(Alone):
        name = "lonely"

        async def measure(self, round: int, server: Server) -> Taken:
            if server.name == "dead":
                raise ServerFailed("it is gone")
            return Taken(values={"rate": float(round)})

    notes = Notes()
    servers = [healthy("ours"), healthy("dead")]
    await contest.contest(servers, [Lonely()], notes, rounds=2)
    assert [row.values["rate"] for row in notes.rows] == [0.0, 1.0]
    assert notes.failures == ["dead bf16: it is gone"] * 2


@attrs.frozen
class Computing(Alone):
    """A lonely scenario whose server's processor time is part of what the machine computes."""

    busy: list[float]
    elsewhere: float
    name: str = "computing"

    async def measure(self, round: int, server: Server) -> Taken:
        code = "import time\nwhile time.process_time() < 0.3: pass"
        await trio.run_process([sys.executable, "-c", code])
        self.busy[0] += 0.3 + self.elsewhere
        await trio.sleep(0.1)
        return Taken(values={"rate": 1.0})


@pytest.mark.parametrize(("elsewhere", "disturbed"), [(0.0, False), (30.0, True)])
async def test_a_lonely_scenario_begins_in_calm_and_knows_what_else_was_busy(
    monkeypatch: pytest.MonkeyPatch, elsewhere: float, disturbed: bool
) -> None:
    asked: list[float] = []
    busy = [0.0]

    def busy_seconds() -> float:
        # Something is busy when the first server is to start, and then ends.
        asked.append(trio.current_time())
        if len(asked) == 2:
            busy[0] += 1.0
        return busy[0]

    monkeypatch.setattr(contest, "_CALM_PATIENCE", 10.0)
    monkeypatch.setattr(contest, "busy_seconds", busy_seconds)
    monkeypatch.setattr(contest, "_CALM_SECONDS", 0.01)
    notes = Notes()
    scenario = Computing(busy=busy, elsewhere=elsewhere)
    await contest.contest([healthy("ours")], [scenario], notes, rounds=1)
    # Twice to find out that it isn't calm, twice that it is, and around the measurement.
    assert len(asked) == 6
    assert (notes.rows[0].values["elsewhere_cores"] > 0.1) == disturbed


async def test_a_machine_that_never_is_calm_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = itertools.count()
    monkeypatch.setattr(contest, "busy_seconds", lambda: float(next(busy)))
    monkeypatch.setattr(contest, "_CALM_SECONDS", 0.01)
    monkeypatch.setattr(contest, "_CALM_PATIENCE", 0.05)
    await contest_of(["ours"], Fake(), rounds=1)
    assert "not calm after 0.05 s" in capsys.readouterr().out


def test_each_peer_is_measured_in_the_formats_that_it_has() -> None:
    made: list[tuple[str, str, int | None]] = []

    def make(name: str, setting: Setting) -> Server:
        made.append((name, setting.format, setting.kv_tokens))
        return healthy(name)

    servers = {name: partial(make, name) for name in ("", *OTHERS)}
    parts = parts_of(compare.SCENARIOS, ("bf16", "q4_1"), OTHERS, THROUGHPUT, servers)
    assert [part.title for part in parts] == [
        "bf16: throughput, prompts, burst, shared_prefix, cpu_after_leave",
        "q4_1: throughput",
        *("bf16: memory", "q4_1: memory", "q4_1: start"),
    ]
    assert [name for name, format, tokens in made if format == "bf16" and tokens is None] == [
        "",
        *OTHERS,
    ]
    assert {name for name, format, _ in made if format == "q4_1"} == {"", "llama.cpp"}
    assert {tokens for name, _, tokens in made if tokens} == {16384}
    assert parts_of(["start"], ["bf16"], [], THROUGHPUT, servers)[0].title == "bf16: start"


async def test_time_that_a_part_leaves_goes_to_those_after_it() -> None:
    left: list[float] = []

    async def run(notes: Notes, rounds: int, deadline: float) -> None:
        left.append(deadline - trio.current_time())

    parts = [compare.Part(title="", share=share, run=run) for share in (3.0, 1.0)]
    await compare.measure(parts, Notes(), 1, 1.0)
    assert left == pytest.approx([45.0, 60.0], abs=1.0)


def test_our_own_options_are_those_of_the_command_line() -> None:
    setting = Setting(format="bf16", streams=8, context=2048, kv_tokens=16384)
    argv = own_server(setting).argv(0)
    flags = argv[argv.index("--dtype") :]
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    # 30 layers, 3 heads, 64 numbers, keys and values, 2 bytes
    assert values["--kv-cache-memory-bytes"] == str(16384 * 30 * 3 * 64 * 2 * 2)
    assert values["--quantization"] == "none"
    assert "--dtype" not in own_server(Setting(format="q4_1")).argv(0)


def rows(values: dict[tuple[str, str, str, str], dict[str, float]]) -> list[Row]:
    """Two rounds, the second with half of each figure."""
    return [
        Row(
            scenario=scenario,
            case=case,
            server=server,
            format=format,
            round=round,
            values={name: value / (round + 1) for name, value in figures.items()},
        )
        for (scenario, case, server, format), figures in values.items()
        for round in range(2)
    ]


def widths(
    case: str, server: str, rate: float, ttft: float
) -> dict[tuple[str, str, str, str], dict[str, float]]:
    figures = {
        "tokens_per_second": rate,
        "ttft_p50_ms": ttft,
        "ttft_p99_ms": ttft,
        "itl_p99_ms": 10.0,
    }
    return {("throughput", case, server, "bf16"): figures}


def test_a_table_has_medians_and_the_ratio_of_each_round() -> None:
    found = rows(
        {**widths("1 stream", "trioserve", 4.0, 1.0), **widths("1 stream", "vllm", 2.0, 2.0)}
    )
    _, _, ours, theirs = table(found).splitlines()
    assert ours == "| 1 stream | trioserve bf16 | 2 | 3.0 | 1 | 1 | 7.5 |  |"
    assert theirs == "| 1 stream | vllm bf16 | 2 | 1.5 | 2 | 2 | 7.5 | 2.00 |"


def test_a_ratio_needs_both_in_the_same_round() -> None:
    found = rows(
        {**widths("1 stream", "trioserve", 4.0, 1.0), **widths("1 stream", "vllm", 2.0, 2.0)}
    )
    name = "tokens_per_second"
    assert ratios(found, "1 stream", "bf16", "trioserve", "vllm", name) == [2.0, 2.0]
    assert ratios(found[:3], "1 stream", "bf16", "trioserve", "vllm", name) == [2.0]
    assert ratios(found, "1 stream", "bf16", "trioserve", "llama.cpp", name) == []


def verdict(found: Sequence[Verdict], what: str, against: str = "") -> Verdict:
    (chosen,) = [one for one in found if one.what == what and against in one.against]
    return chosen


def test_targets_are_judged_against_the_best_peer_in_what_is_compared() -> None:
    values = {
        **widths("8 streams", "trioserve", 190.0, 10.0),
        **widths("8 streams", "vllm", 100.0, 9.0),
        **widths("8 streams", "llama.cpp", 90.0, 12.0),
        **widths("1 stream", "trioserve", 104.0, 5.0),
        **widths("1 stream", "llama.cpp", 100.0, 5.0),
    }
    found = judge(rows(values))
    rate = verdict(found, "8 streams, tokens/s")
    assert (rate.against, rate.reached, rate.met) == ("vllm bf16", 1.9, True)
    assert rate.verdict == "reached"
    first = verdict(found, "8 streams, TTFT p50")
    assert (first.against, first.met) == ("vllm bf16", False)
    assert verdict(found, "1 stream, tokens/s", "bf16").verdict == "**missed**"
    assert verdict(found, "1 stream, TTFT p50").met
    assert verdict(found, "32 streams, tokens/s").verdict == "not measured"
    assert "| 104 : 100" not in verdict_table(found)
    assert "| 78 : 75 |" in verdict_table(found)


def test_bounds_and_memory_are_judged() -> None:
    values = {
        ("cpu_after_leave", "", "trioserve", "bf16"): {"burnt_cpu_seconds": 0.2},
        ("cpu_after_leave", "", "vllm", "bf16"): {"burnt_cpu_seconds": 1.0},
        ("start", "", "trioserve", "q4_1"): {"first_token_seconds": 5.0},
        ("memory", "", "trioserve", "q4_1"): {"pss_mib": 500.0},
        ("memory", "", "llama.cpp", "q4_1"): {"pss_mib": 400.0},
    }
    found = judge(rows(values))
    leave = verdict(found, "CPU burnt after 16 clients leave")
    assert (leave.reached, leave.met, leave.detail) == (pytest.approx(0.15), True, "vllm: 0.75 s")
    assert verdict(found, "start to first token, default model").met is False
    assert verdict(found, "memory (PSS), MiB", "q4_1").reached == 1.25
    assert verdict(found, "memory (PSS), MiB", "bf16").met is None


def test_gaps_are_judged_against_the_peer_with_the_shortest() -> None:
    values = {
        **widths("8 streams", "trioserve", 190.0, 10.0),
        **widths("8 streams", "vllm", 100.0, 9.0),
        **widths("8 streams", "llama.cpp", 90.0, 12.0),
    }
    values["throughput", "8 streams", "llama.cpp", "bf16"]["itl_p99_ms"] = 8.0
    gaps = verdict(judge(rows(values)), "8 streams, ITL p99")
    assert (gaps.against, gaps.reached, gaps.met) == ("llama.cpp bf16", 1.25, False)


def test_a_verdict_says_how_many_rounds_it_is_from() -> None:
    values = {
        **widths("1 stream", "trioserve", 104.0, 5.0),
        **widths("1 stream", "llama.cpp", 100.0, 5.0),
        ("start", "", "trioserve", "q4_1"): {"first_token_seconds": 5.0},
        ("cpu_after_leave", "", "trioserve", "bf16"): {"burnt_cpu_seconds": 0.2},
    }
    found = rows(values)
    # The peer's second round failed: a ratio needs both.
    found = [row for row in found if (row.server, row.round) != ("llama.cpp", 1)]
    judged = judge(found)
    assert verdict(judged, "1 stream, tokens/s", "bf16").rounds == 1
    assert verdict(judged, "start to first token, default model").rounds == 2
    assert verdict(judged, "CPU burnt after 16 clients leave").rounds == 2
    assert verdict(judged, "32 streams, tokens/s").rounds is None
    assert "| ≤ 1.5 s | 3.75 s | 2 | **missed** |" in verdict_table(judged)


def test_a_case_that_was_disturbed_shows_among_many_that_were_not() -> None:
    quiet = {
        ("throughput", f"{n} streams", "ours", "bf16"): {"elsewhere_cores": 0.02} for n in "18"
    }
    disturbed = {("throughput", "32 streams", "ours", "bf16"): {"elsewhere_cores": 0.8}}
    alone = {("memory", "", "ours", "bf16"): {"elsewhere_cores": 0.04}}
    found = rows({**quiet, **disturbed, **alone})
    assert busy_cases(found) == pytest.approx(
        {
            "throughput, 1 streams": 0.015,
            "throughput, 8 streams": 0.015,
            "throughput, 32 streams": 0.6,
            "memory": 0.03,
        }
    )


def write_small_file(path: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_context_length(2048)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([1, 1, 3])
    numbers = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("token_embd.weight", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_in_another_format_is_the_same_model(tmp_path: Path) -> None:
    model = str(tmp_path / "tiny.gguf")
    write_small_file(model)
    path = gguf_file("q8_0", model, tmp_path)
    original, written = gguf.GGUFReader(model), gguf.GGUFReader(path)
    for name, field in original.fields.items():
        if name != "general.file_type" and not name.startswith("GGUF."):
            assert written.fields[name].contents() == field.contents()
    for a, b in zip(original.tensors, written.tensors, strict=True):
        assert a.name == b.name
        was, now = (gguf.dequantize(np.asarray(t.data), t.tensor_type) for t in (a, b))
        bound = 0.0 if was.ndim == 1 else np.abs(was).max() / 127
        assert np.abs(now - was).max() <= bound
    first = path.stat().st_mtime_ns
    assert gguf_file("q8_0", model, tmp_path).stat().st_mtime_ns == first
    assert gguf_file("q4_1", model, tmp_path) == Path(model)
    with pytest.raises(ValueError, match="formats are bf16, q8_0, q4_1, not 'q2'"):
        gguf_file("q2", model, tmp_path)


def counting() -> Server:
    """Open a server that answers everything with one token, and says so."""
    code = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.end_headers()
        usage = {"prompt_tokens": 4, "completion_tokens": 1}
        for event in ({"choices": [{"text": "hi"}]}, {"choices": [], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    return Server(
        name="counting",
        argv=lambda port: [sys.executable, "-c", code, str(port)],
        fields={},
        versions={},
    )


async def test_any_load_of_the_load_generator_is_asked_and_differs_each_round() -> None:
    words = "--dataset chat --turns 2 --input-tokens 4 --output-tokens 1 --num-prompts 3"
    load = Loads(name="load", loads=[f"{words} --concurrency 2 --warmup 1"])
    async with running(counting()) as one:
        for turn in load.warm_up():
            await turn.measure(one)
        (first,), (second,) = load.turns(0), load.turns(1)
        assert first.case == "2 streams"
        for turn in (first, second):
            taken = await turn.measure(one)
            assert taken.run is not None
            assert len(taken.run.records) == 6
            assert taken.answers == ()  # of chats, they part
    with pytest.raises(UsageError, match="--data"):
        options_of("--dataset sharegpt")


def test_no_scenario_asks_what_another_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their prompts don't even begin alike, since servers keep what they have computed."""
    asked: list[str] = []

    def note_points(*arguments: Any) -> Any:
        points, before = points_of(*arguments)
        # Those of one measurement may share a prefix, by intention.
        works = [work for work in (*(point.work for point in points), before) if work]
        asked.extend(str(work[0].turns[0].prompt)[:40] for work in works)
        return points, before

    def note(*arguments: Any) -> list[str]:
        found = exact_prompts(*arguments)
        asked.append(found[0][:40])
        return found

    monkeypatch.setattr(scenarios, "exact_prompts", note)
    monkeypatch.setattr(scenarios, "points_of", note_points)
    small = "--concurrency {0} --num-prompts {0} --input-tokens 9 --output-tokens 1"
    for scenario in (
        Loads(name="small", loads=[small.format(1), small.format(3)]),
        SHARED_PREFIX,
        PROMPTS,
        Burst(),
        CpuAfterLeave(),
    ):
        scenario.warm_up()
        for round in range(3):
            scenario.turns(round)
    assert len(asked) == len(set(asked)) == 44


@pytest.mark.parametrize(
    ("scenario", "format", "name"),
    [
        ("throughput", "bf16", "throughput"),
        ("throughput", "q4_1", "throughput_q4_1"),
        ("memory", "q4_1", "memory"),
    ],
)
def test_formats_of_throughput_have_tables_of_their_own(
    scenario: str, format: str, name: str
) -> None:
    row = Row(scenario=scenario, case="", server="ours", format=format, round=0, values={})
    assert table_name(row) == name
