"""All that needs a GPU in one call: the steps, their bounds and their order."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from bench import gpu
from bench.gpu import Step, kernel_names, run_steps, steps_of
from bench.kernel_cases.all import all_cases


def step(name: str, code: str, **fields: object) -> Step:
    values: dict[str, object] = {"part": "tests", "seconds": 60.0, **fields}
    return Step(name=name, command=[sys.executable, "-c", code], **values)  # type: ignore[arg-type]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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

    def test_a_quiet_step_shows_more_only_if_it_failed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_steps([step("good", "print('one\\ntwo')", quiet=True)], tmp_path, 60)
        assert "one" not in capsys.readouterr().out
        run_steps(
            [step("bad", "print('one\\ntwo'); raise SystemExit(1)", quiet=True)], tmp_path, 60
        )
        assert "one\ntwo" in capsys.readouterr().out

    def test_a_step_past_its_bound_is_ended_with_its_children(self, tmp_path: Path) -> None:
        child = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
        number = tmp_path / "number"
        inner = (
            "import os, pathlib, time\n"
            f"pathlib.Path({str(number)!r}).write_text(str(os.getpid()))\n"
            "time.sleep(600)\n"
        )
        [outcome] = run_steps([step("slow", child.format(inner), seconds=3.0)], tmp_path, 60)
        assert outcome.verdict == "out of time"
        deadline = time.monotonic() + 60
        while lives(int(number.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_what_has_no_time_left_is_not_run(self, tmp_path: Path) -> None:
        outcomes = run_steps(
            [step("slow", "import time; time.sleep(600)"), step("next", "")], tmp_path, 2
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
        of_kernels = [f"tests/kernels/{n}.py" for n in (*gpu.HOST_TESTS, *gpu.SANITIZED_TESTS)]
        named = [*gpu.WORKER_TESTS, *of_kernels]
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
