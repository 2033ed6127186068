"""The kernels' benchmark without a GPU: its clock, its references, its failures, its table."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from bench.kernels import __main__ as kernels
from bench.kernels import torch_attention
from bench.kernels.__main__ import all_cases, judge, measure
from bench.kernels.attention_data import AttentionSpec, make_data, reference
from bench.kernels.case import (
    Case,
    Contestant,
    Contestants,
    PeerAbsent,
    Setting,
    relative_error,
)
from bench.kernels.report import Row
from bench.kernels.roofline import Ceilings, Work
from bench.kernels.targets import Target
from bench.kernels.timing import buffer_sets, measure_in_turn, record
from gpu.kernels.emulation import EmulatedLoader


class TestTiming:
    def test_buffers_exceed_the_cache_threefold_within_reason(self) -> None:
        assert buffer_sets(10.0, 100) == 30
        assert buffer_sets(1000.0, 100) == 2
        assert buffer_sets(1.0, 10**9) == 64


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
        recording = record([clock.launch, clock.launch, clock.launch])
        assert recording.how == "graph"
        before = clock.now
        assert recording.seconds() == pytest.approx(1e-4)
        replays = 16  # one that isn't counted
        assert clock.now - before >= replays * 2e-3

    def test_what_cannot_be_captured_is_timed_from_python(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(monkeypatch, capturable=False)
        recording = record([clock.launch, clock.launch])
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
                for cache in (data.sets[0].cache.keys, data.sets[0].cache.values)
            )
            queries = data.sets[0].q[start : start + count].double()
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
    def case(self, contestants: Contestants | Exception) -> Case:
        def make(setting: Setting) -> Contestants:
            if isinstance(contestants, Exception):
                raise contestants
            return contestants

        return Case(kernel="k", shape="s", work=Work(8), make=make)

    def contestant(self, error: float) -> Contestant:
        return Contestant(launches=[lambda: None], error=lambda: error, tolerance=0.1)

    def measured(self, contestants: Contestants | Exception) -> Row:
        setting = Setting(loader=EmulatedLoader(), generator=torch.Generator(), cache_bytes=0)
        return measure(self.case(contestants), setting)

    def test_peers_that_lack_something_are_named(self) -> None:
        def absent() -> Contestant:
            raise PeerAbsent("not installed")

        def broken() -> Contestant:
            raise ValueError("no such size\nand more")

        measured = self.measured(
            {
                "ours": lambda: self.contestant(0.01),
                "absent": absent,
                "broken": broken,
                "wrong": lambda: self.contestant(0.5),
                "fine": lambda: self.contestant(0.0),
            }
        )
        assert measured["result"] == "right"
        assert measured["notes"] == {
            "absent": "absent: not installed",
            "broken": "failed: ValueError: no such size",
            "wrong": "wrong: error 0.5 over 0.1",
        }

    @pytest.mark.parametrize("error", [0.2, float("nan"), float("inf")])
    def test_a_wrong_kernel_is_not_timed(self, error: float) -> None:
        measured = self.measured({"ours": lambda: self.contestant(error)})
        assert measured["result"] == "FAILED"
        assert "wrong" in measured["notes"]["ours"]

    def test_a_kernel_that_raises_has_failed(self) -> None:
        measured = self.measured(RuntimeError("no"))
        assert measured["result"] == "FAILED"
        assert measured["notes"] == {"ours": "failed: RuntimeError: no"}

    def test_the_table_tells_ratios_peers_and_verdicts(self) -> None:
        case = attrs.evolve(
            self.case({}),
            targets=[Target(kind="floor", value=0.9), Target(kind="peer", value=1.0)],
        )
        notes = {"third": "absent: not installed"}
        measured = {"seconds": {"ours": 4e-6, "other": 6e-6}, "notes": notes}
        row = judge(case, measured, Ceilings(copy=2e6, matrix=1.0), {})
        assert row["bound"] == "memory"
        assert (row["floor µs"], row["of floor"]) == pytest.approx((4.0, 1.0))
        assert row["peers µs"] == "third absent, other 6.0"
        assert (
            row["targets"] == "≥ 0.9 of the floor: met (1.00); ≥ 1 times the best peer: met (1.50)"
        )
        failed = judge(case, {"seconds": {}, "notes": {}}, Ceilings(copy=2e6, matrix=1.0), {})
        assert failed["targets"].count("MISSED") == 1


@pytest.mark.thorough
def test_every_kernel_runs_in_the_emulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script itself, over tiny shapes: each case is right, and the results are written."""
    assert kernels.main(["--on", "emulation", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    saved = json.loads(next(tmp_path.glob("kernels-emulated-*.json")).read_text())
    assert saved["ceilings"] is None
    assert {case["kernel"] for case in saved["rows"]} == {
        case.kernel for case in all_cases(tiny=False)
    }
    for case in saved["rows"]:
        assert case["seconds"] == {}
        assert case["errors"]["ours"] >= 0
    assert "flashinfer: absent" not in printed  # a peer is said by its own name
    assert "flashinfer fa3 absent: needs a GPU" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main([])
    assert "no GPU was found" in capsys.readouterr().err
