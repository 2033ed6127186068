"""Decode steps and the served model of the GPU's benchmark, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.decode_step import __main__ as decode_step
from bench.decode_step.batch import StepTimes, shares
from bench.decode_step.engine import Sample, parse_metrics, steady
from bench.kernels.roofline import Ceilings
from bench.random_model import TINY
from bench.report import table_of
from gpu.cuda.timeline import HostTimeline
from gpu.kernels.emulation import EmulatedLoader
from tests.kernels.tape import TapeCapturer, TapedLoader

H200 = Ceilings(copy=4.3e12, matrix=790e12)


class TestDecodeSteps:
    def test_the_script_runs_in_the_emulation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert decode_step.main(["--on", "emulation", "--out", str(tmp_path)]) == 0
        saved = json.loads(next(tmp_path.glob("decode-step-emulated-*.json")).read_text())
        modes = [(row["batch"], row["in flight"]) for row in saved["rows"]]
        assert modes == [("1x20", 1), ("1x20", 2), ("3x37", 1), ("3x37", 2)]
        assert "| 3x37 | eager | 2 | ran |" in capsys.readouterr().out

    def test_steps_are_captured_once_and_replayed(self) -> None:
        loader = TapedLoader(EmulatedLoader())
        stand = decode_step.Stand(
            loader=loader,
            model=decode_step.random_model(loader, TINY),
            timeline=HostTimeline(),
            capturer=TapeCapturer(loader),
            max_tokens=64,
        )
        scenario = decode_step.Scenario("3x20", 3, 20, 2)
        rows = decode_step.measure_scenario(stand, scenario, H200, graphs=True)
        assert [(row["launched"], row["in flight"]) for row in rows] == [
            ("graphs", 1),
            ("graphs", 2),
        ]
        assert [bool(row["targets"]) for row in rows] == [False, True]
        assert rows[0]["tokens/s"] > 0

    def test_figures_of_a_step_and_its_verdict(self) -> None:
        times = StepTimes(step=4.6e-3, device=4.5e-3, idle=0.15e-3, submit=1e-4)
        assert decode_step.verdict(times, 3.52e-3) == "≤ 1.10 floors: MISSED; idle < 2%: MISSED"
        row = decode_step.figures(times, 3.52e-3)
        assert table_of([row]).splitlines()[2] == "| 3.52 | 4.6 | 1.31 | 3.2% | 4.5 | 0.1 |"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
    def test_without_a_gpu_nothing_is_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            decode_step.main(["--engine"])
        assert "no GPU was found" in capsys.readouterr().err


def test_shares_of_a_step_by_kernel() -> None:
    events = [
        SimpleNamespace(key="gemm", count=10, self_device_time_total=3000.0),
        SimpleNamespace(key="cudaLaunchKernel", count=40, self_device_time_total=0.0),
        SimpleNamespace(key="decode_attention", count=4, self_device_time_total=6000.0),
        SimpleNamespace(key="silu_mul", count=4, self_device_time_total=1000.0),
    ]
    assert [list(row.values()) for row in shares(events, 2).values()] == [
        ["decode_attention", 2, 3000, "60.0%"],
        ["gemm", 5, 1500, "30.0%"],
        ["silu_mul", 2, 500, "10.0%"],
    ]


class TestEngine:
    def sample(self, at: float, running: int, steps: float) -> Sample:
        seconds = {"step_seconds": 0.009 * steps, "idle_seconds": 0.001 * steps}
        return {"at": at, "running": running, "steps": steps, "tokens": 4 * steps, **seconds}

    def test_only_the_time_counts_in_which_all_streams_run(self) -> None:
        samples = [self.sample(0.0, 3, 0), self.sample(1.0, 4, 50)]
        samples += [self.sample(1.0 + i, 4, 50 + 100 * i) for i in range(1, 6)]
        samples += [self.sample(7.0, 2, 600)]
        found = steady(samples, 4)
        assert found["seconds"] == 4.0
        assert found["step_seconds"] == pytest.approx(0.01)
        assert found["idle_share"] == pytest.approx(0.1)
        assert found["tokens_per_second"] == pytest.approx(400)

    @pytest.mark.parametrize("streams", [4, 5])
    def test_streams_that_never_run_together_are_no_result(self, streams: int) -> None:
        with pytest.raises(RuntimeError, match=f"{streams} streams never ran"):
            steady([self.sample(0.0, 4, 0), self.sample(1.0, 3, 9)], streams)

    def test_metrics_by_name(self) -> None:
        text = '# HELP a b\na{model_name="m"} 2.5\nb 1.0\nc{x="1",y="2"} 3.0\n'
        assert parse_metrics(text) == {"a": 2.5, "b": 1.0}

    def test_a_random_model_is_served_to_clients(self, tmp_path: Path) -> None:
        arguments = ["--engine", "--on", "emulation", "--out", str(tmp_path)]
        assert decode_step.main(arguments) == 0
        assert len(list(tmp_path.glob("engine-idle-emulated-*.json"))) == 1
