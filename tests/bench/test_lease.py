"""A rented GPU in three calls: what runs for how long, what is saved when a call is cut short."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from bench.kernels import __main__ as kernels
from bench.kernels.__main__ import all_cases
from bench.lease import call, plan, running
from bench.lease.call import Call, pack
from bench.lease.collect import members
from bench.lease.plan import (
    LIMIT,
    PARTS,
    RESERVE,
    ROOT,
    Setting,
    Stage,
    Step,
    kernel_names,
    stages_of,
)
from bench.lease.running import Machine, Outcome, run_stages

SETTING = Setting(on="gpu", python="python", results=Path("results"), install=("pip",))
CORES = 16


class Cut(Exception):
    """The call is killed."""


@attrs.define(eq=False)
class FakeProcess:
    """A command that adds to its table all the time, and ends after ``seconds``."""

    world: FakeWorld
    seconds: float
    began: float
    written: float = 0.0
    """Time at which it last added to its table."""
    ended: bool = False

    def poll(self) -> int | None:
        return 0 if self.world.time >= self.began + self.seconds else None


@attrs.define(eq=False)
class FakeWorld(Machine):
    """A clock that a sleep moves by a second, and processes that last for ``seconds``."""

    seconds: float
    cut: float = float("inf")
    time: float = 0.0
    processes: list[FakeProcess] = attrs.field(factory=list)
    commands: list[list[str]] = attrs.field(factory=list)
    most: int = 0
    look: Callable[[], None] = lambda: None
    """Called at every second."""

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(seconds, 1.0)
        for process in self.living():
            process.written = self.time
        self.look()
        if self.time >= self.cut:
            raise Cut

    def living(self) -> list[FakeProcess]:
        return [one for one in self.processes if not one.ended and one.poll() is None]

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> FakeProcess:
        log.touch()
        process = FakeProcess(self, self.seconds, self.time)
        self.processes.append(process)
        self.commands.append(list(command))
        self.most = max(self.most, len(self.living()))
        return process

    def end(self, process: FakeProcess) -> None:
        process.ended = True


def step(name: str, code: str = "", **fields: object) -> Step:
    values: dict[str, object] = {"command": (sys.executable, "-c", code), **fields}
    return Step(name=name, **values)  # type: ignore[arg-type]


def stage(*steps: Step, seconds: float = 60.0, **fields: object) -> Stage:
    return Stage(name="stage", steps=steps, seconds=seconds, **fields)  # type: ignore[arg-type]


def run_here(stages: Sequence[Stage], folder: Path, seconds: float = 60.0) -> list[Outcome]:
    """Run ``stages`` as processes of this machine."""
    world = Machine({})
    end = world.now() + seconds
    return run_stages(stages, world, end=end, cores=CORES, logs=folder, save=lambda outcomes: None)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestPlan:
    @pytest.mark.parametrize("part", PARTS)
    def test_the_bounds_fit(self, part: int) -> None:
        stages = stages_of(part, SETTING)
        assert sum(stage.seconds for stage in stages) <= LIMIT - RESERVE
        assert LIMIT <= 560

    def test_the_most_telling_comes_first(self) -> None:
        names = [[stage.name for stage in stages_of(part, SETTING)] for part in PARTS]
        assert names[0] == ["install", "doctor", "conformance", "tests", "step", "peers"]
        assert names[1][:4] == ["install", "peers", "kernels decode", "kernels prefill"]
        assert names[2] == ["install", "sanitizer controls", "sanitizers", "engine", "steps"]

    def test_every_step_has_a_log_of_its_own(self) -> None:
        for part in PARTS:
            steps = [(each.name, one) for each in stages_of(part, SETTING) for one in each.steps]
            logs = [running.log_name(*each) for each in steps]
            assert len(set(logs)) == len(logs)

    def test_few_processes_start_at_once(self) -> None:
        [tests] = [stage for stage in stages_of(1, SETTING) if stage.name == "tests"]
        assert len(tests.steps) > 20
        assert [running.processes(tests, cores) for cores in (1, 4, 16, 64)] == [1, 2, 6, 6]

    def test_every_kernel_is_in_one_group(self) -> None:
        grouped = [name for kernels, _ in plan.KERNEL_GROUPS.values() for name in kernels]
        assert sorted(grouped) == sorted({case.kernel for case in all_cases(tiny=False)})

    def test_the_files_that_it_names_exist(self) -> None:
        names = (*plan.HOST_TESTS, *plan.SANITIZED_TESTS)
        named = [*plan.WORKER_TESTS, *map(plan.kernel_tests, names)]
        assert [name for name in named if not (ROOT / name).exists()] == []

    def test_what_starts_there_needs_the_standard_library_alone(self) -> None:
        code = (
            "import bench.lease.__main__, sys\n"
            "known = sys.stdlib_module_names | {'bench', '__main__'}\n"
            "print({name.partition('.')[0] for name in sys.modules} - known)"
        )
        # Without the environment's packages, some of which start with every Python.
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "set()"


class TestSanitizers:
    def steps(self) -> dict[str, Step]:
        return {one.name: one for s in stages_of(3, SETTING) for one in s.steps}

    def test_each_kernel_has_an_option_of_its_own(self) -> None:
        command = self.steps()["racecheck lora"].command
        at = [i for i, word in enumerate(command) if word == "--kernel-name"]
        assert [command[i + 1] for i in at] == [f"kne={name}" for name in kernel_names()]
        assert not any("," in word for word in command)

    def test_all_kernels_of_ours_are_looked_at(self) -> None:
        names = kernel_names()
        sources = {path.stem for path in (ROOT / "gpu" / "kernels").glob("*.cu")}
        # One source has two kernels, each under a name of its own.
        sources = sources - {"tiled_attention"} | {"prefill_attention", "prefix_attention"}
        assert sources | {"multiply", "load_matrices", "copy_async"} <= set(names)
        assert "ENTRY" not in names
        # A filter that keeps but one of its options would keep the first or the last.
        assert not {names[0], names[-1]} & set(plan.CONTROLS.values())
        assert set(plan.CONTROLS.values()) <= set(names)

    @pytest.mark.parametrize("tool", plan.CONTROLS)
    def test_each_tool_has_a_planted_fault_to_report(self, tool: str) -> None:
        fault = plan.CONTROLS[tool]
        control, check = self.steps()[f"control {tool}"], self.steps()[f"{tool} lora"]
        assert control.command[-1] == fault
        assert (control.status, control.says) == (plan.REPORTED, fault)
        assert (check.status, check.says) == (0, "")
        # The same filter for both, so that a control shows what the filter lets through.
        end = control.command.index("python")
        assert control.command[:end] == check.command[: check.command.index("python")]

    def test_a_control_that_reports_nothing_fails(self, tmp_path: Path) -> None:
        def control(name: str, code: str) -> Step:
            return step(name, code, status=9, says="planted_race")

        steps = [
            control("unseen", "pass"),
            control("crashed", "print('planted_race'); raise SystemExit(1)"),
            control("other", "print('another kernel'); raise SystemExit(9)"),
            control("reported", "print('at planted_race(Parameters)'); raise SystemExit(9)"),
        ]
        outcomes = run_here([stage(*steps)], tmp_path)
        assert [one.verdict for one in outcomes] == ["failed", "failed", "failed", "ok"]


class TestRunning:
    def test_a_failure_does_not_stop_what_comes_behind(self, tmp_path: Path) -> None:
        missing = Step(name="none", command=("no-such-program-here",))
        bad = step("bad", "print('said before'); raise SystemExit(3)")
        outcomes = run_here([stage(bad, missing), stage(step("good"))], tmp_path)
        assert [one.verdict for one in outcomes] == ["failed", "failed", "ok"]
        assert "said before" in (tmp_path / "stage-bad.log").read_text()
        assert "no-such-program-here" in (tmp_path / "stage-none.log").read_text()

    def test_a_step_past_its_bound_is_ended_with_its_children(self, tmp_path: Path) -> None:
        number = tmp_path / "number"
        inner = (
            "import os, pathlib, time\n"
            f"pathlib.Path({str(number)!r}).write_text(str(os.getpid()))\n"
            "time.sleep(600)\n"
        )
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
        slow = stage(step("slow", code), step("next"), seconds=3.0)
        outcomes = run_here([slow], tmp_path, seconds=3.0)
        assert [one.verdict for one in outcomes] == ["out of time", "not run"]
        deadline = time.monotonic() + 60
        while lives(int(number.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_child_is_told_what_is_left(self, tmp_path: Path) -> None:
        world = FakeWorld(seconds=5.0)
        told = Step(name="told", command=("bench", "--seconds", plan.SECONDS))
        stages = [stage(step("first"), seconds=40), stage(told, seconds=100)]
        run_stages(stages, world, end=140.0, cores=4, logs=tmp_path, save=lambda outcomes: None)
        # What the first one left is its, too; eight seconds are for ending by itself.
        assert world.commands[1] == ["bench", "--seconds", "127"]

    def test_a_background_stage_starts_first_and_ends_last(self, tmp_path: Path) -> None:
        world = FakeWorld(seconds=5.0)
        behind = Stage(name="behind", steps=(step("b"),), seconds=9, background=True)
        outcomes = run_stages(
            [stage(step("a")), behind],
            world,
            end=99.0,
            cores=4,
            logs=tmp_path,
            save=lambda outcomes: None,
        )
        assert [one.step.name for one in outcomes] == ["a", "b"]
        assert world.processes[0].began == world.processes[1].began == 0.0


class TestEverySecond:
    """A call that is cut at any second has saved what there was ten seconds before."""

    def call(self, folder: Path, part: int, seconds: float = LIMIT) -> Call:
        return Call(
            part=part,
            on="gpu",
            out=folder / "out",
            prepared=folder / "none",
            seconds=seconds,
            scratch=folder,
        )

    @pytest.mark.parametrize("part", PARTS)
    def test_its_files_are_few_enough_to_come_back(self, tmp_path: Path, part: int) -> None:
        world = FakeWorld(seconds=70.0)
        self.call(tmp_path, part).run(0.0, world)
        assert world.processes
        files = list((tmp_path / "out").iterdir())
        assert [file.name for file in files] == [f"part-{part}.tar.gz"]
        assert "summary.md" in dict(members(files[0]))

    @pytest.mark.parametrize("part", PARTS)
    @pytest.mark.parametrize("seconds", [0.4, 37.0, 1e9])
    def test_it_ends_in_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, seconds: float
    ) -> None:
        monkeypatch.setattr(call, "pack", lambda folder, archive: None)
        world = FakeWorld(seconds=seconds)
        self.call(tmp_path, part).run(0.0, world)
        assert world.time <= LIMIT - RESERVE + 1
        assert all(one.ended for one in world.processes)
        assert world.most <= 9

    @pytest.mark.parametrize("part", PARTS)
    def test_what_is_not_saved_at_any_second_is_little(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
    ) -> None:
        packed, looked = [0.0], []

        def look() -> None:
            looked.append(world.time)
            written = max(one.written for one in world.processes)
            assert written - packed[-1] <= running.SAVE_EVERY + 1

        world = FakeWorld(seconds=97.0, look=look)
        monkeypatch.setattr(call, "pack", lambda folder, archive: packed.append(world.time))
        self.call(tmp_path, part).run(0.0, world)
        assert {int(second) for second in looked} >= set(range(1, int(world.time)))

    @pytest.mark.parametrize("part", PARTS)
    def test_a_cut_at_any_time_leaves_no_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
    ) -> None:
        monkeypatch.setattr(call, "pack", lambda folder, archive: None)
        for second in range(1, int(LIMIT), 37):
            world = FakeWorld(seconds=97.0, cut=second)
            with contextlib.suppress(Cut):
                self.call(tmp_path, part).run(0.0, world)
            assert world.processes
            assert all(one.ended for one in world.processes)

    def test_any_bound_is_kept_and_the_first_steps_have_their_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(call, "pack", lambda folder, archive: None)
        for seconds in range(int(RESERVE) + 1, int(LIMIT), 11):
            world = FakeWorld(seconds=50.0)
            self.call(tmp_path, 1, seconds).run(0.0, world)
            assert world.time <= seconds
            assert all(one.ended for one in world.processes)
            assert any("--doctor" in command for command in world.commands)


class TestArchive:
    def test_tables_are_whole_and_logs_end_where_they_ended(self, tmp_path: Path) -> None:
        work = tmp_path / "work"
        (work / "logs").mkdir(parents=True)
        (work / "logs" / "a.log").write_bytes(b"x" * (1 << 20) + b"the end")
        (work / "results").mkdir()
        (work / "results" / "table.json").write_bytes(b"1" * 300_000)
        archive = tmp_path / "part-1.tar.gz"
        pack(work, archive)
        found = dict(members(archive))
        assert found["logs/a.log"].endswith(b"xthe end")
        assert len(found["logs/a.log"]) < 200_000
        assert found["results/table.json"] == b"1" * 300_000
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["part-1.tar.gz"]


class TestOnTheEmulation:
    @pytest.mark.thorough
    @pytest.mark.parametrize(("part", "steps", "said"), [(1, 3, 1), (2, 5, 5), (3, 2, 2)])
    def test_each_part_from_the_command_line(
        self, tmp_path: Path, part: int, steps: int, said: int
    ) -> None:
        """Each says with ``said`` tables what its ``steps`` have found."""
        command = [sys.executable, "-m", "bench.lease", "run", "--part", str(part)]
        command += ["--on", "emulation", "--out", str(tmp_path / "out")]
        command += ["--folder", str(tmp_path / "none")]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        found = dict(members(tmp_path / "out" / f"part-{part}.tar.gz"))
        tables = [json.loads(found[name])["table"] for name in found if name.endswith(".json")]
        assert len(tables) == said
        assert all(table.startswith("| ") for table in tables)
        verdicts = [line.split(" | ")[2] for line in found["summary.md"].decode().splitlines()[4:]]
        assert verdicts == ["ok"] * steps

    def test_results_grow_case_by_case(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A benchmark that is killed in its second case has saved the first one."""
        cases = iter([0, KeyboardInterrupt])
        measure = kernels.measure

        def killed_later(*arguments: Any) -> Any:
            if next(cases):
                raise KeyboardInterrupt
            return measure(*arguments)

        monkeypatch.setattr(kernels, "measure", killed_later)
        chosen = ["--kernel", "silu_mul", "--kernel", "rms_norm"]
        with pytest.raises(KeyboardInterrupt):
            kernels.main(["--on", "emulation", "--out", str(tmp_path), *chosen])
        [saved] = tmp_path.glob("kernels-emulated-*.json")
        [case] = json.loads(saved.read_text())["rows"]
        assert case["kernel"] in ("silu_mul", "rms_norm")
