"""The benchmarks for a GPU, as far as they go without one: arithmetic, verdicts, steps."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from bench import decode_step, gpu, kernels
from bench.decode_batch import StepTimes
from bench.engine_idle import ClientsFailed, Sample, parse_metrics, steady
from bench.gpu import Step, kernel_names, run_steps, steps_of
from bench.gpu_report import markdown_table
from bench.gpu_timing import DryRun, GraphStopwatch, buffer_sets, measure_in_turn
from bench.kernel_cases import Case, Contestant, Peer, PeerAbsent, Setting, Trial, relative_error
from bench.kernel_cases.all import all_cases
from bench.kernel_cases.attention_data import AttentionSpec, make_data, reference
from bench.kernel_peers import torch_attention
from bench.kernels import Measured, measure, summary, table
from bench.random_model import LLAMA_8B, TINY
from bench.roofline import (
    AttentionShape,
    Ceilings,
    Work,
    decode_attention,
    decode_step_parts,
    prefill_attention,
    rms_norm,
    rope_and_write,
    sampling,
    shared_prefix_attention,
    silu_mul,
)
from bench.targets import Result, Target, judge
from gpu.emulation import EmulatedLoader
from gpu.timeline import HostTimeline
from tests.kernels.tape import TapeCapturer, TapedLoader

H200 = Ceilings(copy=4.3e12, matrix=790e12)
LLAMA = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)


class TestRoofline:
    def test_a_floor_is_the_longer_of_the_two_times(self) -> None:
        ceilings = Ceilings(copy=100.0, matrix=1000.0)
        assert ceilings.floor(Work(50, 100)) == 0.5
        assert ceilings.bound(Work(50, 100)) == "memory"
        assert ceilings.floor(Work(50, 2000)) == 2.0
        assert ceilings.bound(Work(50, 2000)) == "matrix"
        assert ceilings.floor_of_parts([Work(50, 100), Work(50, 2000)]) == 2.5
        assert Work(1, 2) + Work(3, 4) == Work(4, 6)

    def test_decode_counts_keys_and_values_once(self) -> None:
        work = decode_attention(LLAMA, [1024] * 8)
        cache = 8 * 1024 * 2 * 8 * 128 * 2
        assert work.bytes == cache + 8 * 2 * 32 * 128 * 2
        assert work.flops == 8 * 1024 * 4 * 32 * 128

    def test_an_e4m3_cache_has_half_the_bytes_and_its_scales(self) -> None:
        shape = attrs.evolve(LLAMA, kv_bytes=1, scale_bytes=4)
        assert shape.kv_bytes_per_token == 2 * 8 * (128 + 4)

    @pytest.mark.parametrize(("count", "context"), [(1, 1), (5, 5), (3, 9), (4, 40), (1, 30)])
    @pytest.mark.parametrize("window", [None, 1, 4, 100])
    def test_pairs_and_keys_are_those_of_the_mask(
        self, count: int, context: int, window: int | None
    ) -> None:
        one = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=1)
        seen = [
            (query, key)
            for query in range(context - count, context)
            for key in range(query + 1)
            if window is None or key > query - window
        ]
        work = prefill_attention(one, [(count, context)], window)
        assert work.flops == 4 * len(seen)
        keys = len({key for _, key in seen})
        assert work.bytes == keys * one.kv_bytes_per_token + 2 * count * one.query_bytes_per_token

    def test_a_shared_prefix_is_read_once(self) -> None:
        work = shared_prefix_attention(LLAMA, 1024, [16, 32])
        alone = decode_attention(LLAMA, [1040, 1056])
        assert work.flops == alone.flops
        assert alone.bytes - work.bytes == 1024 * LLAMA.kv_bytes_per_token

    def test_small_kernels_take_the_published_times(self) -> None:
        """The floors that the design states for 8,192 tokens of Llama-3.1-8B, within 3%."""
        for work, microseconds in (
            (rms_norm(8192, 4096, residual=True), 62),
            (silu_mul(8192, 14336), 164),
            (rope_and_write(LLAMA, 8192), 47),
            (sampling(256, 128256), 31),
        ):
            assert H200.floor(work) * 1e6 == pytest.approx(microseconds, rel=0.03)

    @pytest.mark.parametrize(
        ("rows", "context", "milliseconds"),
        [(1, 1024, 3.52), (32, 1024, 4.49), (32, 8192, 11.5), (256, 1024, 12.9)],
    )
    def test_a_step_of_llama_takes_the_published_times(
        self, rows: int, context: int, milliseconds: float
    ) -> None:
        parts = decode_step_parts(LLAMA_8B, [context] * rows)
        assert H200.floor_of_parts(parts) * 1e3 == pytest.approx(milliseconds, rel=0.01)


class TestTargets:
    RESULT = Result(
        title="kernel a", floor=8e-6, seconds=10e-6, peers={"slow": 20e-6, "fast": 9e-6}
    )

    @pytest.mark.parametrize(
        ("target", "reached", "met"),
        [
            (Target(kind="floor", value=0.75), 0.8, True),
            (Target(kind="floor", value=0.85), 0.8, False),
            (Target(kind="microseconds", value=11.0), 10.0, True),
            (Target(kind="microseconds", value=9.0), 10.0, False),
            (Target(kind="peer", value=1.0), 0.9, False),
            (Target(kind="peer", value=1.0, of="slow"), 2.0, True),
            (Target(kind="peer", value=1.0, of="missing"), None, None),
            (Target(kind="case", value=1.6, of="kernel b"), 1.7, True),
            (Target(kind="case", value=1.6, of="kernel c"), None, None),
        ],
    )
    def test_verdicts(self, target: Target, reached: float | None, met: bool | None) -> None:
        other = attrs.evolve(self.RESULT, title="kernel b", seconds=17e-6)
        judged = judge(target, self.RESULT, {"kernel b": other})
        assert judged.met is met
        assert judged.reached == (None if reached is None else pytest.approx(reached))
        assert ("MISSED" in judged.text) == (met is False)

    def test_every_target_of_a_case_names_a_case_or_peer_that_exists(self) -> None:
        cases = all_cases(tiny=False)
        titles = [case.title for case in cases]
        assert len(set(titles)) == len(titles)
        for case in cases:
            for target in case.targets:
                assert target.kind != "case" or target.of in titles


class TestTiming:
    def test_buffers_exceed_the_cache_threefold_within_reason(self) -> None:
        assert buffer_sets(10.0, 100) == 30
        assert buffer_sets(1000.0, 100) == 2
        assert buffer_sets(1.0, 10**9) == 64

    def test_a_dry_run_runs_each_launch_once_and_has_no_time(self) -> None:
        ran: list[int] = []
        recording = DryRun().record([lambda: ran.append(1), lambda: ran.append(2)])
        assert ran == [1, 2]
        assert recording.seconds() != recording.seconds()


class Clock:
    """Stands in for the parts of torch.cuda that the stopwatch uses: a launch takes 100 µs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capturable: bool = True) -> None:
        self.now = 0.0
        self.capturing: list[object] | None = None
        self.capturable = capturable
        for name in ("CUDAGraph", "Event", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def launch(self) -> None:
        if self.capturing is None:
            self.now += 1e-4
        elif self.capturable:
            self.capturing.append(self)
        else:
            raise RuntimeError("operation not permitted when stream is capturing")

    def CUDAGraph(self) -> SimpleNamespace:
        held: list[object] = []

        def replay() -> None:
            self.now += 1e-4 * len(held)

        return SimpleNamespace(held=held, replay=replay)

    @contextlib.contextmanager
    def graph(self, graph: SimpleNamespace) -> Iterator[None]:
        self.capturing = graph.held
        try:
            yield
        finally:
            self.capturing = None

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            event.at = self.now

        event.record = record
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event


class TestStopwatch:
    def test_a_graph_is_long_enough_and_its_time_is_that_of_one_launch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(monkeypatch)
        recording = GraphStopwatch().record([clock.launch, clock.launch, clock.launch])
        assert recording.how == "graph"
        before = clock.now
        assert recording.seconds() == pytest.approx(1e-4)
        replays = 16  # one that isn't counted
        assert clock.now - before >= replays * 2e-3
        assert 0 <= GraphStopwatch().host_seconds([clock.launch]) < 1e-3

    def test_what_cannot_be_captured_is_timed_from_python(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(monkeypatch, capturable=False)
        recording = GraphStopwatch().record([clock.launch, clock.launch])
        assert recording.how == "eager"
        assert recording.seconds() == pytest.approx(1e-4)

    def test_contestants_take_turns(self) -> None:
        order: list[str] = []

        class One:
            how = "dry"

            def __init__(self, name: str) -> None:
                self.name = name

            def seconds(self) -> float:
                order.append(self.name)
                return float(len(order))

        times = measure_in_turn([One("a"), One("b")], rounds=2)
        assert order == ["a", "b", "a", "b"]
        assert times == [[1.0, 3.0], [2.0, 4.0]]


class TestReference:
    @pytest.fixture
    def setting(self) -> Setting:
        return Setting(
            loader=EmulatedLoader(), generator=torch.Generator().manual_seed(1), cache_bytes=0
        )

    def test_attention_is_torchs(self, setting: Setting) -> None:
        spec = AttentionSpec(
            rows=((3, 40), (1, 17)), num_heads=4, num_kv_heads=2, head_dim=16, window=9
        )
        data = make_data(spec, setting)
        found = reference(data)
        start = 0
        for row, (count, context) in enumerate(spec.rows):
            keys, values = (
                cache[data.pages(row)].transpose(1, 2).flatten(0, 1)[:context].double()
                for cache in (data.sets[0].k_cache, data.sets[0].v_cache)
            )
            queries = data.sets[0].queries(4)[start : start + count].double()
            places = torch.arange(context)
            own = torch.arange(context - count, context)[:, None]
            mask = (places <= own) & (places > own - 9)
            expected = torch.nn.functional.scaled_dot_product_attention(
                queries.transpose(0, 1),
                keys.transpose(0, 1).repeat_interleave(2, 0),
                values.transpose(0, 1).repeat_interleave(2, 0),
                attn_mask=mask,
            )
            assert relative_error(found[start : start + count], expected.transpose(0, 1)) < 1e-12
            start += count

    def test_shared_pages_stand_first_in_every_table(self, setting: Setting) -> None:
        spec = AttentionSpec(
            rows=((1, 40), (1, 70)), num_heads=2, num_kv_heads=2, head_dim=16, shared=32
        )
        tables = make_data(spec, setting).block_tables
        assert tables[0, :2].tolist() == tables[1, :2].tolist()
        named = tables[tables >= 0].tolist()
        assert len(set(named)) == spec.num_pages == 2 + 1 + 3
        assert tables[0, 3:].tolist() == [-1, -1]

    @pytest.mark.parametrize(
        "rows", [((1, 40),) * 3, ((24, 24),) * 2, ((5, 40),) * 2], ids=["decode", "prompt", "chunk"]
    )
    def test_torchs_attention_gets_the_same_keys(
        self,
        setting: Setting,
        monkeypatch: pytest.MonkeyPatch,
        rows: tuple[tuple[int, int], ...],
    ) -> None:
        monkeypatch.setattr(torch_attention, "needs_cuda", lambda: None)
        spec = AttentionSpec(rows=rows, num_heads=4, num_kv_heads=2, head_dim=16)
        contestant = torch_attention.sdpa(make_data(spec, setting), "MATH")
        assert contestant.error() < contestant.tolerance

    def test_a_nan_is_no_small_error(self) -> None:
        assert not relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) <= 1.0
        with pytest.raises(ValueError, match="shapes"):
            relative_error(torch.ones(2), torch.ones(1, 2))


class TestMeasure:
    def case(self, trial: Trial | Exception) -> Case:
        def make(setting: Setting) -> Trial:
            if isinstance(trial, Exception):
                raise trial
            return trial

        return Case(kernel="k", shape="s", work=Work(8), make=make)

    def contestant(self, error: float) -> Contestant:
        return Contestant(launches=[lambda: None], error=lambda: error, tolerance=0.1)

    def measured(self, trial: Trial | Exception) -> Measured:
        setting = Setting(loader=EmulatedLoader(), generator=torch.Generator(), cache_bytes=0)
        return measure(self.case(trial), setting, DryRun())

    def test_peers_that_lack_something_are_named(self) -> None:
        def absent() -> Contestant:
            raise PeerAbsent("not installed")

        def broken() -> Contestant:
            raise ValueError("no such size\nand more")

        measured = self.measured(
            Trial(
                ours=self.contestant(0.01),
                peers=[
                    Peer(name="absent", make=absent),
                    Peer(name="broken", make=broken),
                    Peer(name="wrong", make=lambda: self.contestant(0.5)),
                    Peer(name="fine", make=lambda: self.contestant(0.0)),
                ],
            )
        )
        assert not measured.failed
        assert set(measured.seconds) == {"ours", "fine"}
        assert measured.notes == {
            "absent": "absent: not installed",
            "broken": "failed: ValueError: no such size",
            "wrong": "wrong: error 0.5 over 0.1",
        }

    @pytest.mark.parametrize("error", [0.2, float("nan"), float("inf")])
    def test_a_wrong_kernel_is_not_timed(self, error: float) -> None:
        measured = self.measured(Trial(ours=self.contestant(error)))
        assert measured.failed
        assert "wrong" in measured.notes["ours"]
        assert "FAILED" in table([measured], None)

    def test_a_kernel_that_raises_has_failed(self) -> None:
        measured = self.measured(RuntimeError("no"))
        assert measured.failed
        assert measured.notes == {"ours": "RuntimeError: no"}

    def test_the_table_tells_ratios_peers_and_verdicts(self) -> None:
        case = attrs.evolve(
            self.case(Trial(ours=self.contestant(0.0))),
            targets=[Target(kind="floor", value=0.9), Target(kind="peer", value=1.0)],
        )
        measured = Measured(
            case=case,
            seconds={"ours": [4e-6, 3e-6, 5e-6], "other": [6e-6, 6e-6, 6e-6]},
            errors={"ours": 0.0, "other": 0.0},
            notes={"third": "absent: not installed"},
        )
        row = table([measured], Ceilings(copy=2e6, matrix=1.0)).splitlines()[-1]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[:6] == ["k", "s", "memory", "4.0", "4.0", "1.00"]
        assert cells[7] == "third absent, other 6.0"
        assert cells[8] == "≥ 0.9 of the floor: met (1.00); ≥ 1 times the best peer: met (1.50)"
        short = summary([measured], Ceilings(copy=2e6, matrix=1.0)).splitlines()[-1]
        assert short == "| k s  | 4.0 | 1.00  | other 6.0 | met met |"


def test_every_kernel_runs_in_the_emulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script itself, over tiny shapes: each case is right, and the results are written."""
    assert kernels.main(["--on", "emulation", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    saved = json.loads(next(tmp_path.glob("kernels-emulated-*.json")).read_text())
    assert saved["ceilings"] is None
    assert {case["kernel"] for case in saved["cases"]} == {
        case.kernel for case in all_cases(tiny=False)
    }
    for case in saved["cases"]:
        assert case["seconds"] == {}
        assert case["errors"]["ours"] >= 0
    assert "flashinfer: absent" not in printed  # a peer is said by its own name
    assert "flashinfer fa3 absent: needs a GPU" in printed


class TestDecodeSteps:
    def test_the_script_runs_in_the_emulation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert decode_step.main(["--on", "emulation", "--out", str(tmp_path)]) == 0
        saved = json.loads(next(tmp_path.glob("decode-step-emulated-*.json")).read_text())
        modes = [(step["scenario"]["rows"], step["in_flight"]) for step in saved["steps"]]
        assert modes == [(1, 1), (1, 2), (3, 1), (3, 2)]
        assert all(step["times"] is None for step in saved["steps"])
        assert "| 3x37  | 2         | ran    |" in capsys.readouterr().out

    def test_steps_are_captured_once_and_replayed(self) -> None:
        loader = TapedLoader(EmulatedLoader())
        stand = decode_step.Stand(
            loader=loader,
            model=decode_step.random_model(loader, TINY),
            timeline=HostTimeline(),
            capturer=TapeCapturer(loader),
            max_tokens=64,
        )
        scenario = decode_step.Scenario(rows=3, context=20, num_steps=2)
        one, two = decode_step.measure_scenario(stand, scenario, graphs=True)
        assert (one.in_flight, two.in_flight) == (1, 2)
        assert one.graphs
        assert two.graphs
        # Three steps to warm up and two that count, each time; the middle of each run.
        assert (one.context, two.context) == (22, 27)

    def test_the_table_judges_what_is_served_with(self) -> None:
        times = StepTimes(num_steps=10, step=4.6e-3, device=4.5e-3, idle=0.15e-3, submit=1e-4)
        one = decode_step.Measured(
            scenario=decode_step.SCENARIOS[0],
            graphs=True,
            in_flight=2,
            context=1100,
            times=times,
            prefill_tokens_per_second=1e4,
        )
        lines = decode_step.table(
            [one, attrs.evolve(one, in_flight=1)], LLAMA_8B, H200
        ).splitlines()
        assert "≤ 1.15 floors: MISSED; idle < 2%: MISSED" in lines[2]
        assert "3.52" in lines[2]
        assert "3.2%" in lines[2]
        assert "floors:" not in lines[3]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
    def test_without_a_gpu_nothing_is_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert decode_step.main(["--engine"]) == 1
        assert "no GPU was found" in capsys.readouterr().out


class TestEngine:
    def sample(self, at: float, running: int, steps: float) -> Sample:
        return Sample(
            at=at,
            running=running,
            steps=steps,
            step_seconds=0.009 * steps,
            idle_seconds=0.001 * steps,
            tokens=4 * steps,
        )

    def test_only_the_time_counts_in_which_all_streams_run(self) -> None:
        samples = [self.sample(0.0, 3, 0), self.sample(1.0, 4, 50)]
        samples += [self.sample(1.0 + i, 4, 50 + 100 * i) for i in range(1, 6)]
        samples += [self.sample(7.0, 2, 600)]
        found = steady(samples, 4)
        assert found.seconds == 4.0
        assert found.step_seconds == pytest.approx(0.01)
        assert found.idle_share == pytest.approx(0.1)
        assert found.tokens_per_second == pytest.approx(400)

    @pytest.mark.parametrize("streams", [4, 5])
    def test_streams_that_never_run_together_are_no_result(self, streams: int) -> None:
        with pytest.raises(ClientsFailed, match=f"{streams} streams never ran"):
            steady([self.sample(0.0, 4, 0), self.sample(1.0, 3, 9)], streams)

    def test_metrics_by_name(self) -> None:
        text = '# HELP a b\na{model_name="m"} 2.5\nb 1.0\nc{x="1",y="2"} 3.0\n'
        assert parse_metrics(text) == {"a": 2.5, "b": 1.0}

    def test_a_random_model_is_served_to_clients(self, tmp_path: Path) -> None:
        arguments = ["--engine", "--on", "emulation", "--streams", "3", "--out", str(tmp_path)]
        assert decode_step.main(arguments) == 0
        assert len(list(tmp_path.glob("engine-idle-emulated-*.json"))) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert "no GPU was found" in capsys.readouterr().out


def test_markdown_columns_line_up() -> None:
    lines = markdown_table(["a", "long"], [["1", "2"], ["333", "4"]]).splitlines()
    assert lines == ["| a   | long |", "|-----|------|", "| 1   | 2    |", "| 333 | 4    |"]


def step(name: str, code: str, **fields: object) -> Step:
    values: dict[str, object] = {"part": "tests", "seconds": 60.0, **fields}
    return Step(name=name, command=[sys.executable, "-c", code], **values)  # type: ignore[arg-type]


class TestSteps:
    def test_a_failure_does_not_stop_what_comes_behind(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        outcomes = run_steps(
            [
                step("bad", "print('said before'); raise SystemExit(3)"),
                Step(part="tests", name="none", command=["no-such-program-here"], seconds=9),
                step("good", "print('fine')"),
            ],
            tmp_path,
            60,
        )
        assert [outcome.verdict for outcome in outcomes] == ["failed", "failed", "ok"]
        printed = capsys.readouterr().out
        assert "said before" in printed
        assert "no-such-program-here" in printed
        assert (tmp_path / "tests-good.log").read_text() == "fine\n"

    def test_a_step_past_its_bound_is_ended_with_its_children(self, tmp_path: Path) -> None:
        child = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
        late = tmp_path / "late"
        inner = f"import time, pathlib; time.sleep(3); pathlib.Path({str(late)!r}).touch()"
        began = time.monotonic()
        [outcome] = run_steps([step("slow", child.format(inner), seconds=1.0)], tmp_path, 60)
        assert outcome.verdict == "out of time"
        assert time.monotonic() - began < 2.5
        time.sleep(3.2 - (time.monotonic() - began))
        assert not late.exists()

    def test_what_has_no_time_left_is_not_run(self, tmp_path: Path) -> None:
        outcomes = run_steps(
            [step("slow", "import time; time.sleep(30)"), step("next", "")], tmp_path, 2
        )
        assert [outcome.verdict for outcome in outcomes] == ["out of time", "not run"]

    def test_steps_together_overlap_and_early_ones_start_first(self, tmp_path: Path) -> None:
        def waits_for(name: str, own: str) -> str:
            return (
                "import pathlib, time\n"
                f"folder = pathlib.Path({str(tmp_path)!r})\n"
                f"(folder / {own!r}).touch()\n"
                f"while not (folder / {name!r}).exists(): time.sleep(0.02)\n"
            )

        outcomes = run_steps(
            [
                step("first", waits_for("early", "first")),
                step("a", waits_for("b", "a"), together=True),
                step("b", waits_for("a", "b"), together=True),
                step("background", waits_for("first", "early"), early=True),
            ],
            tmp_path,
            60,
        )
        assert [(o.step.name, o.verdict) for o in outcomes] == [
            ("first", "ok"),
            ("a", "ok"),
            ("b", "ok"),
            ("background", "ok"),
        ]

    def test_what_needs_a_gpu_is_only_there_with_one(self, tmp_path: Path) -> None:
        without = steps_of(gpu.PARTS, target=None, quick=False, out=tmp_path)
        assert {step.part for step in without} == {"doctor", "builds", "kernels", "steps"}
        having = steps_of(gpu.PARTS, target="sm_90a", quick=True, out=tmp_path)
        assert {step.part for step in having} == set(gpu.PARTS)
        tools = [step.command[2] for step in having if step.part == "sanitizer"]
        assert tools == ["memcheck", "racecheck", "synccheck", "initcheck"]
        [one] = steps_of(["tests"], target="sm_90a", quick=False, out=tmp_path)[:1]
        assert "--kernels-on=gpu" in one.command

    def test_every_kernel_is_in_one_group(self) -> None:
        grouped = [name for kernels, _ in gpu.KERNEL_GROUPS.values() for name in kernels]
        assert sorted(grouped) == sorted({case.kernel for case in all_cases(tiny=False)})

    def test_the_tests_that_it_names_exist(self) -> None:
        named = [*gpu.WORKER_TESTS, *gpu.SANITIZED_TESTS]
        assert [name for name in named if not Path(name).exists()] == []

    def test_the_sanitizers_look_at_every_kernel_of_ours(self) -> None:
        names = kernel_names()
        sources = {path.stem for path in Path("gpu/kernels").glob("*.cu")}
        assert sources <= set(names)

    def test_the_whole_script_says_that_there_is_no_gpu(self, tmp_path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        command = [sys.executable, "-m", "bench.gpu", "--parts", "doctor", "--out", str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert ended.stdout.splitlines()[-1].startswith("no GPU was found")
        assert '"cuda_available":false' in ended.stdout

    def test_an_unknown_part_is_refused(self) -> None:
        with pytest.raises(SystemExit):
            gpu.main(["--parts", "doctor,nonsense"])
